"""What the store holds of the islands, and how an outer step is sealed: frozen values, and pure functions of them.

Outer step k follows the inner step k * period, and merges how far islands had come `overlap` steps before. Its record
says whose deltas were merged, in the order in which they are added up, and who trains the next round on which chunk of
samples: chunk c is the positions [c * n, (c + 1) * n) of the keyed permutation that all islands share, n being the
samples that one island takes in a round. Whoever reads the records from the first one on knows all that islands have in
common, so that the outer parameters follow from them.

A chunk counts as consumed once the round of the island that had it is merged. One whose round was not is handed out
again, to the first island by name at the next outer step: no sample is lost, and none counts twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all islands of a run have in common; the first one writes it.

    model: digest of names, shapes and dtypes of the parameters, of which so many `parameters` are trained. initial: of
    the values that they and the buffers begin with. seed: of weights and dropout; data_seed: of the order of samples.
    data: the data set's fingerprint, "" for one without. lr, momentum: of the outer optimizer. mixing: the share of its
    own parameters that an island keeps at an outer step.
    """

    schema: int = SCHEMA
    model: str
    parameters: int
    initial: str
    seed: int
    data_seed: int
    data: str
    samples: int
    global_batch: int
    micro_batch: int
    leaf: int
    precision: str
    optimizer: str
    every: int
    fragments: int
    outer: str
    lr: float
    momentum: float
    overlap: int = 0
    mixing: float = 0.0

    def differences(self, there: Setup) -> list[str]:
        """Return in words where this island's setup is not the one that is there."""
        return [
            f"{_SPELLED.get(name, name)} is {getattr(there, name)!r} there, and {getattr(self, name)!r} here"
            for name in (one.name for one in fields(self))
            if getattr(self, name) != getattr(there, name)
        ]


_SPELLED = {
    "model": "the model's digest (names, shapes and dtypes)",
    "parameters": "the number of trained parameters",
    "initial": "the digest of the initial weights",
    "seed": "run.shard(seed=)",
    "data_seed": "run.batches(seed=)",
    "data": "the data set",
    "samples": "the data set's length",
    "optimizer": "the optimizer's class",
    "outer": "the outer optimizer",
    "lr": "the outer lr",
    "momentum": "the outer momentum",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SentDelta:
    """A delta that is in the store, whole. island: whose. folder: where. checkpoint, root: its name and its digest."""

    island: str
    folder: str
    checkpoint: str
    root: str
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """An outer step.

    merged: the deltas, in the order in which they are added up; none where it only admits islands. members: who trains
    the next round, and on which chunk. admitted: those of them that are new. refused: who asked to be, under the name
    of an island that is alive. lost: who had a chunk, and whose delta was not there in time. returned: chunks to be
    handed out again, for which there was no island; fresh: the first that was never handed out. known: the newest
    number of each name that was answered. by: who sealed it.
    """

    schema: int = SCHEMA
    outer: int
    merged: tuple[SentDelta, ...] = ()
    members: dict[str, int] = field(default_factory=dict)
    admitted: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    returned: tuple[int, ...] = ()
    fresh: int = 0
    known: dict[str, int] = field(default_factory=dict)
    by: str = ""

    def merges(self, island: str) -> bool:
        """Return whether an island's delta is part of it."""
        return any(one.island == island for one in self.merged)


def label(name: str, number: int) -> str:
    """Return what an island is called in the records: its name, and how often one of that name has joined."""
    return f"{name}.{number}"


def name_and_number(island: str) -> tuple[str, int]:
    """Return the name and the number of an island."""
    name, _, number = island.rpartition(".")
    return name, int(number)


def newest(islands: Iterable[str]) -> dict[str, int]:
    """Return the newest number of each name."""
    numbers: dict[str, int] = {}
    for name, number in map(name_and_number, islands):
        numbers[name] = max(number, numbers.get(name, 0))
    return numbers


def awaited(before: Sealed, sent: Collection[str], left: Collection[str]) -> list[str]:
    """Return the islands whose deltas an outer step still waits for. left: islands that are over."""
    return sorted(set(before.members) - set(sent) - set(left))


def first(joined: Iterable[str], left: Collection[str], *, by: str) -> Sealed:
    """Return the record of outer step 0: who trains the first round."""
    members = _pending(joined, {}, left)
    sealed = Sealed(outer=0, admitted=tuple(members), by=by)
    return _handed_out(sealed, members, pool=(), known=newest(members))


def following(
    before: Sealed, sent: Mapping[str, SentDelta], *, joined: Collection[str], left: Collection[str], by: str
) -> Sealed:
    """Return the record of the outer step after `before`, in which all deltas that are there are merged.

    sent: deltas of this outer step by island; those of islands that are no members do not count. joined: all that ever
    asked to be admitted. left: islands that are over.
    """
    merged = sorted(island for island in sent if island in before.members)
    alive = {name_and_number(one)[0] for one in merged if one not in left}
    asked = _pending(joined, before.known, left)
    sealed = Sealed(
        outer=before.outer + 1,
        merged=tuple(sent[one] for one in merged),
        admitted=tuple(one for one in asked if name_and_number(one)[0] not in alive),
        refused=tuple(one for one in asked if name_and_number(one)[0] in alive),
        lost=tuple(one for one in sorted(before.members) if one not in merged and one not in left),
        fresh=before.fresh,
        by=by,
    )
    members = sorted([*(one for one in merged if one not in left), *sealed.admitted])
    pool = sorted([*before.returned, *(chunk for one, chunk in before.members.items() if one not in merged)])
    return _handed_out(sealed, members, pool=pool, known={**before.known, **newest(asked)})


def _pending(joined: Iterable[str], known: Mapping[str, int], left: Collection[str]) -> list[str]:
    """Return who asked to join and was not answered yet, in order; of each name the newest."""
    asked = (label(name, number) for name, number in newest(joined).items() if number > known.get(name, 0))
    return sorted(one for one in asked if one not in left)


def _handed_out(sealed: Sealed, members: Iterable[str], *, pool: Iterable[int], known: Mapping[str, int]) -> Sealed:
    """Return the record with a chunk for each member: those that wait first, in order, then fresh ones."""
    waiting, fresh, chunks = list(pool), sealed.fresh, {}
    for one in members:
        if waiting:
            chunks[one] = waiting.pop(0)
        else:
            chunks[one], fresh = fresh, fresh + 1

    return replace(sealed, members=chunks, returned=tuple(waiting), fresh=fresh, known=dict(known))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkAccount:
    """What became of all chunks up to an outer step. consumed: merged once. repeated: merged more than once, never.

    waiting: to be handed out again. under_way: of the round that is not merged yet. missing: none of these, never.
    """

    consumed: int
    repeated: int
    waiting: int
    under_way: int
    missing: int

    @property
    def whole(self) -> bool:
        """Whether every chunk is accounted for once."""
        return not (self.repeated or self.missing)


def account(records: Iterable[Sealed]) -> ChunkAccount:
    """Return what became of the chunks by all records of a run, in order."""
    counts: dict[int, int] = {}
    before: Sealed | None = None
    for sealed in records:
        for one in sealed.merged:
            assert before is not None, "nothing is merged at outer step 0"
            chunk = before.members[one.island]
            counts[chunk] = counts.get(chunk, 0) + 1
        before = sealed
    if before is None:
        return ChunkAccount(consumed=0, repeated=0, waiting=0, under_way=0, missing=0)
    open_ = {*before.members.values(), *before.returned}
    return ChunkAccount(
        consumed=len(counts),
        repeated=sum(count > 1 for count in counts.values()) + len(open_ & counts.keys()),
        waiting=len(before.returned),
        under_way=len(before.members),
        missing=before.fresh - len(counts.keys() | open_),
    )
