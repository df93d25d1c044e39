"""Where the state comes from: peers' memory before the store, the store before nothing; decided once, for all ranks.

Rank 0 asks all keepers what they hold and decides; the others get its decision by broadcast. From there on memory and
store are the same to everybody: tiles on offer, of which each rank takes what it needs of its own boxes, verified.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from checkpointing.format.tiles import Box, TensorSpec, uncovered
from checkpointing.reading.sources import Offered, TileSource
from elastic3d.data import Order
from elastic3d.errors import StateUnfit
from elastic3d.values import StoreAt, from_json

MEMORY, STORE, NONE = "memory", "store", "none"


class HeldTile(Protocol):
    """A tile in a keeper's memory."""

    @property
    def spec(self) -> TensorSpec:
        """The tensor."""
        ...

    @property
    def box(self) -> Box:
        """The part of it."""
        ...


class Inventory(Protocol):
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

    @property
    def tiles(self) -> Sequence[HeldTile]:
        """Its tiles."""
        ...

    def offers(self) -> Iterable[Offered]:
        """Return its tiles as the resolver takes them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What state to go on from. source: "memory", "store" or "none"; generation: that made it."""

    source: str
    step: int = 0
    generation: int = 0
    facts: Mapping[str, Any] | None = None
    offers: tuple[Offered, ...] = ()


@runtime_checkable
class Nearer(Protocol):
    """A source that gives what another one offers, sooner: known to this node only, and in no decision."""

    def offers(self, offers: Iterable[Offered]) -> Iterable[Offered]:
        """Return another source's offers as its own."""
        ...


class Tiers(Protocol):
    """Access to the places state may come from."""

    def inventories(self, servers: Sequence[str]) -> Sequence[Inventory]:
        """Return what the reachable tile servers hold."""
        ...

    def checkpoint(self, at: StoreAt) -> Decision | None:
        """Return the newest checkpoint of a store, None when it has none yet."""
        ...

    def sources(self, decision: Decision, at: StoreAt | None) -> Mapping[str, TileSource]:
        """Return the sources that a decision's offers name, and this node's own, `Nearer` to it than the store."""
        ...


def offers(decision: Decision, sources: Mapping[str, TileSource]) -> list[Offered]:
    """Return what is on offer to this node: a decision's offers, and what nearer sources make of the store's."""
    stored = [offer for offer in decision.offers if offer.source == STORE]
    near = [offer for source in sources.values() if isinstance(source, Nearer) for offer in source.offers(stored)]
    return [*near, *decision.offers]


def choose(inventories: Sequence[Inventory], specs: Iterable[TensorSpec]) -> list[Inventory] | None:
    """Return the inventories of the newest (step, generation) that is whole, None when none is.

    Whole: every tensor of the model, and every further one that any of the inventories names, is covered.
    """
    wanted = {spec.key: spec for spec in specs}
    found: dict[tuple[int, int], list[Inventory]] = {}
    for inventory in inventories:
        found.setdefault((inventory.step, inventory.generation), []).append(inventory)
    for moment in sorted(found, reverse=True):
        if _whole(found[moment], wanted):
            return found[moment]
    return None


def _whole(inventories: Sequence[Inventory], wanted: Mapping[str, TensorSpec]) -> bool:
    specs = dict(wanted)
    boxes: dict[str, list[Box]] = {key: [] for key in wanted}
    for inventory in inventories:
        for tile in inventory.tiles:
            specs.setdefault(tile.spec.key, tile.spec)
            if specs[tile.spec.key] != tile.spec:
                return False
            boxes.setdefault(tile.spec.key, []).append(tile.box)
    return all(uncovered(specs[key], boxes[key]) is None for key in specs)


def decide(tiers: Tiers, servers: Sequence[str], at: StoreAt | None, specs: Iterable[TensorSpec]) -> Decision:
    """Return what to go on from: the newest whole state in memory, else the newest checkpoint, else nothing."""
    chosen = choose(tiers.inventories(servers), specs) if servers else None
    if chosen:
        first = chosen[0]
        return Decision(
            source=MEMORY,
            step=first.step,
            generation=first.generation,
            facts=first.facts,
            offers=tuple(offer for inventory in chosen for offer in inventory.offers()),
        )
    saved = tiers.checkpoint(at) if at else None
    return saved or Decision(source=NONE)


def check_facts(decision: Decision, order: Order, data: str = "") -> Mapping[str, Any]:
    """Return a decision's facts; StateUnfit when its samples were counted in another order than this script's.

    The micro-batch may differ: it changes the bits, not which samples are consumed. data: the data set's own
    fingerprint; one that has none is taken on trust.
    """
    facts = decision.facts
    if facts is None:
        raise StateUnfit(
            f"the state of step {decision.step} has no facts beside its tensors; it was not saved by a run"
        )
    saved = from_json(Order, facts["order"])
    for name in ("length", "global_batch", "seed"):
        then, now = getattr(saved, name), getattr(order, name)
        if name == "global_batch":
            then, now = saved.taken(decision.step), order.taken(decision.step)
        if then != now:
            raise StateUnfit(
                f"the state of step {decision.step} was trained with {name}={then} and run.batches now has {now}: its "
                "samples could not be accounted for. Trying again does not help: go back to the old value, or start a "
                "new run"
            )
    then = facts.get("data", "")
    if then and data and then != data:
        raise StateUnfit(
            f"the state of step {decision.step} was trained on the data set {then} and run.batches now has {data}: its "
            "samples could not be accounted for. Trying again does not help: go back to the old files, or start a new "
            "run"
        )
    return facts


def dump(decision: Decision) -> bytes:
    """Return a decision as bytes to be broadcast."""
    specs = {offer.spec.key: [offer.spec.dtype, offer.spec.shape] for offer in decision.offers}
    offers = [
        [offer.spec.key, offer.box.start, offer.box.stop, offer.digest, offer.source, offer.where]
        for offer in decision.offers
    ]
    head = [decision.source, decision.step, decision.generation, decision.facts]
    return json.dumps([head, specs, offers], separators=(",", ":")).encode()


def load(data: bytes) -> Decision:
    """Return the decision that `dump` wrote."""
    (source, step, generation, facts), named, rows = json.loads(data)
    specs = {key: TensorSpec(key=key, dtype=dtype, shape=tuple(shape)) for key, (dtype, shape) in named.items()}
    offers = tuple(
        Offered(
            spec=specs[key],
            box=Box(start=tuple(start), stop=tuple(stop)),
            digest=digest,
            source=offered_by,
            where=where,
        )
        for key, start, stop, digest, offered_by, where in rows
    )
    return Decision(source=source, step=step, generation=generation, facts=facts, offers=offers)


class Nowhere:
    """The tiers of a script without keepers and without a store."""

    def inventories(self, servers: Sequence[str]) -> Sequence[Inventory]:
        """Return nothing."""
        return ()

    def checkpoint(self, at: StoreAt) -> Decision | None:
        """Return nothing."""
        return None

    def sources(self, decision: Decision, at: StoreAt | None) -> Mapping[str, TileSource]:
        """Return nothing."""
        return {}
