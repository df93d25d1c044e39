"""How two checkpoints differ, tensor by tensor, in words for a terminal and for a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from checkpointing.inspection.difference import Change, Difference, TensorDifference
from elastic3d.cli.ckpt.render.words import count, number, percent, shape, size

SIGN = {
    Change.CHANGED: "~",
    Change.RECUT: "?",
    Change.RESHAPED: "!",
    Change.ADDED: "+",
    Change.REMOVED: "-",
}
"""What a change is shown by."""


def common(one: TensorDifference) -> tuple[Hashable, ...]:
    """Return what tensors have in common that are shown as one."""
    specs = [(spec.dtype, spec.shape) if spec is not None else None for spec in (one.before, one.after)]
    sound = [stats is None or stats.sound for stats in (one.stats_before, one.stats_after)]
    return one.change, bool(one.unknown), *specs, *sound


def respecified(one: TensorDifference) -> str:
    """Return type and shape before and after, "" where they are the same."""
    if one.change is not Change.RESHAPED or one.before is None or one.after is None:
        return ""
    before, after = (f"{spec.dtype} {shape(spec.shape)}" for spec in (one.before, one.after))
    return f"  {before} -> {after}"


def changed(one: TensorDifference) -> str:
    """Return how much of a tensor changed."""
    if one.change is Change.RECUT:
        return "recut"
    if one.change is not Change.CHANGED:
        return str(one.change)
    if not one.changed:
        return "some, recut"
    return percent(one.changed, one.bytes) + (" or more" if one.unknown else "")


def rms(one: TensorDifference) -> str:
    """Return the root of its mean square, before and after."""
    before = one.stats_before.rms if one.stats_before is not None else None
    after = one.stats_after.rms if one.stats_after is not None else None
    if one.change in (Change.ADDED, Change.REMOVED):
        return number(after if one.change is Change.ADDED else before)
    return number(after) if before == after else f"{number(before)} -> {number(after)}"


def counted(changes: Difference) -> str:
    """Return how many tensors changed in which way."""
    numbers = Counter(one.change for one in changes.tensors)
    said = [f"{numbers[change]} {change}" for change in Change if numbers[change]]
    return f"{count(len(changes.tensors), 'tensor')}: {', '.join(said) or 'none'}"


def amount(changes: Difference, *, unsure: bool) -> str:
    """Return how many bytes changed. unsure: there are some that only values could compare."""
    least = "at least " if unsure else ""
    share = percent(changes.changed, changes.bytes)
    return f"{least}{size(changes.changed)} of {size(changes.bytes)} changed ({share})"
