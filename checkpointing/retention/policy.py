"""Which checkpoints stay: a pure choice among names, and what each needs (format.md, section 13)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from checkpointing.format import names


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The checkpoints that a collection keeps besides `latest`, `verified`, tags and pins."""

    keep_last: int | None = None
    """Number of the newest that are kept, None for all."""
    keep_every: int | None = None
    """Steps in a window of which one checkpoint is kept, the first of the window in the newest history; None for
    none."""
    keep_bytes: int | None = None
    """What all kept checkpoints may take together, in bytes, counting shared objects once; None for no bound. The
    oldest go first, whatever the other fields say about them."""

    def __post_init__(self) -> None:
        for field in ("keep_last", "keep_every", "keep_bytes"):
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


def bounded(
    kept: Sequence[str], limit: int, protected: Collection[str], objects: Callable[[str], Mapping[str, int]]
) -> tuple[tuple[str, ...], int]:
    """Return those of `kept` (newest first) that stay if all may take `limit` bytes together, and the bytes they take.

    objects: the bytes of every object that a checkpoint needs, by name. Protected ones stay even if they take more.
    """
    needs = {name: objects(name) for name in kept}
    users = Counter(item for needed in needs.values() for item in needed)
    sizes = {item: size for needed in needs.values() for item, size in needed.items()}
    total = sum(sizes.values())
    dropped: set[str] = set()
    for name in reversed(kept):
        if total <= limit:
            break
        if name in protected:
            continue
        dropped.add(name)
        users.subtract(needs[name].keys())
        total -= sum(sizes[item] for item in needs[name] if not users[item])
    return tuple(name for name in kept if name not in dropped), total


def _firsts(committed: Sequence[str], every: int) -> Collection[str]:
    """Return one checkpoint per window of steps: the first one of the latest generation that made one there."""
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
