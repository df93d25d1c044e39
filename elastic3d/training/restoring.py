"""Where the state comes from: peers' memory before the store, the store before nothing; decided once, for all ranks.

Rank 0 asks all keepers what they hold and decides; the others get its decision by broadcast. From there on memory and
store are the same to everybody: tiles on offer, of which each rank takes what it needs of its own boxes, verified.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from checkpointing.format.tiles import Box, TensorSpec, uncovered
from checkpointing.reading.sources import Offered, TileSource
from elastic3d.data import Order
from elastic3d.errors import StateError, StateUnfit
from elastic3d.log import process_log
from elastic3d.snapshots.offers import OfferedShard, spell_out
from elastic3d.training.state_facts import StateFacts
from elastic3d.values import StoreAt

MEMORY, STORE, NONE = "memory", "store", "none"
MOVING = ("latest", "verified")
"""What `restore=` may name beside checkpoints that stay what they are."""


class PeerInventory(Protocol):
    """What one keeper holds of one rank's snapshot of one step."""

    @property
    def generation(self) -> int:
        """The generation that made the snapshot."""
        ...

    @property
    def step(self) -> int:
        """The step it was made after."""
        ...

    @property
    def facts(self) -> dict[str, Any]:
        """The state that is no tensor; equal for all ranks of one step."""
        ...

    def offers(self) -> Sequence[Offered | OfferedShard]:
        """Return all of it, on offer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What state to go on from. source: "memory", "store" or "none"; generation: that made it.

    checkpoint: its name where it is one. damaged: names of newer ones that were found damaged, and passed over. detail:
    what a person should know of the choice, "" for nothing.
    """

    source: str
    step: int = 0
    generation: int = 0
    facts: Mapping[str, Any] | None = None
    offers: tuple[Offered | OfferedShard, ...] = ()
    checkpoint: str = ""
    damaged: tuple[str, ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of the run, beside what the tiers hold.

    generation: the one that is to begin; what it goes on from was made before it. newest: the newest step that any
    keeper of its nodes has heard of, -1 where none has heard of any. reached: a step that was safe in memory, as the
    membership's record says, 0 for none. fresh: the user accepts to begin at step 0 though there was one. wanted: which
    checkpoint, "latest", "verified" or what `checkpointing.resolve_name` takes. damaged: names of checkpoints that were
    found damaged while they were read. failed_after: the step after which the user's code raised, -1 where it did not;
    failure: what it raised, "" for not known.
    """

    generation: int
    newest: int = -1
    reached: int = 0
    fresh: bool = False
    wanted: str = "latest"
    damaged: tuple[str, ...] = ()
    failed_after: int = -1
    failure: str = ""


@runtime_checkable
class Nearer(Protocol):
    """A source that gives what another one offers, sooner: known to this node only, and in no decision."""

    def offers(self, offers: Iterable[Offered]) -> Iterable[Offered]:
        """Return another source's offers as its own."""
        ...


class Tiers(Protocol):
    """Access to the places state may come from."""

    def inventories(self, servers: Sequence[str]) -> Sequence[PeerInventory]:
        """Return what the reachable tile servers hold."""
        ...

    def checkpoint(self, at: StoreAt, wanted: str, damaged: Sequence[str]) -> Decision | None:
        """Return the checkpoint of a store that is wanted, None when the store has none yet.

        damaged: what is not to be taken. Where the newest, or the newest verified one, is damaged, an older one.
        """
        ...

    def sources(self, decision: Decision, at: StoreAt | None, rank: int) -> Mapping[str, TileSource]:
        """Return the sources that a decision's offers name, and this node's own, `Nearer` to it than the store.

        In the order in which `rank` is to ask them.
        """
        ...


def offers(
    decision: Decision, sources: Mapping[str, TileSource], wanted: Iterable[tuple[TensorSpec, Box]]
) -> list[Offered]:
    """Return the tiles on offer to this node: a decision's offers, and what nearer sources make of the store's.

    Of what is in memory only what can be of use for what is wanted.
    """
    tiles = list(spell_out(decision.offers, wanted))
    stored = [tile for tile in tiles if tile.source == STORE]
    near = [tile for source in sources.values() if isinstance(source, Nearer) for tile in source.offers(stored)]
    return [*near, *tiles]


AHEAD = 64
"""Steps that a snapshot may be ahead of what the keepers have heard of: they hear of steps a moment after the ranks."""


def believed(inventory: PeerInventory, known: Known) -> bool:
    """Return whether the membership could have seen what a snapshot says of itself.

    It was made in a generation that was sealed before the one that begins, and of a step not far beyond the newest one
    that the keepers heard of. Where no keeper of the generation trained before, its step is taken on trust.
    """
    if not 0 < inventory.generation < known.generation or inventory.step < 0:
        return False
    return known.newest < 0 or inventory.step <= known.newest + AHEAD


def choose(
    inventories: Sequence[PeerInventory], specs: Iterable[TensorSpec], known: Known
) -> list[PeerInventory] | None:
    """Return the inventories of the newest (step, generation) that is whole, None when none is.

    Whole: every tensor of the model, and every further one that any of the inventories names, is covered. What the
    membership cannot have seen does not count (`believed`). Nor does, after an error of the user's code, the state
    right behind it: from there on, what raised (an evaluation after the step, say) would not be done again but skipped,
    and the job would end as if all were well.
    """
    wanted = {spec.key: spec for spec in specs}
    found: dict[tuple[int, int], list[PeerInventory]] = {}
    for inventory in inventories:
        if not believed(inventory, known):
            process_log().emit(
                "snapshot.unbelieved", step=inventory.step, made_in=inventory.generation, newest=known.newest
            )
            continue
        found.setdefault((inventory.step, inventory.generation), []).append(inventory)
    for moment in sorted(found, reverse=True):
        if moment[0] != known.failed_after and _whole(found[moment], wanted):
            return found[moment]
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
    """Return what to go on from: the newest whole state in memory, else the checkpoint that is wanted, else nothing.

    StateError where steps were safe once, and nothing is left of them; StateUnfit where all there is was made right
    behind an error of the user's code, which would be skipped.
    """
    held = tiers.inventories(servers) if servers else ()
    chosen = choose(held, specs, known) if servers else None
    if chosen:
        first = chosen[0]
        return Decision(
            source=MEMORY,
            step=first.step,
            generation=first.generation,
            facts=first.facts,
            offers=tuple(offer for inventory in chosen for offer in inventory.offers()),
        )
    saved, behind = _before(tiers, at, known) if at else (None, False)
    reached = max(known.reached, known.newest)
    if saved is not None:
        if saved.step < reached and not behind:
            again = f"step {reached} was in memory that is gone: from step {saved.step} on they are done again"
            saved = replace(saved, detail="; ".join(filter(None, (saved.detail, again))))
        return saved
    if behind or any(one.step == known.failed_after for one in held):
        return _from_the_beginning(known)
    if known.reached > 0 and not known.fresh:
        where = f"{at.url} holds no checkpoint" if at is not None else "there is no store"
        raise StateError(
            f"step {known.reached} had been made and was held in memory, and nothing is left of it: no keeper holds a "
            f"whole snapshot, and {where}. Trying again helps only if a node that held one comes back; to begin anew "
            "at step 0, knowing that, start the job with elastic3d.run(..., fresh=True); with store= and every= less "
            "would be lost next time"
        )
    detail = ""
    if reached > 0:
        detail = f"steps up to {reached} were made and are lost: the run begins at step 0 again"
    return Decision(source=NONE, detail=detail)


def _before(tiers: Tiers, at: StoreAt, known: Known) -> tuple[Decision | None, bool]:
    """Return the checkpoint that is wanted, or an older one; and whether one right behind an error was passed over."""
    passed: tuple[str, ...] = ()
    while True:
        try:
            saved = tiers.checkpoint(at, known.wanted, (*known.damaged, *passed))
        except StateError:
            if not passed:
                raise
            return None, True
        if saved is None or saved.step != known.failed_after:
            break
        passed = (*passed, saved.checkpoint)
    if saved is None or not passed:
        return saved, bool(passed)
    again = f"the script raised after step {known.failed_after}: from step {saved.step} on all is done again"
    damaged = tuple(name for name in saved.damaged if name not in passed)
    return replace(saved, damaged=damaged, detail=again), True


AGAIN = 20
"""Steps from the beginning that are done again rather than have the job end."""


def _from_the_beginning(known: Known) -> Decision:
    """Return to begin at step 0 where that costs little; StateUnfit where it would cost much."""
    if known.failed_after <= AGAIN:
        detail = f"the script raised after step {known.failed_after}, and there is no older state: all is done again"
        return Decision(source=NONE, detail=detail)
    raise StateUnfit(
        f"the script raised after step {known.failed_after}, and the only state there is was taken right after that "
        "step: what raised would be skipped, not done again. Trying again does not help. Mend what raises; the job, "
        "started again, goes on behind that step where it is in the store. With snapshot_every=1 the state before a "
        "step is kept, and what raised is tried again" + (f". What raised: {known.failure}" if known.failure else "")
    )


def check_facts(facts: StateFacts, step: int, order: Order, data: str = "") -> None:
    """Accept the facts of the state of a step; StateUnfit when its samples were counted in another order than these.

    The micro-batch may differ: it changes the bits, not which samples are consumed. data: the data set's own
    fingerprint; one that has none is taken on trust.
    """
    saved = facts.order
    for name in ("length", "global_batch", "seed"):
        then, now = getattr(saved, name), getattr(order, name)
        if name == "global_batch":
            then, now = saved.taken(step), order.taken(step)
        if then != now:
            raise StateUnfit(
                f"the state of step {step} was trained with {name}={then} and run.batches now has {now}: its "
                "samples could not be accounted for. Trying again does not help: go back to the old value, or start a "
                "new run"
            )
    then = facts.data
    if then and data and then != data:
        raise StateUnfit(
            f"the state of step {step} was trained on the data set {then} and run.batches now has {data}: its "
            "samples could not be accounted for. Trying again does not help: go back to the old files, or start a new "
            "run"
        )


def dump(decision: Decision) -> bytes:
    """Return a decision as bytes to be broadcast."""
    specs = {offer.spec.key: [offer.spec.dtype, offer.spec.shape] for offer in decision.offers}
    offers = [
        [offer.spec.key, offer.box.start, offer.box.stop, offer.source, *_rest(offer)] for offer in decision.offers
    ]
    head = [decision.source, decision.step, decision.generation, decision.facts]
    head += [decision.checkpoint, list(decision.damaged), decision.detail]
    return json.dumps([head, specs, offers], separators=(",", ":")).encode()


def load(data: bytes) -> Decision:
    """Return the decision that `dump` wrote."""
    (origin, step, generation, facts, checkpoint, damaged, detail), named, rows = json.loads(data)
    specs = {key: TensorSpec(key=key, dtype=dtype, shape=tuple(shape)) for key, (dtype, shape) in named.items()}
    offers = tuple(
        _offer(specs[key], Box(start=tuple(start), stop=tuple(stop)), source, rest)
        for key, start, stop, source, *rest in rows
    )
    return Decision(
        source=origin,
        step=step,
        generation=generation,
        facts=facts,
        offers=offers,
        checkpoint=checkpoint,
        damaged=tuple(damaged),
        detail=detail,
    )


def _rest(offer: Offered | OfferedShard) -> list[Any]:
    if isinstance(offer, Offered):
        return [offer.digest, offer.where]
    return [offer.generation, offer.step, offer.rank, offer.offset, offer.tile_bytes, offer.digests]


def _offer(spec: TensorSpec, box: Box, source: str, rest: Sequence[Any]) -> Offered | OfferedShard:
    if len(rest) == 2:
        digest, where = rest
        return Offered(spec=spec, box=box, digest=digest, source=source, where=where)
    generation, step, rank, offset, tile_bytes, digests = rest
    return OfferedShard(
        spec=spec,
        box=box,
        source=source,
        generation=generation,
        step=step,
        rank=rank,
        offset=offset,
        tile_bytes=tile_bytes,
        digests=digests,
    )


class Nowhere:
    """The tiers of a script without keepers and without a store."""

    def inventories(self, servers: Sequence[str]) -> Sequence[PeerInventory]:
        """Return nothing."""
        return ()

    def checkpoint(self, at: StoreAt, wanted: str, damaged: Sequence[str]) -> Decision | None:
        """Return nothing."""
        return None

    def sources(self, decision: Decision, at: StoreAt | None, rank: int) -> Mapping[str, TileSource]:
        """Return nothing."""
        return {}
