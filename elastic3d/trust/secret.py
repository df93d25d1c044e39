"""The secret of a run: 32 random bytes under its prefix in etcd, written once, by the first process that needs them.

Reading it requires the right to read the run's keys, so that etcd's TLS and users decide who is of the run. It stays
when the job ends: the next one under the same id uses it again, and no node has to wait for another to write a new one.
Members see it on the board, which they all watch: `agreement.py` says what they do when it changes.
"""

from __future__ import annotations

import re
import secrets
from functools import partial

from elastic3d import etcd_keys as keys
from elastic3d.clock import SYSTEM, Clock
from elastic3d.errors import ConfigurationError
from elastic3d.etcd import Compare, EtcdClient, Get, Put
from elastic3d.etcd.mending import once_mended
from elastic3d.trust.credentials import SECRET_BYTES

BUDGET = 30.0
"""Seconds for each call: when thousands of nodes start at once, etcd cannot keep up."""

RESTORING = 15.0
"""Seconds within which the leader of a living job writes it again if something else is there."""

_POLL = 0.2
_FORM = re.compile(rb"[0-9a-f]{64}")


def _written(client: EtcdClient, key: str) -> bytes:
    """Write a secret unless something is there, and return what is."""
    mine = secrets.token_hex(SECRET_BYTES).encode()
    # If it is sent twice, the second try finds what the first wrote.
    result = client.txn([Compare.absent(key)], [Put(key, mine)], [Get(key)], idempotent=True, budget=BUDGET)
    return mine if result.succeeded else result.gets[0][0].value


def readable(value: bytes) -> bool:
    """Return whether this is a secret of a run."""
    return _FORM.fullmatch(value) is not None


def obtain(client: EtcdClient, root: str, *, clock: Clock = SYSTEM) -> str:
    """Return the secret of the run under `root`, writing one if there is none.

    ConfigurationError if something else is there, and no job is running whose leader would put that right. EtcdError
    where etcd is away, or takes no writes for as long as `once_mended` waits.
    """
    key, began = root + keys.SECRET, clock.monotonic()
    while True:
        entry = client.get(key, budget=BUDGET)
        value = once_mended(partial(_written, client, key), clock) if entry is None else entry.value
        if readable(value):
            return value.decode()
        if clock.monotonic() >= began + RESTORING or not client.exists(root + keys.LEADER):
            break
        clock.sleep(_POLL)
    raise ConfigurationError(
        f"etcd key {key} holds no secret of a run; another program writes under this prefix: choose another "
        "--rdzv-id or prefix, or delete the key"
    )
