"""Refs, and the decisions that move them: pure functions of what a ref says (format.md, sections 8 and 9)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum

from checkpointing.format import names
from checkpointing.format.encoding import document, parse
from checkpointing.format.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """Which checkpoint is the newest, and which generation may move on.

    generation: the newest that has written the ref, the fence. checkpoint: a name, None until one was committed;
    `record_digest`, `step` and `made_in` belong to it. earlier: checkpoints it pointed to before, newest first.
    """

    generation: int
    checkpoint: str | None = None
    record_digest: str | None = None
    step: int | None = None
    made_in: int | None = None
    earlier: tuple[str, ...] = ()
    write_id: str = ""

    @property
    def committed(self) -> tuple[str, ...]:
        """Every checkpoint that is committed, newest first."""
        return (self.checkpoint, *self.earlier) if self.checkpoint else ()


class Verdict(StrEnum):
    """What to do about a ref."""

    MOVE = "move"
    DONE = "done"
    FENCED = "fenced"
    SUPERSEDED = "superseded"


def decide_fence(ref: Ref | None, generation: int) -> Verdict:
    """Return whether `generation` may put itself into the ref."""
    if ref is None or ref.generation < generation:
        return Verdict.MOVE
    return Verdict.DONE if ref.generation == generation else Verdict.FENCED


def decide_commit(ref: Ref | None, save: names.Save, committed_in: int, record_digest: str) -> Verdict:
    """Return whether the leader of `committed_in` may point the ref to its record of `save`."""
    if ref is None:
        return Verdict.MOVE
    if ref.record_digest == record_digest or names.checkpoint(save, committed_in) in ref.earlier:
        return Verdict.DONE
    if ref.generation > committed_in:
        return Verdict.FENCED
    if ref.step is not None and ref.made_in is not None and (ref.made_in, ref.step) >= (save.made_in, save.step):
        return Verdict.SUPERSEDED
    return Verdict.MOVE


def fenced_ref(ref: Ref | None, generation: int, write_id: str) -> Ref:
    """Return the ref with `generation` in it and the same target."""
    return dataclasses.replace(ref or Ref(generation=generation), generation=generation, write_id=write_id)


def committed_ref(ref: Ref | None, save: names.Save, committed_in: int, record_digest: str, write_id: str) -> Ref:
    """Return the ref pointing to the record of `save`."""
    return Ref(
        generation=committed_in,
        checkpoint=names.checkpoint(save, committed_in),
        record_digest=record_digest,
        step=save.step,
        made_in=save.made_in,
        earlier=ref.committed if ref else (),
        write_id=write_id,
    )


def encode_ref(ref: Ref) -> bytes:
    """Return the ref's object."""
    return document("ref", dataclasses.asdict(ref))


def decode_ref(data: bytes, name: str) -> Ref:
    """Return the ref in the object `name`; FormatError for anything that format.md forbids."""
    fields = Fields(parse(data, "ref", name), name)
    earlier = fields.items("earlier")
    if any(names.parse_checkpoint(item) is None for item in earlier):
        raise fields.fail("earlier names something that is no checkpoint")
    generation, write_id = fields.integer("generation"), fields.text("write_id")
    if fields.raw("checkpoint") is None:
        return Ref(generation=generation, write_id=write_id, earlier=tuple(earlier))
    ref = Ref(
        generation=generation,
        checkpoint=fields.text("checkpoint"),
        record_digest=fields.digest("record_digest"),
        step=fields.integer("step"),
        made_in=fields.integer("made_in"),
        earlier=tuple(earlier),
        write_id=write_id,
    )
    parsed = names.parse_checkpoint(ref.checkpoint)
    if parsed is None or (parsed[0].step, parsed[0].made_in) != (ref.step, ref.made_in):
        raise fields.fail("checkpoint is not the name of one, or of another step")
    return ref
