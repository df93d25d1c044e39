"""Making room for a new job under the id of one that ended.

What people ask an ended job for, its history and its end, stays readable until then, and goes when the next one
begins: two jobs under one id never mix. The number of its last generation stays for ever: it is the newest token of
checkpoints there is. What keeps machines out stays too: it is about the machine.
"""

from __future__ import annotations

from elastic3d import etcd_keys as keys
from elastic3d.clock import Clock
from elastic3d.etcd import Compare, Delete, EtcdClient, Operation, Put
from elastic3d.membership.reading import sealed
from elastic3d.membership.records import End, decode, encode
from elastic3d.values import Generation

POLL = 0.1
"""Seconds between two looks at who is still there."""

BUDGET = 30.0
"""Seconds for the first look: where thousands of nodes start at once, etcd has more to do than it can."""


def end_seen(client: EtcdClient, root: str) -> int:
    """Return the revision of the end of a job that stands under `root`, 0 for none: any later end is another job's."""
    found = client.get(root + keys.END, budget=BUDGET)
    return 0 if found is None else found.mod_revision


def make_room(client: EtcdClient, root: str, lease: float, clock: Clock, seen: int | None = None) -> End | None:
    """Clear away the job that ended under `root`, if one did and nobody of it is there any more.

    Waits for those who are about to go, for a `lease` at most: after that they are there to stay, and whoever joins
    hears from the records that the job is over.

    seen: `end_seen` when this node was started, None for not known. A job that ended well after that is the one it was
    started for, and not to be begun anew by a node that was slow to come: its end is returned, and nothing cleared.
    """
    patience = clock.monotonic() + lease + 1.0
    while True:
        end = client.get(root + keys.END, budget=BUDGET)
        if end is None:
            return None
        if seen is not None and end.mod_revision > seen:
            over = decode(End, end.value, end.key)
            # One that failed may be begun again: that is what torchrun's restarts are for.
            if not over.failed:
                return over
        if not client.exists(root + keys.MEMBERS):
            break
        if clock.monotonic() >= patience:
            return None
        clock.sleep(POLL)
    wipe: list[Operation] = [Delete(root + key) for key in (keys.END, keys.PROPOSAL)]
    past = (keys.WHOLE, keys.TOMBS, keys.DOUBTS, keys.DRAINS, keys.HISTORY)
    wipe += [Delete(root + prefix, prefix=True) for prefix in past]
    last = sealed(root, client.range(root + keys.LISTED)[0])
    if last is not None:
        # Its nodes are gone and nobody waits for them.
        empty = Generation(number=last.number, attempt=last.attempt, cause=last.cause, nodes=())
        wipe.append(Put(root + keys.GENERATION, encode(empty)))
    client.txn([Compare.mod_revision(end.key, end.mod_revision)], wipe)
    return None
