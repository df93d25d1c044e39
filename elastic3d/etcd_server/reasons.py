"""Why a member of etcd ended, by what it logged, and what to do about it."""

from __future__ import annotations

import json

# A member that is added again would have to join what is there, and `etcd up` starts members of a new cluster.
_REPLACE = "take a backup of the others by `elastic3d etcd backup`, and restore it into another folder, on each host"

# Texts of etcd's logs, the same in 3.4 and 3.5, in the order in which they are looked for: what comes first says more.
_REASONS = (
    ("no space left on device", "the disk with its data is full: make room, and it goes on"),
    (
        "has already been bootstrapped",
        f"its data are gone, and the others know it: {_REPLACE}",
    ),
    (
        "cluster ID mismatch",
        "its data are those of another cluster: give each cluster a folder of its own, and put none together from two",
    ),
    (
        "member count is unequal",
        "its data are those of a cluster with other members: give the members of its first start",
    ),
    ("address already in use", "another process has one of its ports: stop that (`ss -ltnp` says which)"),
    ("cannot assign requested address", "it is to listen on an address that this machine does not have"),
    ("permission denied", "it may not use its folder: that belongs to somebody else"),
    ("read-only file system", "the file system with its data takes no writes any more: look at the disk"),
    ("input/output error", "the disk with its data reports errors: move the data, or restore a backup elsewhere"),
    (
        "crc mismatch",
        f"its data are damaged: {_REPLACE}",
    ),
    ("snapshot file doesn't exist", "its data are not whole: restore a backup into another folder"),
    ("walpb: crc", "its data are damaged: restore a backup into another folder"),
    ("data inconsistency", f"its data differ from the others': {_REPLACE}"),
    ("bad certificate", "the members do not take each other's certificates: one authority has to have made all"),
    ("x509:", "a certificate is refused: one authority has to have made all, for the hosts' names, and none is over"),
)
MOST = 300
"""Letters of a log that are shown."""
_LIVED_ON = ("debug", "info", "warn")


def reason(log: str) -> str:
    """Return why, and what to do; the last line of the log where nobody knows, "" for an empty log."""
    lines = [line for line in log.splitlines() if line.strip()]
    lower = "\n".join(filter(_may_end, lines)).lower()
    for text, why in _REASONS:
        if text.lower() in lower:
            return why
    return f"it said last: {_said(lines[-1])}" if lines else ""


def _may_end(line: str) -> bool:
    """Return whether a member may have ended by what a line says: a client that it refused is a warning."""
    try:
        return json.loads(line).get("level") not in _LIVED_ON
    except (ValueError, AttributeError):
        return not line.startswith(("INFO:", "WARNING:"))


def _said(line: str) -> str:
    """Return the message of a line of etcd's log, which is JSON, and its error."""
    try:
        parts = json.loads(line)
        said = ": ".join(str(parts[name]) for name in ("msg", "error") if parts.get(name))
    except (ValueError, AttributeError):
        said = line
    return "".join(letter if letter.isprintable() else "?" for letter in (said or line).strip())[:MOST]
