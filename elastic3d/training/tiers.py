"""The places a trainer's state may come from: the memory of all keepers, this node's disk, then the store."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from checkpointing import Checkpoint, Ref, Store, open_checkpoint, read_latest, resolve_name
from checkpointing.errors import CheckpointError, FormatError, NewerFormat, NoCheckpoint, StoreUnfit
from checkpointing.format.announcement import Role
from checkpointing.format.names import parse_checkpoint
from checkpointing.reading.announcing import announced
from checkpointing.reading.naming import LATEST, VERIFIED, VETTED, history
from checkpointing.reading.packs import PackSource
from checkpointing.reading.sources import TileSource
from checkpointing.reading.tier import DiskTier
from checkpointing.stores.address import redacted
from elastic3d.distrust import Distrust, refused, with_rules
from elastic3d.errors import NothingLeft, StateError
from elastic3d.log import process_log
from elastic3d.port import NearMemory
from elastic3d.snapshots.client import Inventory, PeerSource, inventories, merged
from elastic3d.snapshots.lending import borrow
from elastic3d.storage import open_to_read
from elastic3d.training import restoring, state_facts
from elastic3d.trust.credentials import Credentials
from elastic3d.values import StoreAt

STORE_SOURCE, DISK_SOURCE = "store", "disk"


class KeepersAndStore:
    """The tiers of a job whose keepers hold snapshots. credentials: of the run, None if there are no keepers."""

    def __init__(self, credentials: Credentials | None) -> None:
        self._credentials = credentials

    def inventories(self, servers: Sequence[str]) -> Sequence[Inventory]:
        """Return what the reachable keepers hold, their own trainers' snapshots and replicas."""
        return merged(inventories(servers, self._credentials)) if self._credentials is not None else ()

    def checkpoint(
        self, at: StoreAt, wanted: str, damaged: Sequence[str], distrusted: Sequence[Distrust] = ()
    ) -> restoring.Decision | None:
        """Return the checkpoint asked for, None if nothing was ever committed; NothingLeft if there is none to take.

        "latest", "verified" and "vetted" fall back to older ones if they are damaged or refused by a rule, and the
        decision says so. Any other name is where the run began: once newer checkpoints descend from it, the newest of
        those is taken. The rules that the store itself has count too: they may be of another job.
        """
        try:
            store = open_to_read(at)
            ref = read_latest(store)
            if ref is None or ref.checkpoint is None:
                if wanted not in restoring.MOVING:
                    raise StateError(f"restore={wanted!r}: nothing was ever committed under {redacted(at.url)}")
                return None
            distrusted = with_rules(tuple(distrusted), ref.distrusted)
            if wanted not in restoring.MOVING:
                return self._begun_from(store, ref, wanted, damaged, distrusted).decision(at)
            candidates: Iterator[str] = committed_names(store, ref)
            if wanted != LATEST:
                first = _marked(ref, wanted, at)
                candidates = itertools.dropwhile(lambda name: name != first, candidates)
            newest = _newest(store, candidates, damaged, distrusted)
            if isinstance(newest, _Openable):
                return newest.decision(at, _vetted_word(ref, newest) if newest.distrusted >= 0 else "")
            return restoring.Decision(source=restoring.NONE, distrusted=newest)
        except (CheckpointError, OSError) as error:
            what = "the newest checkpoint" if wanted == LATEST else f"checkpoint {wanted!r}"
            raise (NothingLeft if isinstance(error, NoCheckpoint) else StateError)(
                f"{what} under {redacted(at.url)} cannot be read: {error}. "
                f"`elastic3d ckpt verify {redacted(at.url)}` says more"
            ) from error

    def _begun_from(
        self, store: Store, ref: Ref, wanted: str, damaged: Sequence[str], distrusted: Sequence[Distrust]
    ) -> _Openable:
        passed = -1
        try:
            newest = _newest(store, committed_names(store, ref), damaged, distrusted)
        except NoCheckpoint:
            pass
        else:
            if isinstance(newest, int):
                passed = newest
            elif state_facts.begun_from(newest.checkpoint.facts) == wanted:
                return newest
            else:
                passed = newest.distrusted
        name = resolve_name(store, wanted)
        if name in damaged:
            raise NoCheckpoint(f"its tiles are damaged, and restore={wanted!r} asks for this one and no other")
        named = open_checkpoint(store, name)
        if _distrusts(distrusted, named):
            return _Openable(checkpoint=named, insisted=True)
        return _Openable(checkpoint=named, distrusted=passed)

    def sources(
        self, decision: restoring.Decision, at: StoreAt | None, rank: int, near: Sequence[NearMemory] = ()
    ) -> Mapping[str, TileSource]:
        """Return one source per keeper that offers a tile, and the store, after this node's disk if it has one.

        This node's own keepers come first, and their memory is read where it lies. Each rank begins with another one
        of the others, so that tiles held by all are not requested from one alone.
        """
        names = decision.sources()
        sources: dict[str, TileSource] = dict(_borrowed(decision, near))
        names = [name for name in names if name not in sources]
        first = rank % len(names) if names else 0
        for name in [*names[first:], *names[:first]]:
            if name != STORE_SOURCE:
                assert self._credentials is not None, "a tile server offered a tile that cannot be requested"
                sources[name] = PeerSource(name, self._credentials)
            elif at is not None:
                sources |= _stored(at)
        return sources


def _marked(ref: Ref, wanted: str, at: StoreAt) -> str:
    """Return the checkpoint that `verified` or `vetted` points to; StateError where it points to none."""
    target = ref.verified if wanted == VERIFIED else ref.vetted
    if target is not None:
        return target.checkpoint
    why = "was verified yet" if wanted == VERIFIED else "is vetted: no audit has vouched for all nodes that made one"
    raise StateError(f"restore={wanted!r}: no checkpoint under {redacted(at.url)} {why}")


def _vetted_word(ref: Ref, chosen: _Openable) -> str:
    """Return in words whether a checkpoint that is taken in place of a refused one is vetted."""
    if ref.vetted is not None and ref.vetted.checkpoint == chosen.checkpoint.name:
        return "the checkpoint that is taken is vetted: every node that made it was audited afterwards"
    older = "none is" if ref.vetted is None else f"restore={VETTED!r} takes {ref.vetted.checkpoint}, which is"
    return f"the checkpoint that is taken is the newest that no rule refuses, and not vetted; {older}"


def _borrowed(decision: restoring.Decision, near: Sequence[NearMemory]) -> Iterator[tuple[str, TileSource]]:
    """Yield the decided snapshots that lie on this node, by server; those that cannot be had are asked for by TCP."""
    wanted = decision.snapshots()
    for one in near:
        if one.server in wanted:
            try:
                yield one.server, borrow(one.server, one.lender, sorted(wanted[one.server]))
            except OSError as error:
                process_log().emit("memory.unlent", server=one.server, error=str(error) or type(error).__name__)


def announced_read(decision: restoring.Decision, at: StoreAt | None) -> AbstractContextManager[object]:
    """Keep collections from the decided checkpoint while the block reads it; a no-op if none is read."""
    if decision.source != restoring.STORE or at is None:
        return nullcontext()
    return announced(open_to_read(at), Role.READER, decision.checkpoint)


def _stored(at: StoreAt) -> dict[str, TileSource]:
    """Return the store, after the disk that keeps what was read from it if there is one.

    The offers say what the tiles are and where they lie, so that no checkpoint is opened again.
    """
    packs = PackSource(open_to_read(at), STORE_SOURCE)
    if at.cache:
        try:
            return {DISK_SOURCE: DiskTier(at.cache, at.cache_bytes, behind=packs, name=DISK_SOURCE), packs.name: packs}
        except StoreUnfit as error:
            process_log().emit("cache.unfit", error=str(error))
    return {packs.name: packs}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Openable:
    """A checkpoint that can be opened. passed: newer ones that are damaged, with the reason if it is known.

    distrusted: the newest step that was passed over because a rule refuses it, -1 for none. insisted: a rule refuses
    this one too, and it was asked for by its name.
    """

    checkpoint: Checkpoint
    passed: Mapping[str, str] = field(default_factory=dict)
    distrusted: int = -1
    insisted: bool = False

    def decision(self, at: StoreAt, word: str = "") -> restoring.Decision:
        """Return it as a decision. word: what else a person should know about it."""
        detail = word
        if self.passed:
            damaged = "; ".join(name + (f" ({why})" if why else "") for name, why in self.passed.items())
            detail += "; " if detail else ""
            detail += (
                f"damaged under {redacted(at.url)}, and passed over: {damaged}; the newest that can be read is of step "
                f"{self.checkpoint.step}, and the steps after it are done again; `elastic3d ckpt verify` says more"
            )
        if self.insisted:
            detail = (
                "a rule refuses this state, since a device that computes wrongly took part in it, or the run went back "
                "behind it; it is taken because restore= names it"
            )
        return restoring.Decision(
            source=restoring.STORE,
            step=self.checkpoint.step,
            generation=self.checkpoint.made_in,
            facts=self.checkpoint.facts,
            offers=tuple(self.checkpoint.offers(STORE_SOURCE)),
            checkpoint=self.checkpoint.name,
            damaged=tuple(self.passed),
            distrusted=self.distrusted,
            detail=detail,
        )


def committed_names(store: Store, ref: Ref) -> Iterator[str]:
    """Yield all committed checkpoints, newest first; the history is read only when it is reached."""
    yield from ref.committed
    for part in history(store, ref.older):
        yield from part.checkpoints


def _distrusts(rules: Sequence[Distrust], checkpoint: Checkpoint) -> bool:
    """Return whether a rule refuses a checkpoint; never one that no run has made, such as an import."""
    return refused(rules, checkpoint.made_in, checkpoint.step) and state_facts.by_a_run(checkpoint.facts)


def _newest(
    store: Store, candidates: Iterable[str], damaged: Sequence[str], distrusted: Sequence[Distrust]
) -> _Openable | int:
    """Return the first that can be opened, is not known to be damaged, and is not refused by a rule.

    The newest step that is refused, if all are that could be taken otherwise; CheckpointError if all are damaged, or
    some are among those that no rule refuses: a person decides then.
    """
    passed: dict[str, str] = {}
    newest = -1
    last: CheckpointError | None = None
    for name in candidates:
        if name in damaged:
            passed[name] = "its tiles"
            continue
        try:
            checkpoint = open_checkpoint(store, name)
        except NewerFormat:
            raise
        except (FormatError, NoCheckpoint) as error:
            passed[name], last = str(error), error
            continue
        if not _distrusts(distrusted, checkpoint):
            return _Openable(checkpoint=checkpoint, passed=passed, distrusted=newest)
        newest = max(newest, checkpoint.step)
    trusted = [name for name in passed if not _named_in(distrusted, name)]
    if newest >= 0 and not trusted:
        return newest
    shown = ", ".join(trusted or passed)
    raise NoCheckpoint(f"none of its checkpoints is whole ({shown})" + (f": {last}" if last is not None else ""))


def _named_in(rules: Sequence[Distrust], name: str) -> bool:
    """Return whether a rule refuses a checkpoint, by what its name says."""
    parsed = parse_checkpoint(name)
    return parsed is not None and refused(rules, parsed[0].made_in, parsed[0].step)
