"""What a script passes to `elastic3d.run`, checked where it enters."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from checkpointing.format.announcement import ANNOUNCED_AFTER
from checkpointing.format.fields import LARGEST_TILE
from checkpointing.format.grid import SMALL_BYTES, TILE_BYTES
from checkpointing.retention.collection import GRACE
from checkpointing.stores.address import redacted
from checkpointing.stores.retrying import PATIENCE
from elastic3d.errors import UsageError
from elastic3d.health.options import Watching
from elastic3d.log import LIMIT
from elastic3d.metrics.address import MetricsAddress
from elastic3d.paths import expanded
from elastic3d.planner.costs import Costs
from elastic3d.quantities import Every, every, rate, seconds, size, whole
from elastic3d.snapshots.interval import AUTO
from elastic3d.telemetry.address import CollectorAddress
from elastic3d.trackers.choice import Named
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
class Checkpointing:
    """How checkpoints are written, kept and read: `checkpointing=` of `elastic3d.run`, beside `store=` and `every=`.

    UsageError for values that make no sense.
    """

    keep: int | None = None
    """How many of the newest are kept, 1 or more; None, the default, for all."""
    keep_every: int = 0
    """Those of every so many steps are kept as well; 0, the default, for none. Needs `keep`."""
    keep_bytes: int | str | None = None
    """What all kept ones may take together, in bytes or as "500GB"; the oldest go first. None, the default, for no
    bound."""
    grace: float | str = GRACE
    """How long objects that nothing needs any more are left for readers who cannot announce themselves in the store, in
    seconds or as "10m"; all other readers have as long as they need. At least 60 s, 300 s by default."""
    codec: str = "raw"
    """How tiles are stored: "raw", the default, "planes", "xor", or "auto", which measures."""
    tile_bytes: int | str = TILE_BYTES
    """The most of a tile, which is what is digested, copied to a buddy, fetched and stored: 256 KiB to 64 MiB, in bytes
    or as "16MiB"; 4 MiB by default. Larger ones make lists of tiles shorter where tensors have gigabytes; smaller ones
    let another layout fetch less in vain. When it is changed, the next checkpoint is written whole."""
    verify: str = "sample"
    """How much is read back before a checkpoint counts as verified: "off", "sample", the default, or "all"."""
    max_bandwidth: int | str | None = None
    """What a node may write, in bytes a second or as "200MB/s"; None, the default, for no limit."""
    key: str | os.PathLike[str] | None = None
    """File with the key that encrypts everything; None, the default, for no encryption."""
    register: str | None = None
    """`"etcd"` for a store without conditional writes; None, the default, where the store has them."""
    cache: str | os.PathLike[str] | None = None
    """Folder on local disk for tiles read from the store; None, the default, for none."""
    cache_limit: int | str = "100GB"
    """What the cache may take, in bytes or as "200GB"; 100 GB by default."""
    patience: float | str = PATIENCE
    """How long an operation is retried on a busy or unreachable store, in seconds or as "2m", the default. Training
    goes on meanwhile."""

    def __post_init__(self) -> None:
        for name, value in (("key", self.key), ("cache", self.cache)):
            if value is not None and not isinstance(value, str | os.PathLike):
                raise UsageError(f"{_OF}({name}={value!r}): give a path")
        if self.register not in (None, "etcd"):
            raise UsageError(f"{_OF}(register={self.register!r}): give 'etcd', or leave it out")
        size(self.cache_limit, f"{_OF}: cache_limit")
        seconds(self.patience, f"{_OF}: patience")
        saving(self)


_OF = "elastic3d.Checkpointing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """How checkpoints are made and kept.

    every: when one is due. codec: how tiles are stored. tile_bytes: the most of one. max_bandwidth: bytes a second that
    this node writes, None for no limit; the last checkpoint of a node that leaves is written without it. keep: how many
    of the newest are kept, None for all; keep_every: those of every so many steps are kept too, 0 for none. keep_bytes:
    what all kept ones may take together, None for no bound. grace: the least seconds for which objects that nothing
    needs any more are left, for readers and writers that do not announce themselves.
    """

    every: Every = TEN_STEPS
    codec: str = "raw"
    tile_bytes: int = TILE_BYTES
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

    snapshot_every: in steps, 0 for never, None for as often as their cost allows. stale_after, stale_snapshots: seconds
    and snapshots by which the safe step may be behind before that is reported and acted upon. threads: CPU threads per
    trainer for tensor operations. costs: what the planner predicts step times from when this node leads, None to choose
    layouts by shape alone. restore: the checkpoint to go on from where no state is in memory. fresh: whether to begin
    at step 0 even though steps were made before and are lost. device: the kind that trainers compute on. health: how
    ranks that stand still are found, None for not at all. trackers: where curves are written. metrics: where each node
    serves its own, None for nowhere. telemetry: where each node sends them and its spans, None for nowhere.
    """

    store: StoreAt | None = None
    saving: Saving = Saving()
    layout: Layout | None = None
    events: str | None = None
    events_limit: int = LIMIT
    snapshot_every: int | None = None
    stale_after: float = MOST_SECONDS
    stale_snapshots: int = MOST_SNAPSHOTS
    threads: int = 1
    costs: Costs | None = None
    restore: str = "latest"
    fresh: bool = False
    device: str = "cpu"
    health: Watching | None = None
    trackers: tuple[Named, ...] = ()
    metrics: MetricsAddress | None = None
    telemetry: CollectorAddress | None = None

    def __post_init__(self) -> None:
        if self.snapshot_every is not None:
            whole(self.snapshot_every, "snapshot_every", 0, "elastic3d.run")
        for name, least in (("threads", 1), ("stale_snapshots", LEAST_SNAPSHOTS)):
            whole(getattr(self, name), name, least, "elastic3d.run")
        if not self.stale_after > 0:
            raise UsageError(f"elastic3d.run(stale_after={self.stale_after!r}): give a time above 0, such as '30s'")
        if not isinstance(self.fresh, bool):
            raise UsageError(f"elastic3d.run(fresh={self.fresh!r}): give True or False")
        if not isinstance(self.restore, str) or not self.restore or not self.restore.isprintable():
            raise UsageError(
                f"elastic3d.run(restore={self.restore!r}): give 'latest', 'verified', 'vetted', or a tag, step or "
                "name of a checkpoint, as `elastic3d ckpt ls` shows them"
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


def snapshot_interval(value: int | str) -> int | None:
    """Return the steps between snapshots that a user asks for, None for "auto"; UsageError for anything else."""
    if value == AUTO:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UsageError(
            f"elastic3d.run(snapshot_every={value!r}): give a number of steps, 0 for never, or '{AUTO}' for as often "
            "as their cost allows"
        )
    return value


def store_at(url: str | os.PathLike[str] | None, given: Checkpointing | None = None) -> StoreAt | None:
    """Return where the checkpoints are, a path made absolute; UsageError for values that make no sense."""
    given = given or Checkpointing()
    if url is None:
        for name, value in (("key", given.key), ("register", given.register), ("cache", given.cache)):
            if value is not None:
                raise UsageError(f"{_OF}({name}={value!r}): there is no store; give elastic3d.run a store= too")
        return None
    path = os.fspath(url) if isinstance(url, str | os.PathLike) else b""
    if not isinstance(path, str) or not path.strip() or (path is url and not re.search(r"[/~.]", path)):
        # A name alone may be a bucket whose s3:// was forgotten.
        raise UsageError(
            f"elastic3d.run(store={redacted(str(url))!r}): give a URL such as s3://bucket/run, or a path such as ./run"
        )
    if not re.match(r"^[a-z0-9+]+://", path):
        path = str(expanded(path, "elastic3d.run: store").absolute())
    return StoreAt(
        url=path,
        key=os.fspath(given.key or ""),
        register=given.register or "",
        cache=str(expanded(given.cache, f"{_OF}: cache")) if given.cache else "",
        cache_bytes=size(given.cache_limit, f"{_OF}: cache_limit") if given.cache else 0,
        patience=seconds(given.patience, f"{_OF}: patience"),
    )


def saving(given: Checkpointing, due: int | str = 10) -> Saving:
    """Return how checkpoints are made and when they are `due`; UsageError for values that make no sense."""
    if given.codec not in CODECS:
        raise UsageError(f"{_OF}(codec={given.codec!r}): give one of {', '.join(CODECS)}")
    if given.verify not in set(Verification):
        raise UsageError(f"{_OF}(verify={given.verify!r}): give one of {', '.join(Verification)}")
    if given.keep is not None:
        whole(given.keep, "keep", 1, _OF)
    elif given.keep_every:
        raise UsageError(f"{_OF}(keep_every=...): everything is kept; say with keep= how many of the newest are")
    whole(given.keep_every, "keep_every", 0, _OF)
    left = seconds(given.grace, f"{_OF}: grace")
    if left < LEAST_GRACE:
        raise UsageError(
            f"{_OF}(grace={given.grace!r}): give at least {LEAST_GRACE:.0f}s: reads and saves need as long to "
            "announce themselves in the store"
        )
    tile_bytes = size(given.tile_bytes, f"{_OF}: tile_bytes")
    if not SMALL_BYTES <= tile_bytes <= LARGEST_TILE:
        raise UsageError(
            f"{_OF}(tile_bytes={given.tile_bytes!r}): give {SMALL_BYTES >> 10}KiB to {LARGEST_TILE >> 20}MiB"
        )
    return Saving(
        every=every(due, "elastic3d.run: every"),
        codec=given.codec,
        tile_bytes=tile_bytes,
        max_bandwidth=rate(given.max_bandwidth, f"{_OF}: max_bandwidth") if given.max_bandwidth is not None else None,
        keep=given.keep,
        keep_every=given.keep_every,
        keep_bytes=size(given.keep_bytes, f"{_OF}: keep_bytes") if given.keep_bytes is not None else None,
        grace=left,
        verification=Verification(given.verify),
    )


def refuse_moved(names: Iterable[str]) -> None:
    """Refuse keywords that `elastic3d.run` does not take; say where those that moved are now."""
    moved = [name for name in names if name in Checkpointing.__dataclass_fields__]
    if moved:
        fields = ", ".join(f"{name}=..." for name in moved)
        raise UsageError(
            f"elastic3d.run takes no {', '.join(moved)}; give checkpointing=elastic3d.Checkpointing({fields})"
        )
    for name in names:
        raise TypeError(f"run() got an unexpected keyword argument {name!r}")
