"""Which buffer holds what, and which may be written again: pure bookkeeping, no bytes.

The invariant: once a step is safe, every rank's snapshot of it can be restored, from home or from the buddy, until a
newer step is safe or a newer generation has a safe step of its own. It holds because

- whether to take a snapshot is decided from what every rank knows (`Cadence`): the steps taken so far and the safe
  step of the last vote. So all ranks take the same steps, and the minimum over what they hold is a step that all took;
- snapshots are replicated in the order they were taken, so a rank that holds step t holds every taken step before it
  that has not been dropped;
- a rank drops a snapshot only when a newer one is safe (`Holdings.safe`), or when the new generation has restored from
  another (`Holdings.restored`), which then replaces the safe step. Until a generation has restored, nothing of its
  predecessors is dropped anywhere;
- what is lent to a trainer that restores from it is not overwritten before that trainer gives it back or ends;
- the buddy drops only what the origin's next snapshot says was dropped at home (`Replicas.begin`), and follows the
  same rules when the generation changes.

Home buffers: the safe step, two steps not yet safe, and one that an upload has pinned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from elastic3d.errors import StateError

HOME_BUFFERS = 4
_OUTSTANDING = 2


def most_copies(*, buddy: bool) -> int:
    """Return how many snapshots a slot's memory comes to hold, each of a rank's size: what a host must have room for.

    Every buffer at home is used in its turn, and none shrinks. buddy: there are other nodes, and this slot holds for
    one of theirs what that one has at home.
    """
    return HOME_BUFFERS * 2 if buddy else HOME_BUFFERS


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """Names a snapshot of one rank. Positional, since it is written and compared everywhere."""

    generation: int
    step: int


class Cadence:
    """Decides whether to take a snapshot, alike on every rank of a generation. Used in the trainer."""

    def __init__(self) -> None:
        self._outstanding: list[int] = []

    def voted(self, safe_step: int) -> None:
        """Take note of the safe step of a vote."""
        self._outstanding = [step for step in self._outstanding if step > safe_step]

    def take(self) -> bool:
        """Return whether to take the snapshot that is due now: at most two may wait to become safe."""
        return len(self._outstanding) < _OUTSTANDING

    def taken(self, step: int) -> None:
        """Take note of a snapshot."""
        self._outstanding.append(step)


class BufferState(StrEnum):
    """The states of a home buffer."""

    FREE = "free"
    GRANTED = "granted"  # the trainer may be writing
    HOME = "home"  # complete here
    BOTH = "both"  # complete here and at the buddy


@dataclass(slots=True)
class _Buffer:
    place: BufferState = BufferState.FREE
    trainer: int = 0  # that it was granted to
    mark: Mark | None = None
    busy: bool = False  # being hashed and sent
    refused: bool = False  # the buddy knows a newer generation


class Holdings:
    """The home buffers of one slot."""

    def __init__(self, buffers: int = HOME_BUFFERS) -> None:
        self._buffers = [_Buffer() for _ in range(buffers)]
        self._generation = 0
        self._safe: Mark | None = None
        self._held = -1
        self._altered = False
        self._pinned: Mark | None = None
        self._pin_users = 0
        self._lent: Counter[Mark] = Counter()
        self._wanted_by: int | None = None

    # The trainer's side.

    def grant(self, trainer: int = 0) -> list[int]:
        """Grant every free buffer to the trainer of this number; return those newly granted."""
        granted = []
        for index, buffer in enumerate(self._buffers):
            if buffer.place is BufferState.FREE:
                buffer.place, buffer.trainer = BufferState.GRANTED, trainer
                granted.append(index)
        return granted

    def want(self, trainer: int = 0) -> None:
        """Free a buffer for a final snapshot, now or as soon as one is idle, at the cost of one not yet safe.

        The safe step stays, since the generation would go back to it.
        """
        self._wanted_by = trainer
        self._sweep()

    def written(self, index: int, mark: Mark, *, checkpoint: bool) -> None:
        """Take note that the trainer has completed a snapshot in a buffer granted to it."""
        buffer = self._buffers[index]
        assert buffer.place is BufferState.GRANTED, (index, buffer)
        assert mark.generation >= self._generation, (mark, self._generation)
        buffer.place, buffer.mark, buffer.refused = BufferState.HOME, mark, False
        self._wanted_by = None
        if checkpoint and not self._pin_users:
            self._pinned = mark
        self._sweep()

    def trainer_gone(self, trainer: int = 0) -> None:
        """Take back what was granted to a trainer: what it was writing when it died is worthless.

        Not before it is gone: one that was killed may write for as long as the kernel takes to end it, while the next
        generation's has begun with the other buffers.
        """
        for buffer in self._buffers:
            if buffer.place is BufferState.GRANTED and buffer.trainer == trainer:
                buffer.place, buffer.mark = BufferState.FREE, None
        if self._wanted_by == trainer:
            self._wanted_by = None

    # Votes and generations.

    def restored(self, generation: int, base: Mark | None) -> None:
        """Begin the generation: of older ones, only the snapshot that it restored from is still needed.

        base: None if the state did not come from memory.
        """
        self._generation = generation
        self._safe = base
        self._held = -1
        self._altered = False
        self._sweep()

    def safe(self, mark: Mark) -> None:
        """Take note of a vote's safe step in the generation that restored last."""
        assert mark.generation == self._generation, (mark, self._generation)
        if self._safe is None or mark > self._safe:
            self._safe = mark
            self._sweep()

    # Replication.

    def next_to_replicate(self) -> Mark | None:
        """Return the oldest snapshot of the present generation that the buddy lacks; None behind an altered one."""
        if self._altered:
            return None
        waiting = [b for b in self._buffers if b.place is BufferState.HOME and not b.busy and not b.refused]
        marks = [b.mark for b in waiting if b.mark is not None]
        return min((mark for mark in marks if mark.generation >= self._generation), default=None)

    def begin(self, mark: Mark) -> int:
        """Hold a snapshot unchanged while it is hashed and sent; return its buffer."""
        index = self.find(mark)
        assert index is not None, mark
        self._buffers[index].busy = True
        return index

    def end(self, mark: Mark, *, held: bool, refused: bool = False) -> bool:
        """Stop holding it; return whether it is now the newest step held at home and at the buddy.

        held: the buddy has it. refused: there is no use in sending it again.
        """
        index = self.find(mark)
        assert index is not None, mark
        buffer = self._buffers[index]
        buffer.busy = False
        buffer.refused = refused
        if held:
            buffer.place = BufferState.BOTH
        newer = held and mark.generation == self._generation and mark.step > self._held
        if newer:
            self._held = mark.step
        self._sweep()
        return newer

    def altered(self, mark: Mark) -> bool:
        """Take note that a snapshot being sent is not as it was written; return whether nothing newer can be safe.

        Others may hold its step as their newest one: that must not become safe, as it would if newer ones counted here.
        One that is safe already is only of no use to a buddy.
        """
        needed = mark.generation == self._generation and (self._safe is None or mark > self._safe)
        self._altered |= needed
        return needed

    def buddy_changed(self) -> None:
        """Replicate again what only the former buddy has; until then nothing counts as held."""
        self._held = -1
        for buffer in self._buffers:
            buffer.refused = False
            if buffer.place is BufferState.BOTH:
                buffer.place = BufferState.HOME

    @property
    def base(self) -> Mark | None:
        """The newest snapshot known to be safe, to which the generation would go back; None where none is in memory."""
        return self._safe

    @property
    def held(self) -> int:
        """Newest step of the present generation held at home and at the buddy, -1 for none."""
        return self._held

    # Uploads.

    def pin(self, step: int) -> Mark:
        """Hold the newest snapshot of `step` until `release`; StateError if there is none, or another is pinned."""
        mark = max((m for m in self.marks() if m.step == step), default=None)
        if mark is None:
            raise StateError(f"the snapshot of step {step} is no longer in memory; nothing is lost, use a newer step")
        if self._pin_users and self._pinned != mark:
            raise StateError(
                f"step {step} cannot be pinned while step {self._pinned.step if self._pinned else -1} is being"
                " written; try again when that save has ended"
            )
        self._pinned = mark
        self._pin_users += 1
        return mark

    def release(self) -> None:
        """Undo one `pin`; the last one frees the snapshot."""
        assert self._pin_users > 0
        self._pin_users -= 1
        if not self._pin_users:
            self._pinned = None
            self._sweep()

    def unpin(self, step: int) -> None:
        """Free a snapshot that was taken for a checkpoint which will not be written; one in use stays."""
        if self._pinned is not None and self._pinned.step == step and not self._pin_users:
            self._pinned = None
            self._sweep()

    # Trainers of this node that restore from it.

    def lend(self, mark: Mark) -> int:
        """Hold a complete snapshot until as many `take_back`; return its buffer."""
        index = self.find(mark)
        assert index is not None, mark
        self._lent[mark] += 1
        return index

    def take_back(self, mark: Mark) -> None:
        """Undo one `lend`."""
        assert self._lent[mark] > 0, mark
        self._lent[mark] -= 1
        if not self._lent[mark]:
            del self._lent[mark]
            self._sweep()

    # Contents.

    def marks(self) -> list[Mark]:
        """Return the complete snapshots, oldest first."""
        return sorted(b.mark for b in self._buffers if b.mark is not None)

    def find(self, mark: Mark) -> int | None:
        """Return the buffer that holds a snapshot."""
        return next((index for index, b in enumerate(self._buffers) if b.mark == mark), None)

    def places(self) -> list[BufferState]:
        """Return the state of every buffer."""
        return [buffer.place for buffer in self._buffers]

    def _needed(self, mark: Mark) -> bool:
        if mark in (self._pinned, self._safe) or mark in self._lent:
            return True
        if mark.generation < self._generation:
            return False
        return self._safe is None or mark > self._safe

    def _sweep(self) -> None:
        for buffer in self._buffers:
            if buffer.mark is not None and not buffer.busy and not self._needed(buffer.mark):
                buffer.place, buffer.mark = BufferState.FREE, None
        none = not any(b.place in (BufferState.FREE, BufferState.GRANTED) for b in self._buffers)
        if self._wanted_by is not None and none:
            spare = [
                b
                for b in self._buffers
                if b.mark is not None and not b.busy and b.mark not in (self._pinned, self._safe, *self._lent)
            ]
            if spare:
                oldest = min(spare, key=lambda b: b.mark or Mark(0, 0))
                oldest.place, oldest.mark = BufferState.FREE, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The rank, in its generation, whose snapshot a replica is."""

    generation: int
    rank: int


class Replicas:
    """The replicas that this slot holds for others. The caller numbers the buffers; -1 is none."""

    def __init__(self) -> None:
        self._complete: dict[Origin, dict[int, int]] = {}
        self._receiving: dict[int, tuple[Origin, int]] = {}
        self._oldest = 0
        self._free: list[int] = []
        self._lent: Counter[int] = Counter()
        self._dropped: set[int] = set()  # while they are lent
        self._count = 0

    def refuse_below(self, generation: int) -> None:
        """Refuse snapshots of older generations from now on."""
        self._oldest = max(self._oldest, generation)

    def begin(self, origin: Origin, step: int, keep: Collection[int]) -> int | None:
        """Return the buffer to receive a snapshot into, None if its generation is too old.

        keep: the steps that the origin still has at home, including this one; all others of it are dropped.
        """
        if origin.generation < self._oldest:
            return None
        held = self._complete.get(origin, {})
        for old in [old for old in held if old not in keep or old == step]:
            self._drop(held.pop(old))
        if not self._free:
            self._free.append(self._count)
            self._count += 1
        buffer = self._free.pop()
        self._receiving[buffer] = (origin, step)
        return buffer

    def count(self, origin: Origin) -> int:
        """Return how many snapshots of an origin are held or arriving."""
        return len(self._complete.get(origin, {})) + sum(one == origin for one, _ in self._receiving.values())

    def complete(self, buffer: int) -> bool:
        """Take note that a snapshot has arrived intact; return whether it is held, and was not dropped meanwhile."""
        origin, step = self._receiving.pop(buffer)
        if origin.generation < self._oldest:
            self._free.append(buffer)
            return False
        held = self._complete.setdefault(origin, {})
        if step in held:
            self._drop(held[step])
        held[step] = buffer
        return True

    def abort(self, buffer: int) -> None:
        """Take note that a snapshot will not arrive."""
        del self._receiving[buffer]
        self._free.append(buffer)

    def restored(self, generation: int, base: Mark | None) -> None:
        """Drop what is older than `generation`, except the snapshot that it restored from."""
        for origin, held in list(self._complete.items()):
            if origin.generation < generation:
                for step in [s for s in held if base is None or Mark(origin.generation, s) != base]:
                    self._drop(held.pop(step))
                if not held:
                    del self._complete[origin]

    def follow(self, generation: int, base: Mark | None) -> None:
        """Drop what is older than `generation`, except `base`, where this slot only follows it, as a spare.

        base: what its nodes would go back to, by the word of one. Whoever trains in it hears votes, and needs no word.
        """
        if generation > self._oldest:
            self.restored(generation, base)

    def lend(self, buffer: int) -> None:
        """Let nothing else arrive in the buffer of a complete replica until as many `take_back`."""
        self._lent[buffer] += 1

    def take_back(self, buffer: int) -> None:
        """Undo one `lend`."""
        assert self._lent[buffer] > 0, buffer
        self._lent[buffer] -= 1
        if not self._lent[buffer]:
            del self._lent[buffer]
            if buffer in self._dropped:
                self._dropped.remove(buffer)
                self._free.append(buffer)

    def _drop(self, buffer: int) -> None:
        if buffer in self._lent:
            self._dropped.add(buffer)
        else:
            self._free.append(buffer)

    def settled(self, generation: int) -> None:
        """Drop what is older than `generation`, which has a safe step of its own."""
        self.restored(generation, None)

    def held(self) -> list[tuple[Origin, int, int]]:
        """Return (origin, step, buffer) of every complete replica."""
        return [(origin, step, buffer) for origin, steps in self._complete.items() for step, buffer in steps.items()]
