"""The loss scale of fp16: part of the run's state, decided by the step vote and therefore the same on every rank.

Gradients below 2**-24 are zero in fp16 (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2): the loss is
scaled up, and the summed fp32 gradient down again. The scale is a power of two, so that neither rounds. It is halved
when a gradient has overflowed, and doubled after a long run of good steps; the figures are those of
torch.amp.GradScaler.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic3d.parallel.numerics.precision import Precision

FIRST = 2.0**16
LEAST = 2.0**-24
INTERVAL = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The scale of the next step's losses, and how many steps in a row were good with it. fixed: it never moves."""

    scale: float = FIRST
    good: int = 0
    fixed: bool = False

    @classmethod
    def of(cls, precision: Precision) -> LossScale:
        """Return the scale that a run begins with; 1, and fixed, if the compute dtype has the range of fp32."""
        return cls() if precision is Precision.FP16 else cls(scale=1.0, fixed=True)

    def after(self, *, finite: bool) -> LossScale:
        """Return the scale after a step."""
        if self.fixed:
            return self
        if not finite:
            return LossScale(scale=max(LEAST, self.scale / 2))
        if self.good + 1 == INTERVAL:
            return LossScale(scale=self.scale * 2)
        return LossScale(scale=self.scale, good=self.good + 1)

    def restored(self, saved: LossScale | None) -> LossScale:
        """Return the scale to go on with after a restore; a state saved in another precision does not have one."""
        return self if self.fixed or saved is None else saved
