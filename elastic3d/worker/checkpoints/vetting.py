"""Which committed checkpoints are vetted by what audits have said since, read from the store: see `health/vetted`.

Whatever leads can do this at any time, since each checkpoint says itself who made it and how far they were vouched for
then: what a newer checkpoint says about its nodes vets older ones, without anybody's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from checkpointing import Store, mark_vetted, read_latest
from checkpointing.errors import CheckpointError, NoCheckpoint
from checkpointing.format import names
from checkpointing.format.refs import Ref
from checkpointing.reading.reader import read_record
from elastic3d.health import vetted


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveAudits:
    """What audits vouch for in a generation under way: by node of it, the newest step."""

    generation: int
    clean: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vetting:
    """Where `vetted` points: a step, None for nowhere; `why` then. newest: to the newest checkpoint there is."""

    step: int | None
    why: str = ""
    newest: bool = False


LOOKED_AT = 64
"""Checkpoints back from the newest that are looked at: audits are more frequent than so many checkpoints."""

NOT_AUDITED = "the run that made the newest checkpoint was not audited: health=elastic3d.Health(audit=...) has it so"
NOT_YET = "no audit has vouched for all nodes that made a checkpoint yet"


def vet(store: Store, live: LiveAudits | None = None) -> Vetting:
    """Move `vetted` on as far as it may, and return where it points then.

    live: what is known beyond what the newest checkpoint says, see `vetted.clean_now`. CheckpointError if the store
    fails, or what must be read is damaged.
    """
    ref = read_latest(store)
    if ref is None or ref.checkpoint is None:
        return Vetting(step=None)
    newest = vetted.clean_nodes(read_record(store, ref.checkpoint).facts)
    clean: Mapping[str, int] = newest
    if live is not None:
        clean = vetted.clean_now(newest, ref.made_in, live.clean, live.generation)
    chosen = _newest(store, ref, clean)
    if chosen is not None:
        try:
            mark_vetted(store, chosen)
        except NoCheckpoint:
            pass  # a collection was faster
        else:
            ref = read_latest(store) or ref
    if ref.vetted is not None:
        return Vetting(step=_step(ref.vetted.checkpoint), newest=ref.vetted.checkpoint == ref.checkpoint)
    return Vetting(step=None, why=NOT_YET if newest else NOT_AUDITED)


def _newest(store: Store, ref: Ref, clean: Mapping[str, int]) -> str | None:
    """Return the newest checkpoint that is vetted and was not before; None for none."""
    for name in ref.committed[:LOOKED_AT]:
        if ref.vetted is not None and name == ref.vetted.checkpoint:
            return None
        step = _step(name)
        if ref.distrusts(name) or step > max(clean.values(), default=-1):
            continue
        try:
            made_by = vetted.clean_nodes(read_record(store, name).facts)
        except CheckpointError:
            continue  # damaged or gone: nobody is to be sent there
        if vetted.vets(made_by, step, clean):
            return name
    return None


def _step(name: str) -> int:
    parsed = names.parse_checkpoint(name)
    assert parsed is not None, "refs hold names of checkpoints only"
    return parsed[0].step
