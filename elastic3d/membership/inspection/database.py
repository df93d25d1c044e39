"""Whether etcd is about to be full: beyond its quota it takes no writes, and no generation can change any more."""

from __future__ import annotations

LARGE = 1 << 30
"""Bytes of etcd's database beyond which people are warned: half of what etcd allows where nobody set a quota."""


def fullness(size: int) -> list[str]:
    """Return the warnings about an etcd database of `size` bytes, none while there is room."""
    if size < LARGE:
        return []
    return [
        f"etcd's database has {size / (1 << 30):.1f} GiB; at its quota (2 GiB, unless --quota-backend-bytes says more) "
        "it takes no writes. See that it is compacted (--auto-compaction-retention), and defragment it (etcdctl defrag)"
    ]
