"""Translates keys of `--rdzv-conf` for torch's own backends into ours: scripts written for them run as they are.

Names and meanings are those of torch's `etcd`, `etcd-v2` and `c10d` (`_create_etcd_client` and `create_handler` in its
rendezvous modules). Keys without a counterpart here are left out, and the user hears why.
"""

from __future__ import annotations

from collections.abc import Mapping

from elastic3d.errors import ConfigurationError

SAME = {
    "etcd_prefix": "prefix",
    "last_call_timeout": "last_call",
    "join_timeout": "timeout",
    "cacert": "ca",
    "ca_cert": "ca",
    "ssl_cert": "cert",
    "ssl_cert_key": "key",
}
"""torch's key, and ours for the same setting."""

WITHOUT_USE = {
    "is_host": "etcd is the host",
    "store_type": "etcd is the store",
    "read_timeout": "calls to etcd are tried again within their own time limits",
    "close_timeout": "nothing is waited for when a rendezvous is closed",
    "heartbeat_timeout": "lost nodes are found by `lease` and `grace`",
    "keep_alive_interval": "lost nodes are found by `lease` and `grace`",
    "keep_alive_max_attempt": "lost nodes are found by `lease` and `grace`",
    "rank": "ranks are decided by the members",
}
"""torch's key, and why it has no counterpart here."""

KEYS = (*SAME, *WITHOUT_USE, "protocol")

LAST_CALL = "30"
"""Seconds for which torch's backends wait for more nodes than the minimum."""


def translated(conf: Mapping[str, str], endpoint: str) -> tuple[dict[str, str], str, list[str]]:
    """Return the settings and the endpoint in our terms, and lines for the user about keys that were left out.

    torchrun sets `timeout` by itself, so that `join_timeout`, which a person wrote, counts. ConfigurationError if two
    keys contradict each other.
    """
    ours = {key: value for key, value in conf.items() if key not in KEYS}
    for theirs, own in SAME.items():
        if theirs not in conf:
            continue
        if own in ours and own != "timeout" and ours[own] != conf[theirs]:
            raise ConfigurationError(f"--rdzv-conf: {own} and {theirs} are the same setting; give one of them")
        ours[own] = conf[theirs]
    lines = [
        f"--rdzv-conf={key}={conf[key]} has no effect here: {why}" for key, why in WITHOUT_USE.items() if key in conf
    ]
    return ours, _with_protocol(conf.get("protocol"), endpoint), lines


def _with_protocol(protocol: str | None, endpoint: str) -> str:
    """Return the endpoints with the scheme that `protocol` asks for, where they have none."""
    if protocol is None:
        return endpoint
    scheme = protocol.strip().lower()
    if scheme not in ("http", "https"):
        raise ConfigurationError(f"--rdzv-conf=protocol={protocol}: choose http or https")
    parts = [part.strip() for part in endpoint.split(",") if part.strip()]
    return ",".join(part if "://" in part else f"{scheme}://{part}" for part in parts)
