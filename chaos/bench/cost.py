"""The cost of snapshots and ordered reduction per step: quiet jobs that differ in one thing, interleaved.

Each round plays the three variants one after the other, so that other load affects them alike; a round's cost is
the ratio of its medians.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from chaos.playing.play import play
from chaos.playing.setting import Setting
from chaos.servers.etcd import EtcdServer
from elastic3d.values import Layout

VARIANTS = {
    "fast, no snapshots": ("--reduction=fast", "--snapshot-every=0"),
    "ordered, no snapshots": ("--reduction=ordered", "--snapshot-every=0"),
    "fast, a snapshot each step": ("--reduction=fast", "--snapshot-every=1"),
}
BASE = "fast, no snapshots"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Median seconds per step of each variant in one round."""

    seconds: dict[str, float]

    def cost(self, variant: str) -> float:
        """Return how much longer the variant's step is than the base's, as a fraction."""
        return self.seconds[variant] / self.seconds[BASE] - 1


def one_round(layout: Layout, steps: int = 25) -> Round:
    """Play each variant once on four nodes."""
    seconds = {}
    for name, options in VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder, EtcdServer() as etcd:
            setting = Setting(steps=steps, layout=layout, options=(*options, "--checkpoint-every=0"))
            outcome = play(setting, etcd=etcd, workdir=Path(folder), name="bench")
        # The first steps build what later ones reuse.
        seconds[name] = statistics.median(step.seconds for step in outcome.picture.steps[5:])
    return Round(seconds=seconds)
