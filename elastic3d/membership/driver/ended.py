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
from elastic3d.membership.reading import sealed
from elastic3d.membership.records import End, decode, encode
from elastic3d.values import Generation

POLL = 0.1
"""Seconds between two checks whether members are still there."""

BUDGET = 30.0
"""Seconds for each read: when thousands of nodes start at once, etcd cannot keep up."""


def end_seen(client: EtcdClient, root: str, age: float = 0.0) -> int:
    """Return the revision of the end record that stood under `root` when this node was started, 0 for none.

    age: seconds since then. A node may come to read etcd only when the job for which it was started is over: etcd was
    away, or the node is slow.
    """
    end = client.get(root + keys.END, budget=BUDGET)
    if end is None:
        return 0
    ago = _ended_ago(client, root)
    return 0 if ago is not None and ago < age else end.mod_revision


def _ended_ago(client: EtcdClient, root: str) -> float | None:
    """Return at most how many seconds ago the job under `root` ended; None if that was long ago, or cannot be known.

    By etcd's clock alone: machines' clocks differ, and jump.
    """
    mark = client.get(root + keys.END_AGE, budget=BUDGET)
    if mark is None:
        return None
    left = client.time_to_live(mark.lease, budget=BUDGET)
    term = client.term(root, budget=BUDGET)
    return None if left is None or mark.value != b"%d" % term else keys.END_LASTS - left


def make_room(client: EtcdClient, root: str, lease: float, clock: Clock, seen: int | None = None) -> End | None:
    """Clear away the job that ended under `root`, if one did and none of its members is left.

    Waits for members that are about to go, at most `lease` seconds: those still there after that will stay, and a node
    that joins learns from the records that the job is over.

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
            # A job that failed may be begun again: that is what torchrun's restarts are for.
            if not over.failed:
                return over
        if not client.exists(root + keys.MEMBERS):
            break
        if clock.monotonic() >= patience:
            return None
        clock.sleep(POLL)
    wipe: list[Operation] = [Delete(root + key) for key in (keys.END, keys.END_AGE, keys.PROPOSAL, keys.GOODPUT)]
    past = (keys.WHOLE, keys.TOMBS, keys.DOUBTS, keys.FAULTS, keys.DRAINS, keys.HISTORY, keys.VERDICTS)
    wipe += [Delete(root + prefix, prefix=True) for prefix in past]
    last = sealed(root, client.range(root + keys.LISTED)[0])
    if last is not None:
        # Its nodes are gone and nobody waits for them.
        wipe.append(Put(root + keys.GENERATION, encode(emptied(last))))
    mark = client.get(root + keys.END_AGE, budget=BUDGET)
    client.txn([Compare.mod_revision(end.key, end.mod_revision)], wipe)
    if mark is not None:
        client.revoke(mark.lease, budget=BUDGET)
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
