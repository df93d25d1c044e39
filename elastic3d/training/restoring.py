"""Where the state comes from: peers' memory before the store, the store before nothing; decided once, for all ranks.

Rank 0 asks all keepers what they hold and decides; the others get its decision by broadcast. From then on memory and
store look the same to every rank: tiles on offer, from which it takes those of its own boxes, and verifies them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from checkpointing.format.tiles import Box, TensorSpec, uncovered
from checkpointing.reading.sources import Offered, TileSource
from elastic3d.distrust import Distrust, refused
from elastic3d.errors import NothingLeft, StateError, StateUnfit
from elastic3d.log import process_log
from elastic3d.port import NearMemory
from elastic3d.rollback import Rollback, new_to
from elastic3d.snapshots import offer_columns
from elastic3d.snapshots.memory import SnapshotName
from elastic3d.snapshots.offer_columns import OfferColumns
from elastic3d.snapshots.offers import OfferedShard, SpelledOut, spell_out
from elastic3d.training import state_facts
from elastic3d.values import StoreAt

MEMORY, STORE, NONE = "memory", "store", "none"
OWN = "model/"
"""Where runs keep the tensors of their model."""
MOVING = ("latest", "verified", "vetted")
"""What `restore=` may name besides fixed checkpoints."""


class PeerInventory(Protocol):
    """What one keeper holds of one rank's snapshot of one step."""

    @property
    def generation(self) -> int:
        """The generation that made the snapshot."""
        ...

    @property
    def step(self) -> int:
        """The step after which it was made."""
        ...

    @property
    def facts(self) -> dict[str, Any]:
        """The state that is not tensors; equal for all ranks of one step."""
        ...

    def offers(self) -> Sequence[Offered | OfferedShard]:
        """Return all of it, in the resolver's form."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The state to go on from. source: "memory", "store" or "none". generation: the one that made it.

    checkpoint: its name, if it is one. damaged: names of newer ones that were found damaged and passed over.
    distrusted: the newest step that was passed over because a rule refuses it, -1 for none. detail: what a person
    should know about the choice, "" for nothing. provenance: of the states that the generation makes from here on, as
    `provenance.record` encodes it; "" where nothing is known.
    """

    source: str
    step: int = 0
    generation: int = 0
    facts: Mapping[str, Any] | None = None
    offers: Sequence[Offered | OfferedShard] = ()
    checkpoint: str = ""
    damaged: tuple[str, ...] = ()
    distrusted: int = -1
    detail: str = ""
    provenance: str = ""

    def sources(self) -> list[str]:
        """Return the names of all sources that hold some of it."""
        if isinstance(self.offers, OfferColumns):
            return sorted(self.offers.sources)
        names = {offer.source for offer in self.offers}
        copied = {offer.copies for offer in self.offers if isinstance(offer, OfferedShard)}
        return sorted(names.union(*copied))

    def specs(self) -> dict[str, TensorSpec]:
        """Return its tensors by key."""
        if isinstance(self.offers, OfferColumns):
            return self.offers.specs
        return {offer.spec.key: offer.spec for offer in self.offers}

    def snapshots(self) -> dict[str, set[SnapshotName]]:
        """Return the snapshots in keepers' memory that hold some of it, by server."""
        if isinstance(self.offers, OfferColumns):
            return self.offers.snapshots
        held: dict[str, set[SnapshotName]] = {}
        for offer in self.offers:
            if isinstance(offer, OfferedShard):
                for source in offer.sources:
                    held.setdefault(source, set()).add(SnapshotName(offer.generation, offer.step, offer.rank))
        return held


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known about the run besides the contents of the tiers.

    generation: the one that is about to begin; its state was made before it. newest: the newest step that any keeper of
    its nodes knows of, -1 if none knows of any. reached: a step that was safe in memory, as the membership's record
    says, 0 for none. fresh: the user accepts a start at step 0 although there was such a step. wanted: the checkpoint
    asked for: "latest", "verified" or what `checkpointing.resolve_name` takes. damaged: names of checkpoints that were
    found damaged while they were read. failed_after: the step after which the user's code raised, -1 if it did not.
    failure: its error, "" if that is not known. spoilt: the (step, generation) of states in memory of which a tile has
    no good copy. distrusted: rules for states that must not be gone on from. rollbacks:
    for which spikes of the loss some of these rules are.
    """

    generation: int
    newest: int = -1
    reached: int = 0
    fresh: bool = False
    wanted: str = "latest"
    damaged: tuple[str, ...] = ()
    spoilt: tuple[tuple[int, int], ...] = ()
    failed_after: int = -1
    failure: str = ""
    distrusted: tuple[Distrust, ...] = ()
    rollbacks: tuple[Rollback, ...] = ()


def is_foreign(decision: Decision) -> bool:
    """Return whether the state to load is not that of a run, but weights.

    It does not say which samples were consumed; or it does, but has no tensor where runs keep them: these are the
    weights that were exported from a run, with its facts beside them, and imported again.
    """
    if decision.facts is None:
        return False
    return not (state_facts.by_a_run(decision.facts) and any(key.startswith(OWN) for key in decision.specs()))


@runtime_checkable
class Nearer(Protocol):
    """A faster source for what another one offers: only this node knows it, and no decision names it."""

    def offers(self, offers: Iterable[Offered]) -> Iterable[Offered]:
        """Return another source's offers as its own."""
        ...


class Tiers(Protocol):
    """Access to the places that state may come from."""

    def inventories(self, servers: Sequence[str]) -> Sequence[PeerInventory]:
        """Return what the reachable tile servers hold."""
        ...

    def checkpoint(
        self, at: StoreAt, wanted: str, damaged: Sequence[str], distrusted: Sequence[Distrust] = ()
    ) -> Decision | None:
        """Return the checkpoint of a store that `wanted` names, None if the store has none yet.

        damaged: checkpoints not to take. distrusted: rules for others, beside those that the store has. An older one
        replaces the newest, or the newest verified or vetted one, if that is damaged or refused; the decision to begin
        with nothing, if all of them are refused. One that `wanted` names itself is taken even if it is refused.

        NothingLeft where all are damaged; another StateError where nobody can tell.
        """
        ...

    def sources(
        self, decision: Decision, at: StoreAt | None, rank: int, near: Sequence[NearMemory] = ()
    ) -> Mapping[str, TileSource]:
        """Return the sources that a decision's offers name, and this node's own, which are `Nearer` than the store.

        They are in the order in which `rank` is to ask them. near: servers on this node, whose memory is read instead
        of asking them. To be given to `close_sources` when nothing more is read.
        """
        ...


@runtime_checkable
class Closing(Protocol):
    """A source that holds something for as long as it is read."""

    def close(self) -> None:
        """Let go of it."""
        ...


def close_sources(sources: Mapping[str, TileSource]) -> None:
    """Let go of connections, and of memory that others must not overwrite while it is read."""
    for source in sources.values():
        if isinstance(source, Closing):
            source.close()


def offers(
    decision: Decision, sources: Mapping[str, TileSource], wanted: Iterable[tuple[TensorSpec, Box]]
) -> SpelledOut:
    """Return the tiles on offer to this node: a decision's offers, and what nearer sources make of the store's.

    Of what is in memory only what can be of use for what is wanted, and second copies only as a spare.
    """
    tiles = spell_out(decision.offers, wanted, sources)
    stored = [tile for tile in tiles if tile.source == STORE]
    tiles[:0] = [tile for source in sources.values() if isinstance(source, Nearer) for tile in source.offers(stored)]
    return tiles


AHEAD = 64
"""Steps by which a snapshot may be ahead of what the keepers know: they learn of steps a moment after the ranks."""


def believed(inventory: PeerInventory, known: Known) -> bool:
    """Return whether the membership could have seen what a snapshot claims to be.

    Its generation must have been sealed before the one that begins, and its step must not be far beyond the newest one
    that the keepers know of. If no keeper of the generation has trained before, or none lately, by the sealed record,
    the step is taken on trust: they were spares.
    """
    if not 0 < inventory.generation < known.generation or inventory.step < 0:
        return False
    return known.newest < max(0, known.reached) or inventory.step <= known.newest + AHEAD


def choose(
    inventories: Sequence[PeerInventory], specs: Iterable[TensorSpec], known: Known
) -> list[PeerInventory] | None:
    """Return the inventories of the newest (step, generation) that is whole, None if there is none.

    Whole means that every tensor of the model, and every other one that any inventory names, is covered. Snapshots that
    the membership cannot have seen do not count (`believed`), nor those found damaged. Nor, if the user's code raised,
    does the state right after that step: going on from there, whatever raised (an evaluation after the step, say) would
    be skipped rather than done again, and the job would end as if all were well.
    """
    wanted = {spec.key: spec for spec in specs}
    by_moment: dict[tuple[int, int], list[PeerInventory]] = {}
    for inventory in inventories:
        if not believed(inventory, known):
            process_log().emit(
                "snapshot.unbelieved", step=inventory.step, made_in=inventory.generation, newest=known.newest
            )
            continue
        by_moment.setdefault((inventory.step, inventory.generation), []).append(inventory)
    for moment in sorted(by_moment, reverse=True):
        if moment[0] != known.failed_after and moment not in known.spoilt and _whole(by_moment[moment], wanted):
            return by_moment[moment]
    return None


def _whole(inventories: Sequence[PeerInventory], wanted: Mapping[str, TensorSpec]) -> bool:
    specs = dict(wanted)
    boxes: dict[str, list[Box]] = {key: [] for key in wanted}
    for inventory in inventories:
        for offer in inventory.offers():
            specs.setdefault(offer.spec.key, offer.spec)
            if specs[offer.spec.key] != offer.spec:
                return False
            boxes.setdefault(offer.spec.key, []).append(offer.box)
    return all(uncovered(specs[key], boxes[key]) is None for key in specs)


def decide(
    tiers: Tiers, servers: Sequence[str], at: StoreAt | None, specs: Iterable[TensorSpec], known: Known
) -> Decision:
    """Return what to go on from: the newest whole state in memory, else the checkpoint asked for, else nothing.

    States that a rule refuses count as if they were not there, and the decision says so: where none is left, the run
    begins at step 0 again, since nobody could choose better. What is in memory then is no longer the newest state by
    itself, and the store is asked too. A run that went back for a spike of its loss, far from its beginning, rather
    goes on from what is in memory, if the older state is gone that there was.

    StateError if steps were once safe and nothing is left of them, or of those before such a spike; StateUnfit if the
    only state was made right after the step at which the user's code raised, so that the error would be skipped.
    """
    offered = tiers.inventories(servers) if servers else ()
    held = [one for one in offered if not refused(known.distrusted, one.generation, one.step)]
    doubtful = [one for one in offered if refused(known.distrusted, one.generation, one.step)]
    chosen = choose(held, specs, known) if servers else None
    if chosen:
        passed = _passed_over(doubtful, chosen[0].generation)
        memory = replace(_in_memory(chosen), distrusted=passed, detail=_spoilt(known, chosen[0].step))
        if passed < 0:
            return _newer(memory, tiers, at, known) if known.spoilt else memory
        return _gone_back(_newer(memory, tiers, at, known), known)
    saved, behind = _before(tiers, at, known) if at else (None, False)
    passed = _passed_over(doubtful, saved.generation if saved is not None else 0)
    passed = max(passed, saved.distrusted if saved is not None else -1)
    reached = max(known.reached, known.newest)
    if saved is not None and saved.source != NONE:
        if passed >= 0:
            return _gone_back(replace(saved, distrusted=passed), known)
        if saved.step < reached and not behind:
            again = f"step {reached} was in memory that is gone: from step {saved.step} on they are done again"
            saved = replace(saved, detail="; ".join(filter(None, (saved.detail, again))))
        return saved
    # Whole states alone are passed over for an error: what is damaged or lost in part is lost, whatever raised.
    if behind or (servers and choose(held, specs, replace(known, failed_after=-1))):
        return _from_the_beginning(known)
    if passed >= 0:
        far = {one.before for one in known.rollbacks if not one.near_the_beginning}
        if far and any(rule.before in far and rule.step < passed for rule in known.distrusted):
            return _kept_on(offered, specs, known, far)
        return _gone_back(Decision(source=NONE, distrusted=passed), known)
    if known.reached > 0 and not known.fresh:
        where = f"{at.url} holds no checkpoint" if at is not None else "there is no store"
        raise StateError(
            f"step {reached} had been made and was held in memory, and nothing is left of it: no keeper holds a whole "
            f"snapshot, and {where}. Trying again helps only if a node that held one comes back; to begin anew at step "
            "0, knowing that, start the job with elastic3d.run(..., fresh=True); with store= and every= less would be "
            "lost next time"
        )
    detail = ""
    if reached > 0:
        detail = f"steps up to {reached} were made and are lost: the run begins at step 0 again"
    return Decision(source=NONE, detail=detail)


def _spoilt(known: Known, step: int) -> str:
    """Return what a person should know of a step in memory that replaces others, "" where it is the newest."""
    if not known.spoilt:
        return ""
    newest = max(known.spoilt)[0]
    return f"step {newest} is damaged in memory, and there is no good copy: from step {step} on all is done again"


def _in_memory(chosen: Sequence[PeerInventory]) -> Decision:
    first = chosen[0]
    return Decision(
        source=MEMORY,
        step=first.step,
        generation=first.generation,
        facts=first.facts,
        offers=tuple(offer for inventory in chosen for offer in inventory.offers()),
    )


def _kept_on(
    offered: Sequence[PeerInventory], specs: Iterable[TensorSpec], known: Known, far: Collection[int]
) -> Decision:
    """Return the newest state in memory of a run that meant to go back behind it, and finds nothing older.

    far: the generations before which those rules hold. StateError if there is none either.
    """
    others = tuple(rule for rule in known.distrusted if rule.before not in far)
    held = [one for one in offered if not refused(others, one.generation, one.step)]
    chosen = choose(held, specs, known)
    spikes = ", ".join(str(one.spike) for one in known.rollbacks if one.before in far)
    if chosen is None:
        raise StateError(
            f"the run went back behind the spike of its loss in step {spikes}, and no state older than that is left, "
            "in memory or in the store. Trying again helps only if a node that held one comes back; restore= takes any "
            "checkpoint that it names"
        )
    detail = f"no state older than the spike of the loss in step {spikes} is left: the run goes on with what led to it"
    return replace(_in_memory(chosen), detail=detail)


def _passed_over(doubtful: Sequence[PeerInventory], generation: int) -> int:
    """Return the newest refused step in memory, -1 for none, as far as it matters to a state of this generation.

    What an older one has left in the memory of some node is behind that state, whatever its step.
    """
    return max((one.step for one in doubtful if one.generation >= generation), default=-1)


def _newer(memory: Decision, tiers: Tiers, at: StoreAt | None, known: Known) -> Decision:
    """Return what is in memory, or the checkpoint asked for if that is newer: memory lacks its newest states."""
    try:
        saved = _before(tiers, at, known)[0] if at else None
    except StateError as error:
        return replace(memory, detail=f"whether the store holds a newer one is not known: {error}")
    if saved is None or saved.source == NONE or saved.step <= memory.step:
        return memory
    return replace(saved, distrusted=max(memory.distrusted, saved.distrusted))


def _gone_back(decision: Decision, known: Known) -> Decision:
    """Return a decision that passed over states which a rule refuses, and says so."""
    where = f"from step {decision.step} on"
    if decision.source == NONE:
        where = "there is no older state, and from the beginning on"
    why = "a device that computes wrongly took part in them"
    if not any(rule.step < decision.distrusted for rule in known.distrusted):
        why = (
            "a rule of the store refuses them, whose reason the lost record of the job had: a device that computed "
            "wrongly, or a loss that jumped up, and then does so again and is left out again"
        )
    back = new_to(known.rollbacks, decision.generation, decision.step)
    if back:
        why = f"the loss jumped up in step {', '.join(str(one.spike) for one in back)}"
    why = f"states up to step {decision.distrusted} are passed over, since {why}: {where} all is done again"
    left_out = ", ".join(f"{one.first} to {one.stop - 1}" for one in back)
    why += f", but for positions {left_out}, which are left out" if back else ""
    return replace(decision, detail="; ".join(filter(None, (why, decision.detail))))


def _before(tiers: Tiers, at: StoreAt, known: Known) -> tuple[Decision | None, bool]:
    """Return the checkpoint asked for, or an older one; and whether one right after an error was passed over.

    One that no run has saved has the step with which it begins: 0, whatever it was imported as.
    """
    passed: tuple[str, ...] = ()
    while True:
        try:
            saved = tiers.checkpoint(at, known.wanted, (*known.damaged, *passed), known.distrusted)
        except NothingLeft:
            if not passed:
                raise
            return None, True
        if saved is None or saved.source == NONE:
            break
        if is_foreign(saved):
            saved = replace(saved, step=0)
            break
        if saved.step != known.failed_after:
            break
        passed = (*passed, saved.checkpoint)
    if saved is None or not passed:
        return saved, bool(passed)
    if saved.source == NONE:
        return None, True
    again = f"the script raised after step {known.failed_after}: from step {saved.step} on all is done again"
    damaged = tuple(name for name in saved.damaged if name not in passed)
    return replace(saved, damaged=damaged, detail=again), True


AGAIN = 20
"""Up to this step, all is done again from the beginning rather than ending the job."""


def _from_the_beginning(known: Known) -> Decision:
    """Return the decision to begin at step 0 if that costs little; StateUnfit if it would cost much."""
    if known.failed_after <= AGAIN:
        detail = f"the script raised after step {known.failed_after}, and there is no older state: all is done again"
        return Decision(source=NONE, detail=detail)
    raise StateUnfit(
        f"the script raised after step {known.failed_after}, and the only state there is was taken right after that "
        "step: what raised would be skipped, not done again. Trying again does not help. Mend what raises; the job, "
        "started again, goes on behind that step where it is in the store. With snapshot_every=1 the state before a "
        "step is kept, and what raised is tried again" + (f". What raised: {known.failure}" if known.failure else "")
    )


def dump(decision: Decision) -> bytes:
    """Return a decision as bytes to be broadcast: lengths of its parts, the parts, of which the first is JSON."""
    head = [decision.source, decision.step, decision.generation, decision.facts]
    head += [decision.checkpoint, list(decision.damaged), decision.distrusted, decision.detail, decision.provenance]
    parts = [json.dumps(head, separators=(",", ":")).encode(), *offer_columns.encode(decision.offers)]
    return b"".join((struct.pack(_PARTS, *map(len, parts)), *parts))


def load(data: bytes) -> Decision:
    """Return the decision that `dump` wrote."""
    parts, at = [], struct.calcsize(_PARTS)
    for length in struct.unpack_from(_PARTS, data):
        parts.append(data[at : at + length])
        at += length
    head, *offers = parts
    origin, step, generation, facts, checkpoint, damaged, distrusted, detail, provenance = json.loads(head)
    return Decision(
        source=origin,
        step=step,
        generation=generation,
        facts=facts,
        offers=offer_columns.decode(offers),
        checkpoint=checkpoint,
        damaged=tuple(damaged),
        distrusted=distrusted,
        detail=detail,
        provenance=provenance,
    )


_PARTS = "<6Q"


class Nowhere:
    """The tiers of a script without keepers and without a store."""

    def inventories(self, servers: Sequence[str]) -> Sequence[PeerInventory]:
        """Return nothing."""
        return ()

    def checkpoint(
        self, at: StoreAt, wanted: str, damaged: Sequence[str], distrusted: Sequence[Distrust] = ()
    ) -> Decision | None:
        """Return nothing."""
        return None

    def sources(
        self, decision: Decision, at: StoreAt | None, rank: int, near: Sequence[NearMemory] = ()
    ) -> Mapping[str, TileSource]:
        """Return nothing."""
        return {}
