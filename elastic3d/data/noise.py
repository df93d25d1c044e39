"""The gradient's noise scale, measured as a run goes, and the global batches that follow from it: pure functions.

A step of n samples in L leaves has a gradient g of squared norm S, which is that of n samples, and L gradients of n / L
samples each, whose squared norms have the mean s. Gradients of b samples spread about the true one by tr(C) / b, C
being the covariance of the gradients of single samples (McCandlish et al. 2018, arXiv:1812.06162, appendix A.1):

    E[S] = |G|^2 + tr(C) / n        E[s] = |G|^2 + tr(C) * L / n

so that both come without bias from s and S; their averages over many steps give the noise scale tr(C) / |G|^2. All
comes out of sums that have the same bits in every layout, and out of plain arithmetic, so that every rank of every
generation decides alike, and a step that is made again after a death decides again what it had decided.

With losses that are sums over tokens a leaf of t of the step's T tokens counts for t / T, and what was said of samples
holds of tokens; n samples of T tokens are counted as n samples of T / n.

The gain of AdaScale (Johnson et al. 2020, arXiv:2007.05105) is by how much a step of B samples brings on more than one
of B0: (tr(C) / B0 + |G|^2) / (tr(C) / B + |G|^2), between 1 and B / B0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastic3d.data.adaptive import ADASCALE, LINEAR, SQRT, Adaptive


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSquares:
    """What one step shows of its gradient's noise. samples: that make up its update.

    leaves: the squared norms of the gradients of its leaves, as they are summed. tokens: of each leaf, where losses are
    sums over tokens; () where they are means. norm: of the step's gradient.
    """

    samples: int
    leaves: Sequence[float]
    norm: float
    tokens: Sequence[float] = ()

    def estimates(self) -> tuple[float, float] | None:
        """Return estimates of (tr(C), |G|^2) without bias; None of what shows nothing."""
        squares = self.leaves
        if self.tokens:
            counted = [(square, count) for square, count in zip(squares, self.tokens, strict=True) if count > 0]
            number, total = len(counted), sum(count for _, count in counted)
            small = sum(square / count for square, count in counted) / total if counted else math.nan
        else:
            number = len(squares)
            small = number * sum(squares)
        if number < 2 or self.samples < 1:
            return None
        large = self.norm * self.norm
        variance = (small - large) * self.samples / (number - 1)
        gradient = (number * large - small) / (number - 1)
        if not math.isfinite(variance) or not math.isfinite(gradient) or not small:
            return None
        return variance, gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale:
    """What a run knows of its gradient's noise; a part of its state.

    variance: the average of tr(C). gradient: that of |G|^2. measured: from how many steps. changed: the step from which
    on the present size holds. why: in words, "" for the first one.
    """

    variance: float = 0.0
    gradient: float = 0.0
    measured: int = 0
    changed: int = 0
    why: str = ""

    def after(self, step: StepSquares, memory: int) -> NoiseScale:
        """Return what is known after one more step: the mean of all at first, and of the last `memory` or so later."""
        estimate = step.estimates()
        if estimate is None:
            return self
        share = 1.0 / min(self.measured + 1, memory)
        return replace(
            self,
            variance=self.variance + (estimate[0] - self.variance) * share,
            gradient=self.gradient + (estimate[1] - self.gradient) * share,
            measured=self.measured + 1,
        )

    @property
    def samples(self) -> float | None:
        """The noise scale in samples; None before any is measured. Infinite for a gradient that is lost in noise."""
        if not self.measured:
            return None
        variance = max(0.0, self.variance)
        if self.gradient > 0.0:
            return variance / self.gradient
        return math.inf if variance else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeChange:
    """Another global batch from `step` on. why: in words."""

    step: int
    size: int
    why: str


def decided(policy: Adaptive, noise: NoiseScale, size: int, step: int) -> SizeChange | None:
    """Return the change of the global batch from `step` on, None if it stays. size: of the step before."""
    scale = noise.samples
    if scale is None or noise.measured < policy.memory or step - noise.changed < policy.every:
        return None
    wanted, margin = policy.times * scale, 1.0 + policy.margin
    if size < wanted * margin and wanted < size * margin:
        return None
    least = max(policy.minimum, _multiple(policy, size / policy.most, up=True))
    most = min(policy.maximum, _multiple(policy, size * policy.most))
    chosen = most if wanted >= most else max(least, _multiple(policy, wanted + policy.multiple / 2))
    if chosen == size:
        return None
    why = "the gradient is lost in its noise" if math.isinf(scale) else f"its noise scale is {scale:.4g} samples"
    if chosen in (policy.minimum, policy.maximum):
        why += f", and {chosen} is the {'smallest' if chosen == policy.minimum else 'largest'}"
    elif chosen in (least, most):
        why += f", and {chosen} as far as it may go at once"
    return SizeChange(step=step, size=chosen, why=f"the global batch is {chosen} after {size}: {why}")


def _multiple(policy: Adaptive, size: float, *, up: bool = False) -> int:
    """Return the next size below, or above, that a batch may have."""
    whole = math.ceil(size / policy.multiple) if up else math.floor(size / policy.multiple)
    return whole * policy.multiple


def rate_factor(policy: Adaptive, noise: NoiseScale, size: int) -> float:
    """Return by what the learning rates of a step of `size` samples are multiplied."""
    larger = size / policy.start
    if policy.learning_rate == LINEAR:
        return larger
    if policy.learning_rate == SQRT:
        return math.sqrt(larger)
    if policy.learning_rate != ADASCALE:
        return 1.0
    variance, gradient = max(0.0, noise.variance), max(0.0, noise.gradient)
    whole = variance / size + gradient
    return (variance / policy.start + gradient) / whole if whole else 1.0
