"""A person's orders: a node shall leave, a machine is kept out, or may come back.

Orders are keys that the leader obeys (`roll/drains`, `roll/quarantine`); anybody who may write under the run's prefix
may give them. A node has the name that `--rdzv-conf=node` gave it. Nothing is written when a UsageError is raised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elastic3d import etcd_keys as keys
from elastic3d.clock import SYSTEM
from elastic3d.errors import ConfigurationError, UsageError
from elastic3d.etcd import Compare, Delete, EtcdClient, KeyValue, Put
from elastic3d.membership.records import Drain, MemberRecord, Quarantine, decode, encode
from elastic3d.quantities import LONGEST
from elastic3d.values import Node

SHOWN = 40
"""Most names that an error lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesAndDrains:
    """The nodes and machines that orders can be about. nodes: the newest registered incarnation by name, with its
    key's create revision.

    drains: names with an order to leave. quarantine, flaps: machines kept out, and those lost lately.
    """

    nodes: dict[str, tuple[Node, int]]
    drains: tuple[str, ...]
    quarantine: tuple[str, ...]
    flaps: tuple[str, ...]

    def node(self, name: str) -> tuple[Node, int]:
        """Return the registered node of this name; the UsageError lists those there are."""
        if name not in self.nodes:
            raise UsageError(f"there is no node {name!r} in this job; {_listed('registered are', self.nodes)}")
        return self.nodes[name]

    def place(self, name: str) -> str:
        """Return the machine of the node of this name, or of this name itself; the UsageError lists those known."""
        if name in self.nodes:
            return self.nodes[name][0].place
        places = {*self.quarantine, *self.flaps, *(node.place for node, _ in self.nodes.values())}
        if name not in places:
            raise UsageError(
                f"this job knows no node or machine {name!r}; {_listed('known are', places | {*self.nodes})}"
            )
        return name


def read_roster(root: str, items: Sequence[KeyValue]) -> NodesAndDrains:
    """Return the roster as the keys under `<root>roll/` show it; a record that cannot be read is passed over."""
    nodes: dict[str, tuple[Node, int]] = {}
    names: dict[str, list[str]] = {keys.DRAINS: [], keys.QUARANTINE: [], keys.FLAPS: []}
    for item in sorted(items, key=lambda item: item.create_revision):
        kind, name = keys.split(root, item.key)
        if kind in names:
            names[kind].append(name)
        elif kind == keys.MEMBERS:
            try:
                node = decode(MemberRecord, item.value, item.key).node
            except ConfigurationError:
                continue
            nodes[node.name] = (node, item.create_revision)
    return NodesAndDrains(
        nodes=nodes,
        drains=tuple(names[keys.DRAINS]),
        quarantine=tuple(names[keys.QUARANTINE]),
        flaps=tuple(names[keys.FLAPS]),
    )


def order_drain(client: EtcdClient, root: str, name: str, *, seconds: float, by: str, reason: str = "") -> Node:
    """Order the node `name` to leave within `seconds` of when the leader sees the order; return that node.

    The order is for its present incarnation: one that comes later under this name is not affected.
    """
    _check("a deadline", seconds)
    node, created = _roster(client, root).node(name)
    member = root + keys.member(node.id)
    drain = Drain(seconds=seconds, reason=reason, by=by, incarnation=node.incarnation, at=SYSTEM.wall())
    put = Put(root + keys.drain(name), encode(drain))
    if not client.txn([Compare.create_revision(member, created)], [put], idempotent=True).succeeded:
        raise UsageError(f"node {name!r} has just left this job, or was started anew: look again, and repeat the order")
    return node


def order_quarantine(client: EtcdClient, root: str, name: str, *, seconds: float, by: str, reason: str = "") -> str:
    """Keep the machine of node `name`, or the machine of this name, out for `seconds`; return the machine.

    UsageError where it is kept out for longer already: a shorter order would take that back.
    """
    _check("a quarantine", seconds)
    place = _roster(client, root).place(name)
    key = root + keys.quarantine(place)
    there = client.get(key)
    left = 0.0
    if there is not None:
        left = (client.time_to_live(there.lease) or 0.0) if there.lease else math.inf
    if there is not None and left > seconds:
        why = decode(Quarantine, there.value, key).reason
        raise UsageError(
            f"machine {place} is kept out already, {f'for another {left:.0f} s' if left < math.inf else 'for good'}"
            f"{f' ({why})' if why else ''}: `elastic3d release {name}` takes that back"
        )
    lease, _ = client.grant(seconds)
    value = encode(Quarantine(seconds=seconds, reason=reason, by=by))
    unchanged = Compare.mod_revision(key, there.mod_revision if there is not None else 0)
    if not client.txn([unchanged], [Put(key, value, lease)], idempotent=True).succeeded:
        ours = client.get(key)
        if ours is not None and ours.lease == lease:
            return place  # sent twice, since the answer to the first was lost
        client.revoke(lease)
        raise UsageError(f"machine {place} was kept out, or let back, at this moment: look again, and repeat the order")
    return place


def release(client: EtcdClient, root: str, name: str) -> tuple[str, ...]:
    """Take back the orders for a node or machine, and forget its losses; return what was taken back, in words.

    UsageError if there is nothing to take back: it names what there is.
    """
    roster = _roster(client, root)
    place = roster.nodes[name][0].place if name in roster.nodes else name
    orders = {
        f"drain of {name}": root + keys.drain(name) if name in roster.drains else "",
        f"quarantine of {place}": root + keys.quarantine(place) if place in roster.quarantine else "",
        f"losses of {place}": root + keys.flap(place) if place in roster.flaps else "",
    }
    there = [key for key in orders.values() if key]
    if not there:
        known = {*roster.drains, *roster.quarantine, *roster.flaps}
        raise UsageError(f"nothing is ordered of {name!r}; {_listed('there are orders for', known)}")
    client.txn([], [Delete(key) for key in there], idempotent=True)
    return tuple(words for words, key in orders.items() if key)


def _roster(client: EtcdClient, root: str) -> NodesAndDrains:
    if client.get(root + keys.END) is not None:
        raise UsageError("the job under this run id is over; there is nobody to give orders to")
    items: list[KeyValue] = []
    for kind in (keys.MEMBERS, keys.DRAINS, keys.QUARANTINE, keys.FLAPS):
        items += client.range(root + kind)[0]
    return read_roster(root, items)


def _check(what: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and 0 < seconds <= LONGEST):
        raise UsageError(f"{what} of {seconds:g} s: give more than 0 s and less than ten years")


def _listed(words: str, names: Sequence[str] | set[str] | dict[str, tuple[Node, int]]) -> str:
    shown, more = sorted(names)[:SHOWN], len(names) - SHOWN
    rest = f" and {more} more" if more > 0 else ""
    return f"{words} {', '.join(shown)}{rest}" if names else f"{words} none"
