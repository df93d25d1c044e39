"""Mixtures of experts: the layers, and their experts spread over data-parallel ranks.

    self.mlp = Top2(width, (Expert(width) for _ in range(8)))
    ...
    model = run.shard(lambda: GPT(config), blocks="blocks", experts="blocks.*.mlp.experts")

Outside the promise of equal bits: an expert sees the tokens of all ranks at once, in an order that depends on dp.
"""

from elastic3d.parallel.experts.layer import Experts, Top2

__all__ = ["Experts", "Top2"]
