"""Refs, and the decisions that move them: pure functions of a ref's contents (format.md, sections 8 and 9)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from checkpointing.format import names
from checkpointing.format.distrust import Distrust, refused, with_rules
from checkpointing.format.encoding import document, parse
from checkpointing.format.fields import Fields

LONGEST = 1024  # of `earlier`: 1,024 names are some 10 KB of a document
SPILLED = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A checkpoint that something points to, and the digest of its record."""

    checkpoint: str
    record_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Older:
    """A link to where the history goes on: the name of an object, and its digest."""

    name: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweeping:
    """The sweep that is under way: no commit may name what its tombstone lists.

    owner: the collector that deletes, "" while none does. shared: another one took it over, so that two may be
    deleting.
    """

    tombstone: str
    digest: str
    owner: str = ""
    shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """A sweep's tombstone whose deletions may still be under way, `until` a time of the store's clock."""

    name: str
    digest: str
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """The newest checkpoint, the others that are kept, and the generation that may write."""

    generation: int
    """The newest generation that has written the ref: the fence."""
    checkpoint: str | None = None
    """Name of the newest checkpoint, None until one was committed."""
    record_digest: str | None = None
    """Digest of its record, in hex."""
    step: int | None = None
    """Its step."""
    made_in: int | None = None
    """The generation whose training it holds."""
    earlier: tuple[str, ...] = ()
    """Checkpoints that it pointed to before, newest first."""
    older: Older | None = None
    """The link to those before `earlier`."""
    verified: Target | None = None
    """The newest checkpoint that was read back."""
    vetted: Target | None = None
    """The newest checkpoint of whose making every node was compared with others, at that step or later."""
    distrusted: tuple[Distrust, ...] = ()
    """Rules for checkpoints that no run goes on from."""
    tags: dict[str, Target] = field(default_factory=dict)
    """Checkpoints that have names, by name."""
    pins: dict[str, str] = field(default_factory=dict)
    """Reasons for which checkpoints must stay, by checkpoint."""
    sweeps: int = 0
    """How many sweeps have begun."""
    sweeping: Sweeping | None = None
    """The sweep that is under way."""
    quarantined: tuple[Quarantined, ...] = ()
    """Tombstones of ended sweeps whose deletions may still be under way."""
    changes: int = 0
    """How many swaps it has seen, as far as they were made by versions that count them."""
    write_id: str = ""
    """Random for each write: it shows whose write it was if the answer is lost."""

    @property
    def committed(self) -> tuple[str, ...]:
        """The checkpoints the ref itself lists, newest first; `checkpointing.reading.naming.committed` adds `older`."""
        return (self.checkpoint, *self.earlier) if self.checkpoint else ()

    @property
    def protected(self) -> frozenset[str]:
        """The checkpoints that no retention drops."""
        named = {target.checkpoint for target in self.tags.values()} | set(self.pins)
        marked = {target.checkpoint for target in (self.verified, self.vetted) if target}
        return frozenset(named | {target for target in (self.checkpoint,) if target} | marked)

    def distrusts(self, checkpoint: str) -> bool:
        """Return whether a rule refuses a checkpoint, by what its name says."""
        step, made_in = _numbers(checkpoint)
        return refused(self.distrusted, made_in, step)

    @property
    def condemning(self) -> tuple[Older, ...]:
        """The tombstones whose objects no commit may name."""
        on = (Older(name=self.sweeping.tombstone, digest=self.sweeping.digest),) if self.sweeping else ()
        return (*on, *(Older(name=tombstone.name, digest=tombstone.digest) for tombstone in self.quarantined))


class Verdict(StrEnum):
    """What to do about a ref."""

    MOVE = "move"
    DONE = "done"
    FENCED = "fenced"
    SUPERSEDED = "superseded"
    RECHECK = "recheck"  # a sweep has begun since packs were checked
    UNKNOWN = "unknown"  # the checkpoint is not committed, or no longer
    TAKEN = "taken"  # the name points to another checkpoint, or the sweep belongs to another owner


def decide_fence(ref: Ref | None, generation: int) -> Verdict:
    """Return whether `generation` may put itself into the ref."""
    if ref is None or ref.generation < generation:
        return Verdict.MOVE
    return Verdict.DONE if ref.generation == generation else Verdict.FENCED


def is_superseded(ref: Ref | None, save: names.Save) -> bool:
    """Return whether the ref has reached `save` or gone past it; once true, this stays true."""
    if ref is None or ref.step is None or ref.made_in is None:
        return False
    return (ref.made_in, ref.step) >= (save.made_in, save.step)


def comes_after(ref: Ref, other: Ref) -> bool:
    """Return whether `ref` was written after `other`, as far as what only grows shows it.

    A repair counts as sweeps. A version that does not know `changes` leaves it out: then those since count for nothing.
    """

    def grown(one: Ref) -> tuple[int, ...]:
        newest = (one.made_in or 0, one.step or 0) if one.checkpoint else (-1, -1)
        return one.sweeps, one.generation, *newest, one.changes

    return grown(ref) > grown(other)


def decide_commit(
    ref: Ref | None, save: names.Save, committed_in: int, record_digest: str, checked: int = 0
) -> Verdict:
    """Return whether the leader of `committed_in` may point the ref to its record of `save`.

    checked: `sweeps` of the ref before the save's objects were checked.
    """
    if ref is None:
        return Verdict.MOVE if checked == 0 else Verdict.RECHECK
    if ref.record_digest == record_digest or names.checkpoint(save, committed_in) in ref.earlier:
        return Verdict.DONE
    if ref.generation > committed_in:
        return Verdict.FENCED
    if is_superseded(ref, save):
        return Verdict.SUPERSEDED
    return Verdict.MOVE if ref.sweeps == checked else Verdict.RECHECK


def fenced_ref(ref: Ref | None, generation: int, write_id: str) -> Ref:
    """Return the ref with `generation` in it and the same target."""
    return dataclasses.replace(ref or Ref(generation=generation), generation=generation, write_id=write_id)


def committed_ref(ref: Ref | None, save: names.Save, committed_in: int, record_digest: str, write_id: str) -> Ref:
    """Return the ref pointing to the record of `save`; `earlier` may then be due for `spill`."""
    return dataclasses.replace(
        ref or Ref(generation=committed_in),
        generation=committed_in,
        checkpoint=names.checkpoint(save, committed_in),
        record_digest=record_digest,
        step=save.step,
        made_in=save.made_in,
        earlier=ref.committed if ref else (),
        write_id=write_id,
    )


def spill(ref: Ref) -> tuple[Ref, tuple[str, ...]]:
    """Return the ref with `earlier` shortened, and the names cut off, which now go before `older`; none while short."""
    if len(ref.earlier) <= LONGEST:
        return ref, ()
    return dataclasses.replace(ref, earlier=ref.earlier[:-SPILLED]), ref.earlier[-SPILLED:]


def decide_tag(ref: Ref | None, kept: Collection[str], name: str, target: Target, *, move: bool) -> Verdict:
    """Return whether `name` may point to `target`. kept: all committed checkpoints of the ref."""
    if ref is None or target.checkpoint not in kept:
        return Verdict.UNKNOWN
    there = ref.tags.get(name)
    if there == target:
        return Verdict.DONE
    return Verdict.MOVE if there is None or move else Verdict.TAKEN


def decide_verified(ref: Ref | None, kept: Collection[str], target: Target) -> Verdict:
    """Return whether `verified` may move to `target`; it never moves back in the order of commits."""
    if ref is None or target.checkpoint not in kept:
        return Verdict.UNKNOWN
    if ref.verified is None or _place(ref.verified.checkpoint) < _place(target.checkpoint):
        return Verdict.MOVE
    return Verdict.DONE if ref.verified == target else Verdict.SUPERSEDED


def decide_vetted(ref: Ref | None, kept: Collection[str], target: Target) -> Verdict:
    """Return whether `vetted` may move to `target`: never back in the order of commits, nor to what a rule refuses."""
    if ref is None or target.checkpoint not in kept:
        return Verdict.UNKNOWN
    if ref.vetted == target:
        return Verdict.DONE
    if ref.distrusts(target.checkpoint):
        return Verdict.SUPERSEDED
    if ref.vetted is None or _place(ref.vetted.checkpoint) < _place(target.checkpoint):
        return Verdict.MOVE
    return Verdict.SUPERSEDED


def decide_distrust(ref: Ref | None, rules: Collection[Distrust]) -> Verdict:
    """Return whether the ref still lacks any of these rules."""
    if ref is None:
        return Verdict.UNKNOWN
    return Verdict.DONE if with_rules(ref.distrusted, rules) == ref.distrusted else Verdict.MOVE


def distrusting_ref(ref: Ref, rules: Collection[Distrust], write_id: str) -> Ref:
    """Return the ref with these rules too; what was vetted and is refused by one is vetted no longer."""
    ruled = dataclasses.replace(ref, distrusted=with_rules(ref.distrusted, rules), write_id=write_id)
    if ruled.vetted is not None and ruled.distrusts(ruled.vetted.checkpoint):
        return dataclasses.replace(ruled, vetted=None)
    return ruled


def decide_pin(ref: Ref | None, kept: Collection[str], checkpoint: str, reason: str) -> Verdict:
    """Return whether `checkpoint` may be pinned; a new reason replaces the old one."""
    if ref is None or checkpoint not in kept:
        return Verdict.UNKNOWN
    return Verdict.DONE if ref.pins.get(checkpoint) == reason else Verdict.MOVE


def decide_begin(ref: Ref | None, tombstone: str) -> Verdict:
    """Return whether the sweep of `tombstone` may begin."""
    if ref is None:
        return Verdict.UNKNOWN
    if ref.sweeping is None:
        return Verdict.MOVE
    return Verdict.DONE if ref.sweeping.tombstone == tombstone else Verdict.TAKEN


def decide_take(ref: Ref | None, tombstone: str, owner: str, *, seen: str) -> Verdict:
    """Return whether `owner` may take over the deletion from `seen` ("" for nobody)."""
    if ref is None or ref.sweeping is None or ref.sweeping.tombstone != tombstone:
        return Verdict.UNKNOWN
    if ref.sweeping.owner == owner:
        return Verdict.DONE
    return Verdict.MOVE if ref.sweeping.owner == seen else Verdict.TAKEN


def decide_end(ref: Ref | None, tombstone: str, owner: str) -> Verdict:
    """Return whether `owner` may end the sweep of `tombstone`."""
    if ref is None or ref.sweeping is None or ref.sweeping.tombstone != tombstone:
        return Verdict.DONE
    return Verdict.MOVE if ref.sweeping.owner == owner else Verdict.TAKEN


def kept_ref(ref: Ref, earlier: tuple[str, ...], older: Older | None, now: float, write_id: str) -> Ref:
    """Return the ref listing `earlier` and `older` only, without the tombstones whose quarantine is over by `now`."""
    quarantined = tuple(tombstone for tombstone in ref.quarantined if tombstone.until > now)
    return dataclasses.replace(ref, earlier=earlier, older=older, quarantined=quarantined, write_id=write_id)


def begun_ref(ref: Ref, tombstone: Older, write_id: str) -> Ref:
    """Return the ref with the sweep of `tombstone` begun, and nobody deleting yet."""
    sweeping = Sweeping(tombstone=tombstone.name, digest=tombstone.digest)
    return dataclasses.replace(ref, sweeps=ref.sweeps + 1, sweeping=sweeping, write_id=write_id)


def taken_ref(ref: Ref, owner: str, write_id: str) -> Ref:
    """Return the ref with `owner` deleting; if another was deleting before, the two may overlap."""
    assert ref.sweeping is not None, "decided"
    shared = ref.sweeping.shared or ref.sweeping.owner != ""
    return dataclasses.replace(
        ref, sweeping=dataclasses.replace(ref.sweeping, owner=owner, shared=shared), write_id=write_id
    )


def ended_ref(ref: Ref, *, clean: bool, until: float, write_id: str) -> Ref:
    """Return the ref without its sweep; the tombstone is in quarantine unless all deletions are known to be over."""
    assert ref.sweeping is not None, "decided"
    tombstone = Quarantined(name=ref.sweeping.tombstone, digest=ref.sweeping.digest, until=until)
    over = clean and not ref.sweeping.shared
    quarantined = ref.quarantined if over else (*ref.quarantined, tombstone)
    return dataclasses.replace(ref, sweeping=None, quarantined=quarantined, write_id=write_id)


def _place(checkpoint: str) -> tuple[int, int]:
    step, made_in = _numbers(checkpoint)
    return made_in, step


def _numbers(checkpoint: str) -> tuple[int, int]:
    parsed = names.parse_checkpoint(checkpoint)
    assert parsed is not None, "refs hold names of checkpoints only"
    return parsed[0].step, parsed[0].made_in


def encode_ref(ref: Ref) -> bytes:
    """Return the ref's object. What only audited runs leave is left out where there is none."""
    fields = dataclasses.asdict(ref)
    for name in ("vetted", "distrusted"):
        if not fields[name]:
            del fields[name]
    return document("ref", fields)


def decode_ref(data: bytes, name: str) -> Ref:
    """Return the ref in the object `name`; FormatError for anything that format.md forbids."""
    fields = Fields(parse(data, "ref", name), name)
    earlier = fields.items("earlier")
    if any(names.parse_checkpoint(item) is None for item in earlier):
        raise fields.fail("earlier names something that is no checkpoint")
    sweeps, changes = (
        fields.integer(count) if fields.optional(count) is not None else 0 for count in ("sweeps", "changes")
    )
    ref = Ref(
        generation=fields.integer("generation"),
        earlier=tuple(earlier),
        older=_older(fields.optional("older"), name, names.is_history),
        verified=_target(fields.optional("verified"), name),
        vetted=_target(fields.optional("vetted"), name),
        distrusted=_distrusted(fields, name),
        tags=_tags(fields, name),
        pins=_pins(fields),
        sweeps=sweeps,
        sweeping=_sweeping(fields.optional("sweeping"), name),
        quarantined=_quarantined(fields, name),
        changes=changes,
        write_id=fields.text("write_id"),
    )
    if fields.raw("checkpoint") is None:
        return ref
    ref = dataclasses.replace(
        ref,
        checkpoint=fields.text("checkpoint"),
        record_digest=fields.digest("record_digest"),
        step=fields.integer("step"),
        made_in=fields.integer("made_in"),
    )
    parsed = names.parse_checkpoint(ref.checkpoint)
    if parsed is None or (parsed[0].step, parsed[0].made_in) != (ref.step, ref.made_in):
        raise fields.fail("checkpoint is not the name of one, or of another step")
    return ref


def _target(value: object, where: str) -> Target | None:
    if value is None:
        return None
    fields = Fields(value, where)
    if names.parse_checkpoint(fields.raw("checkpoint")) is None:
        raise fields.fail("points to something that is no checkpoint")
    return Target(checkpoint=fields.text("checkpoint"), record_digest=fields.digest("record_digest"))


def _older(value: object, where: str, fits: Callable[[object], bool]) -> Older | None:
    if value is None:
        return None
    fields = Fields(value, where)
    if not fits(fields.raw("name")):
        raise fields.fail(f"{fields.raw('name')!r:.80} is not the name of such an object")
    return Older(name=fields.text("name"), digest=fields.digest("digest"))


def decode_older(value: object, where: str) -> Older | None:
    """Return the link to a part of the history, None if there is none."""
    return _older(value, where, names.is_history)


def _distrusted(fields: Fields, where: str) -> tuple[Distrust, ...]:
    value = fields.optional("distrusted")
    if value is None:
        return ()
    if not isinstance(value, list):
        raise fields.fail("distrusted is not a list")
    rules = [Fields(item, where) for item in value]
    return tuple(Distrust(before=rule.integer("before"), step=rule.integer("step")) for rule in rules)


def _tags(fields: Fields, where: str) -> dict[str, Target]:
    value = fields.optional("tags")
    tags = {}
    for tag, item in _object(fields, "tags", value).items():
        target = _target(item, where)
        if not names.is_tag(tag) or target is None:
            raise fields.fail(f"{tag!r:.80} is not a tag")
        tags[tag] = target
    return tags


def _pins(fields: Fields) -> dict[str, str]:
    pins = {}
    for checkpoint, reason in _object(fields, "pins", fields.optional("pins")).items():
        if names.parse_checkpoint(checkpoint) is None or not isinstance(reason, str):
            raise fields.fail(f"{checkpoint!r:.80} is not a pinned checkpoint")
        pins[checkpoint] = reason
    return pins


def _object(fields: Fields, name: str, value: object) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise fields.fail(f"{name} is not an object")
    return value


def _sweeping(value: object, where: str) -> Sweeping | None:
    if value is None:
        return None
    fields = Fields(value, where)
    if not names.is_tombstone(fields.raw("tombstone")) or not isinstance(fields.raw("shared"), bool):
        raise fields.fail("sweeping names no tombstone")
    return Sweeping(
        tombstone=fields.text("tombstone"),
        digest=fields.digest("digest"),
        owner=fields.text("owner"),
        shared=bool(fields.raw("shared")),
    )


def _quarantined(fields: Fields, where: str) -> tuple[Quarantined, ...]:
    value = fields.optional("quarantined")
    if value is None:
        return ()
    if not isinstance(value, list):
        raise fields.fail("quarantined is not a list")
    objects = []
    for item in value:
        entry = Fields(item, where)
        until = entry.raw("until")
        if not names.is_tombstone(entry.raw("name")) or isinstance(until, bool) or not isinstance(until, int | float):
            raise entry.fail("quarantined names no tombstone, or no time")
        objects.append(Quarantined(name=entry.text("name"), digest=entry.digest("digest"), until=float(until)))
    return tuple(objects)
