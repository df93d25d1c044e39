"""Models and machines for the planner's tests."""

from __future__ import annotations

from elastic3d.planner import Costs, Device, Link
from elastic3d.values import KeptActivations, ModelPart, ModelProfile

MIB = 2**20


def profile(
    *, blocks: int = 8, micro_batches: int = 16, heads: int = 8, scale: int = 1, recompute: str = "none"
) -> ModelProfile:
    """Return a small model: 1 M parameters a block, ends of 2 M each."""
    kept = {"none": KeptActivations(whole=2 * MIB, cut=6 * MIB), "full": KeptActivations(whole=MIB, again=2e9 * scale)}
    return ModelProfile(
        blocks=blocks,
        parameters=(blocks + 4) * 10**6 * scale,
        micro_batches=micro_batches,
        micro_batch=1,
        digest="d",
        first=ModelPart(parameters=2 * 10**6 * scale),
        block=ModelPart(parameters=10**6 * scale, cut=10**6 * scale, flops=2e9 * scale, kept=kept),
        last=ModelPart(
            parameters=2 * 10**6 * scale, flops=1e9 * scale, kept=dict.fromkeys(kept, KeptActivations(whole=4 * MIB))
        ),
        boundary=MIB,
        logits=MIB,
        heads=heads,
        recompute=recompute,
    )


def costs(
    *, memory: int = 2**40, flops: float = 1e12, between: float = 1e10, latency: float = 1e-5, cores: int = 0
) -> Costs:
    """Return machines whose devices do 1 TFLOP/s."""
    return Costs(
        device=Device(flops=flops, memory=memory, memory_bandwidth=1e12),
        inside=Link(bandwidth=1e11, latency=1e-6),
        between=Link(bandwidth=between, latency=latency),
        forward=1e-5,
        cores=cores,
    )
