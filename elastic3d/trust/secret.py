"""The secret of a run: 32 random bytes under its prefix in etcd, written once, by whoever needs them first.

Reading it takes the right to read the run's keys, so that etcd's TLS and users decide who is of the run. It stays when
the job ends: the next one under the same id uses it again, and nobody has to wait for the other to write a new one.
"""

from __future__ import annotations

import re
import secrets

from elastic3d.errors import ConfigurationError
from elastic3d.etcd import Compare, EtcdClient, Get, Put
from elastic3d.trust.credentials import SECRET_BYTES

KEY = "secret"
"""Below the run's prefix."""

BUDGET = 30.0
"""Seconds for it: where thousands of nodes start at once, etcd has more to do than it can."""

_FORM = re.compile(rb"[0-9a-f]{64}")


def obtain(client: EtcdClient, root: str, known: str = "") -> str:
    """Return the secret of the run under `root`, writing one where there is none; ConfigurationError for nonsense.

    known: the one that this process uses already. An etcd that came back empty is given it again, so that those who
    join later can talk to those who run. Where another stands by now, that one is returned: etcd decides.
    """
    key = root + KEY
    found = client.get(key, budget=BUDGET)
    value = found.value if found is not None else b""
    if found is None:
        mine = (known or secrets.token_hex(SECRET_BYTES)).encode()
        # Sent twice, the second finds what the first wrote.
        result = client.txn([Compare.absent(key)], [Put(key, mine)], [Get(key)], idempotent=True, budget=BUDGET)
        value = mine if result.succeeded else result.gets[0][0].value
    if not _FORM.fullmatch(value):
        raise ConfigurationError(
            f"etcd key {key} holds no secret of a run; another program writes under this prefix: choose another "
            "--rdzv-id or prefix, or delete the key while no job runs"
        )
    return value.decode()
