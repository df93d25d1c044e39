"""The secret of a run: 32 random bytes under its prefix in etcd, written once, by the first process that needs them.

Reading it requires the right to read the run's keys, so that etcd's TLS and users decide who is of the run. It stays
when the job ends: the next one under the same id uses it again, and no node has to wait for another to write a new one.
Members see it on the board, which they all watch: `agreement.py` says what they do when it changes.
"""

from __future__ import annotations

import re
import secrets

from elastic3d import etcd_keys as keys
from elastic3d.clock import SYSTEM, Clock
from elastic3d.errors import ConfigurationError
from elastic3d.etcd import Compare, EtcdClient, Get, Impaired, Put
from elastic3d.trust.credentials import SECRET_BYTES

BUDGET = 30.0
"""Seconds for each call: when thousands of nodes start at once, etcd cannot keep up."""

RESTORING = 15.0
"""Seconds within which the leader of a living job writes it again if something else is there."""

MENDING = 30.0
"""Seconds for which a node that starts waits for an etcd that takes no writes, as it does for one that is away."""

_POLL = 0.2
_FORM = re.compile(rb"[0-9a-f]{64}")


def readable(value: bytes) -> bool:
    """Return whether this is a secret of a run."""
    return _FORM.fullmatch(value) is not None


def obtain(client: EtcdClient, root: str, *, clock: Clock = SYSTEM) -> str:
    """Return the secret of the run under `root`, writing one if there is none.

    ConfigurationError if something else is there, and no job is running whose leader would put that right. EtcdError
    where etcd is away, or takes no writes for longer than `MENDING`.
    """
    key, began = root + keys.SECRET, clock.monotonic()
    while True:
        # If it is sent twice, the second try finds what the first wrote.
        mine = secrets.token_hex(SECRET_BYTES).encode()
        entry = client.get(key, budget=BUDGET)
        value = entry.value if entry is not None else b""
        if entry is None:
            try:
                result = client.txn([Compare.absent(key)], [Put(key, mine)], [Get(key)], idempotent=True, budget=BUDGET)
            except Impaired:
                # Members of the job train on meanwhile, and one that comes must not be lost for it.
                if clock.monotonic() >= began + MENDING:
                    raise
                clock.sleep(_POLL)
                continue
            value = mine if result.succeeded else result.gets[0][0].value
        if readable(value):
            return value.decode()
        if clock.monotonic() >= began + RESTORING or not client.exists(root + keys.LEADER):
            break
        clock.sleep(_POLL)
    raise ConfigurationError(
        f"etcd key {key} holds no secret of a run; another program writes under this prefix: choose another "
        "--rdzv-id or prefix, or delete the key"
    )
