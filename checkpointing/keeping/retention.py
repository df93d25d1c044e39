"""Which checkpoints stay: a pure choice among names (format.md, section 13)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from checkpointing.format import names


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What a collection keeps besides `latest`, `verified`, tags and pins.

    keep_last: that many of the newest, None for all. keep_every: one for each so many steps, the first of its window
    of steps in the newest history; None for no more.
    """

    keep_last: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for field in ("keep_last", "keep_every"):
            value = getattr(self, field)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{field} is a whole number from 1 or None, not {value!r}")


def retained(committed: Sequence[str], retention: Retention, protected: Collection[str]) -> tuple[str, ...]:
    """Return those of `committed` (newest first) that stay, in the same order."""
    if retention.keep_last is None:
        return tuple(committed)
    chosen = {*protected, *committed[: retention.keep_last]}
    if retention.keep_every is not None:
        chosen.update(_firsts(committed, retention.keep_every))
    return tuple(name for name in committed if name in chosen)


def _firsts(committed: Sequence[str], every: int) -> Collection[str]:
    """Return one checkpoint per window of steps: of the latest generation that made one there, the first."""
    best: dict[int, tuple[tuple[int, int], str]] = {}
    for name in committed:
        parsed = names.parse_checkpoint(name)
        assert parsed is not None, "refs hold names of checkpoints only"
        save = parsed[0]
        rank = (-save.made_in, save.step)
        window = save.step // every
        if window not in best or rank < best[window][0]:
            best[window] = rank, name
    return [name for _, name in best.values()]
