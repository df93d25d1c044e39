"""Names of the numbers that elastic3d itself writes of every step, which a script's own numbers cannot have."""

from __future__ import annotations

OURS = frozenset(
    (
        "step",
        "at",
        "loss",
        "gradient_norm",
        "noise_scale",
        "step_seconds",
        "samples_per_second",
        "generation",
        "nodes",
        "ranks",
    )
)
