"""The order of a fault in etcd: written for one incarnation of a node that allows it, and answered or withdrawn.

An order lives for `ORDER_LEASE` seconds at most, by a lease that nobody keeps alive: no clocks are compared, and a node
that comes to read it later finds nothing. Its node's keeper answers by writing the same key again, if it is still as it
was ordered, and acts only then: each order is carried out once or never. Whoever waits withdraws it by the same
comparison, so that both sides agree on what happened.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from elastic3d import etcd_keys as keys
from elastic3d.clock import SYSTEM, Clock
from elastic3d.errors import ConfigurationError, MembershipError, UsageError
from elastic3d.etcd import Compare, Delete, EtcdClient, Get, Put
from elastic3d.membership.injection import OPTION, FaultAnswer, FaultOrder, no_slot
from elastic3d.membership.records import MemberRecord, decode, encode
from elastic3d.nearest import nearest

ORDER_LEASE = 30.0
"""Seconds after which an order that was not carried out never will be."""

PATIENCE = 15.0
"""Seconds for which an answer is waited for, within that lease."""

POLL = 0.1
"""Seconds between two looks whether there is an answer."""

BUDGET = 2.0
"""Seconds for a keeper's answer to be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenOrder:
    """An order that stands in etcd. node: the id of the incarnation it is for. revision: at which it was written."""

    node: str
    key: str
    revision: int
    lease: int
    order: FaultOrder


def allowing(client: EtcdClient, root: str, name: str) -> tuple[MemberRecord, int]:
    """Return the record of the node `name`, and its create revision, if it carries out orders of faults.

    UsageError if the job is over, there is no such node, or it does not: nothing was written then.
    """
    if client.get(root + keys.END) is not None:
        raise UsageError("the job under this run id is over; there is nobody to give orders to")
    there: dict[str, tuple[MemberRecord, int]] = {}
    for item in sorted(client.range(root + keys.MEMBERS)[0], key=lambda item: item.create_revision):
        try:
            record = decode(MemberRecord, item.value, item.key)
        except ConfigurationError:
            continue
        there[record.node.name] = (record, item.create_revision)
    if name not in there:
        listed = f"registered are {', '.join(sorted(there))}" if there else "registered is none"
        raise UsageError(f"there is no node {name!r} in this job{nearest(name, there)}; {listed}")
    record = there[name][0]
    if record.profile is None:
        raise UsageError(
            f"{name} runs in mode restart, where no keeper is there to carry out an order: faults can be injected in "
            "--rdzv-conf=mode=resident alone"
        )
    if not record.chaos:
        raise UsageError(f"{name} was not started with {OPTION}, and carries out no such order; nothing was done to it")
    return there[name]


def order_fault(client: EtcdClient, root: str, name: str, order: FaultOrder) -> GivenOrder:
    """Give the node `name` this order; UsageError if it does not carry out such orders, or has left meanwhile."""
    record, created = allowing(client, root, name)
    problem = no_slot(order, len(record.node.slots))
    if problem:
        raise UsageError(f"{name}: {problem}")
    lease, _ = client.grant(ORDER_LEASE)
    key = root + keys.fault(record.node.id, secrets.token_hex(8))
    member = Compare.create_revision(root + keys.member(record.node.id), created)
    made = client.txn([member, Compare.absent(key)], [Put(key, encode(order), lease)], [Get(key)], idempotent=True)
    revision = made.revision
    if not made.succeeded:
        # Nobody else writes this key: what is there is this order, from a try whose answer was lost.
        mine = made.gets[0]
        if not mine:
            client.revoke(lease)
            raise UsageError(f"node {name!r} has just left this job, or was started anew: look again, and repeat")
        revision = mine[0].create_revision
    return GivenOrder(node=record.node.id, key=key, revision=revision, lease=lease, order=order)


def wait_for_answer(
    client: EtcdClient, root: str, given: GivenOrder, *, patience: float = PATIENCE, clock: Clock = SYSTEM
) -> None:
    """Return once the node has taken the order, and does it now.

    UsageError if its keeper refuses. MembershipError if it did not answer within `patience` seconds: the order was
    withdrawn then, and is never carried out.
    """
    name = given.node.partition("@")[0]
    try:
        answer = _answer(client, given, patience, clock)
        if answer is None:
            gone = client.get(root + keys.member(given.node)) is None
            why = (
                "it has left the job meanwhile" if gone else "it is there by its record: it may be stopped, or cut off"
            )
            raise MembershipError(
                f"{name} did not answer within {patience:g} s ({why}; see `elastic3d status`). The order was "
                "withdrawn, and nothing was done; trying again may help"
            )
    finally:
        client.revoke(given.lease)
    if answer.refused:
        raise UsageError(f"{name} refuses: {answer.refused}")


def _answer(client: EtcdClient, given: GivenOrder, patience: float, clock: Clock) -> FaultAnswer | None:
    """Return the answer; None if there was none and the order does not stand any more."""
    deadline = clock.monotonic() + patience
    while clock.monotonic() < deadline:
        item = client.get(given.key)
        if item is None:
            raise MembershipError(
                "the order is gone from etcd: it was not waited for within its lease. Whether it was carried out, the "
                "node's event fault.injected says"
            )
        if item.mod_revision != given.revision:
            return decode(FaultOrder, item.value, item.key).answer
        clock.sleep(POLL)
    unanswered = Compare.mod_revision(given.key, given.revision)
    withdrawn = client.txn([unanswered], [Delete(given.key)], [Get(given.key)], idempotent=True)
    items = withdrawn.gets[0] if not withdrawn.succeeded else ()
    return decode(FaultOrder, items[0].value, items[0].key).answer if items else None


def take(client: EtcdClient, given: GivenOrder, answer: FaultAnswer) -> bool:
    """Answer an order, as the keeper of its node; return whether it still stood: only then may it be carried out.

    EtcdError if etcd is away: the order must not be carried out then.
    """
    value = encode(replace(given.order, answer=answer))
    unanswered = Compare.mod_revision(given.key, given.revision)
    made = client.txn(
        [unanswered], [Put(given.key, value, given.lease)], [Get(given.key)], idempotent=True, budget=BUDGET
    )
    # A first try may have been applied though its answer was lost: nobody else writes this value.
    return made.succeeded or any(item.value == value for item in made.gets[0])
