"""Making room for a new job under the id of one that ended.

The history, the verdicts, the account of its time and the end of an ended job stay readable until the next one begins,
and are deleted then: two jobs under one id never mix. The number of its last generation stays for ever: it is the
newest fencing token of its checkpoints. So do the rules about states that nobody may go on from, since these may be in
the store, and what is left out since then. Quarantines stay too: they are about the machine.
"""

from __future__ import annotations

from elastic3d import etcd_keys as keys
from elastic3d.clock import Clock
from elastic3d.etcd import Compare, Delete, EtcdClient, Operation, Put
from elastic3d.etcd.mending import once_mended
from elastic3d.membership.reading import sealed
from elastic3d.membership.records import END_LASTS, End, LastEnd, decode, encode
from elastic3d.values import Generation

POLL = 0.1
"""Seconds between two checks whether members are still there."""

BUDGET = 30.0
"""Seconds for a call: when thousands of nodes start at once, etcd cannot keep up."""


def end_seen(client: EtcdClient, root: str, begun: float, clock: Clock) -> int:
    """Return the revision of the end record that stood under `root` when this node was started, 0 for none.

    begun: when that was, on `clock`'s monotonic clock. A node may come to read etcd only when the job for which it was
    started is over: etcd was away, or the node is slow.
    """
    end = client.get(root + keys.END, budget=BUDGET)
    if end is None:
        return 0
    last = client.get(root + keys.LAST_END, budget=BUDGET)
    if last is None or last.mod_revision != end.mod_revision:
        return end.mod_revision
    age = clock.monotonic() - begun
    left = client.time_to_live(last.lease, budget=BUDGET)
    # By etcd's clock alone, since machines' clocks differ, and jump.
    ago = None if left is None else END_LASTS - left
    same = decode(LastEnd, last.value, last.key).term == client.term(root, budget=BUDGET)
    return 0 if ago is not None and ago < age and same else end.mod_revision


def last_end(client: EtcdClient, root: str) -> tuple[End, int] | None:
    """Return how the newest job under `root` that is over ended, and the revision of that; None if none is there.

    For `END_LASTS` it is there even if a node that came late has begun another job since.
    """
    last = client.get(root + keys.LAST_END)
    if last is not None:
        return decode(LastEnd, last.value, last.key).end, last.mod_revision
    end = client.get(root + keys.END)
    return None if end is None else (decode(End, end.value, end.key), end.mod_revision)


def make_room(client: EtcdClient, root: str, lease: float, clock: Clock, seen: int | None = None) -> End | None:
    """Clear away the job that ended under `root`, if one did and none of its members is left.

    Waits for members that are about to go, at most `lease` seconds: those still there after that will stay, and a node
    that joins learns from the records that the job is over. `Impaired` where etcd takes no writes for so long that
    nobody waits for it any more.

    seen: `end_seen` of this node, None if not known. A job that ended well after that is the one this
    node was started for, and a node that came late must not begin it anew: its end is returned, and nothing is cleared.
    """
    patience = clock.monotonic() + lease + 1.0
    while True:
        end = client.get(root + keys.END, budget=BUDGET)
        if end is None:
            return None
        if seen is not None and end.mod_revision > seen:
            over = decode(End, end.value, end.key)
            # A job that failed may be begun again: that is what torchrun's restarts are for. So may one that stopped
            # since all its nodes had to leave: this node was started to take their place.
            if not over.failed and not over.stopped:
                return over
        if not client.exists(root + keys.MEMBERS):
            break
        if clock.monotonic() >= patience:
            return None
        clock.sleep(POLL)
    wipe: list[Operation] = [Delete(root + key) for key in (keys.END, keys.PROPOSAL, keys.GOODPUT)]
    past = (keys.WHOLE, keys.TOMBS, keys.DOUBTS, keys.FAULTS, keys.DRAINS, keys.HISTORY, keys.VERDICTS)
    wipe += [Delete(root + prefix, prefix=True) for prefix in past]
    last = sealed(root, client.range(root + keys.LISTED)[0])
    if last is not None:
        # Its nodes are gone and nobody waits for them.
        wipe.append(Put(root + keys.GENERATION, encode(emptied(last))))
    # Sent twice it is done once: the end that it asks for is gone then.
    there = [Compare.mod_revision(end.key, end.mod_revision)]
    once_mended(lambda: client.txn(there, wipe, idempotent=True, budget=BUDGET), clock)
    return None


def emptied(last: Generation) -> Generation:
    """Return what stays of the last generation of a job that ended: what the next job under its id has to know."""
    return Generation(
        number=last.number,
        attempt=last.attempt,
        cause=last.cause,
        nodes=(),
        distrusted=last.distrusted,
        rollbacks=last.rollbacks,
    )
