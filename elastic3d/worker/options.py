"""What a script says to `elastic3d.run`, checked where it enters."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from checkpointing.format.announcement import ANNOUNCED_AFTER
from checkpointing.retention.collection import GRACE
from checkpointing.stores.address import redacted
from checkpointing.stores.retrying import PATIENCE
from elastic3d.errors import UsageError
from elastic3d.log import LIMIT
from elastic3d.planner.costs import Costs
from elastic3d.quantities import Every, every, rate, seconds, size
from elastic3d.values import Layout, StoreAt
from elastic3d.worker.safety import LEAST_SNAPSHOTS, MOST_SECONDS, MOST_SNAPSHOTS

TEN_STEPS = Every(steps=10)
LEAST_EVENTS = 1 << 20
LEAST_GRACE = 2 * ANNOUNCED_AFTER
CODECS = ("raw", "planes", "xor", "auto")


class Verification(StrEnum):
    """How much of a committed checkpoint is read back before `verified` moves to it.

    off: nothing, and it does not move. sample: record, manifests, and some tiles of each pack. all: every tile.
    """

    OFF = "off"
    SAMPLE = "sample"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """How checkpoints are made and kept.

    every: when one is due. codec: how tiles are stored. max_bandwidth: bytes a second that this node writes, None for
    no limit; what a node leaves behind at a notice is written without. keep: how many of the newest are kept, None for
    all; keep_every: those of every so many steps are kept too, 0 for none. keep_bytes: what all kept ones may take
    together, None for no bound. grace: seconds that objects which nothing needs any more are left at least, for who
    reads or writes and does not announce it.
    """

    every: Every = TEN_STEPS
    codec: str = "raw"
    max_bandwidth: int | None = None
    keep: int | None = None
    keep_every: int = 0
    keep_bytes: int | None = None
    grace: float = GRACE
    verification: Verification = Verification.SAMPLE


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """store: where checkpoints go, None for nowhere. layout: axes to fix. events: folder for event files, of which a
    node keeps `events_limit` bytes.

    snapshot_every: in steps, 0 for never. stale_after, stale_snapshots: seconds and snapshots by which the safe step
    may be behind before that is said, and acted upon. threads: CPU threads per trainer for tensor operations. costs:
    what the planner predicts with when this node leads, None to choose layouts by shape alone. restore: the checkpoint
    to go on from where no state is in memory. fresh: beginning at step 0 is meant, though steps were made before and
    are lost.
    """

    store: StoreAt | None = None
    saving: Saving = Saving()
    layout: Layout | None = None
    events: str | None = None
    events_limit: int = LIMIT
    snapshot_every: int = 1
    stale_after: float = MOST_SECONDS
    stale_snapshots: int = MOST_SNAPSHOTS
    threads: int = 1
    costs: Costs | None = None
    restore: str = "latest"
    fresh: bool = False

    def __post_init__(self) -> None:
        for name, least in (("snapshot_every", 0), ("threads", 1), ("stale_snapshots", LEAST_SNAPSHOTS)):
            _whole(getattr(self, name), name, least)
        if not self.stale_after > 0:
            raise UsageError(f"elastic3d.run(stale_after={self.stale_after!r}): give a time above 0, such as '30s'")
        if not isinstance(self.fresh, bool):
            raise UsageError(f"elastic3d.run(fresh={self.fresh!r}): give True or False")
        if not isinstance(self.restore, str) or not self.restore or not self.restore.isprintable():
            raise UsageError(
                f"elastic3d.run(restore={self.restore!r}): give 'latest', 'verified', or a tag, step or name of a "
                "checkpoint, as `elastic3d ckpt ls` shows them"
            )
        if self.restore != "latest" and self.store is None:
            raise UsageError(f"elastic3d.run(restore={self.restore!r}): there is no store; give store= too")
        if self.events_limit < LEAST_EVENTS:
            raise UsageError(
                f"elastic3d.run(events_limit=...): give at least {LEAST_EVENTS >> 20} MiB, which hold some minutes of "
                f"events; got {self.events_limit} bytes"
            )
        if self.layout is not None and not isinstance(self.layout, Layout):
            raise UsageError(f"elastic3d.run(layout={self.layout!r}): give an elastic3d.Layout, e.g. Layout(pp=2)")


def store_at(
    url: str | os.PathLike[str] | None,
    *,
    key: str,
    register: str,
    cache: str,
    cache_limit: int | str,
    patience: float | str = PATIENCE,
) -> StoreAt | None:
    """Return where the checkpoints are, a path as an absolute one; UsageError for what makes no sense."""
    if url is None:
        for name, value in (("key", key), ("register", register), ("cache", cache)):
            if value:
                raise UsageError(f"elastic3d.run({name}={value!r}): there is no store; give store= too")
        return None
    given = os.fspath(url) if isinstance(url, str | os.PathLike) else b""
    if not isinstance(given, str) or not given.strip() or (given is url and not re.search(r"[/~.]", given)):
        # A name alone may be a bucket whose s3:// was forgotten.
        raise UsageError(
            f"elastic3d.run(store={redacted(str(url))!r}): give a URL such as s3://bucket/run, or a path such as ./run"
        )
    if not re.match(r"^[a-z0-9+]+://", given):
        given = str(Path(given).expanduser().absolute())
    if register not in ("", "etcd"):
        raise UsageError(f"elastic3d.run(register={register!r}): give 'etcd', or leave it out")
    limit = size(cache_limit, "elastic3d.run: cache_limit")
    return StoreAt(
        url=given,
        key=key,
        register=register,
        cache=cache,
        cache_bytes=limit if cache else 0,
        patience=seconds(patience, "elastic3d.run: patience"),
    )


def saving(
    *,
    due: int | str,
    codec: str,
    max_bandwidth: int | str | None,
    keep: int | None,
    keep_every: int,
    keep_bytes: int | str | None,
    grace: float | str,
    verify: str,
) -> Saving:
    """Return how checkpoints are made; UsageError for what makes no sense."""
    if codec not in CODECS:
        raise UsageError(f"elastic3d.run(codec={codec!r}): give one of {', '.join(CODECS)}")
    if verify not in set(Verification):
        raise UsageError(f"elastic3d.run(verify={verify!r}): give one of {', '.join(Verification)}")
    if keep is not None:
        _whole(keep, "keep", 1)
    elif keep_every:
        raise UsageError("elastic3d.run(keep_every=...): everything is kept; say with keep= how many of the newest are")
    _whole(keep_every, "keep_every", 0)
    left = seconds(grace, "elastic3d.run: grace")
    if left < LEAST_GRACE:
        raise UsageError(
            f"elastic3d.run(grace={grace!r}): give at least {LEAST_GRACE:.0f}s: reads and saves need as long to "
            "announce themselves in the store"
        )
    return Saving(
        every=every(due, "elastic3d.run: every"),
        codec=codec,
        max_bandwidth=rate(max_bandwidth, "elastic3d.run: max_bandwidth") if max_bandwidth is not None else None,
        keep=keep,
        keep_every=keep_every,
        keep_bytes=size(keep_bytes, "elastic3d.run: keep_bytes") if keep_bytes is not None else None,
        grace=left,
        verification=Verification(verify),
    )


def _whole(value: Any, name: str, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"elastic3d.run({name}={value!r}): give a whole number, {least} or more")
