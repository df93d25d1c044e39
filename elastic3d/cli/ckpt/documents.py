"""What `elastic3d ckpt ... --json` prints: one document for each command, beside its `schema` and `store`.

These are the field names that programs rely on; the reference is written from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from checkpointing.format.distrust import Distrust
from checkpointing.format.record import Totals
from checkpointing.format.tiles import Box, TensorSpec
from checkpointing.inspection.difference import Difference
from checkpointing.inspection.history import Commit
from checkpointing.inspection.statistics import TensorStatistics
from checkpointing.inspection.summary import Summary
from checkpointing.inspection.tree import Node
from checkpointing.inspection.usage import StoreUsage
from checkpointing.inspection.values import ValueDifference
from checkpointing.reading.verify import Finding
from elastic3d.cli.ckpt.render.store import CheckpointRow
from elastic3d.planner.placement import RankPlace
from elastic3d.planner.shares import MeshSizes
from elastic3d.provenance.comparing import CodeComparison
from elastic3d.provenance.config import ConfigChange
from elastic3d.provenance.record import Provenance
from elastic3d.rollback import Rollback


@dataclass(frozen=True, slots=True, kw_only=True)
class LsDocument:
    """What `elastic3d ckpt ls` lists."""

    generation: int | None
    """The newest that may commit; None while the store has no ref."""
    checkpoints: tuple[CheckpointRow, ...]
    """Newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogDocument:
    """What `elastic3d ckpt log` lists."""

    commits: tuple[Commit, ...]
    """Newest first."""
    more: int
    """How many older ones were not asked for."""
    labels: dict[str, tuple[str, ...]]
    """latest, verified, vetted, tags, "pinned" and "distrusted", by checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DuDocument:
    """What `elastic3d ckpt du` counts."""

    usage: StoreUsage
    """In bytes."""
    unreadable: tuple[str, ...]
    """Checkpoints that could not be counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowDocument:
    """What `elastic3d ckpt show` tells."""

    summary: Summary
    """Of the one checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeDocument:
    """What `elastic3d ckpt tree` tells."""

    checkpoint: str
    """Its name."""
    tree: tuple[Node, ...]
    """The groups at the top, whatever --depth says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsDocument:
    """What `elastic3d ckpt stats` tells."""

    checkpoint: str
    """Its name."""
    tensors: tuple[TensorStatistics, ...]
    """In the order asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatDocument:
    """What `elastic3d ckpt cat` prints."""

    checkpoint: str
    """Its name."""
    tensor: TensorSpec
    """The whole tensor."""
    box: Box
    """The part that was asked for."""
    values: Any
    """Its elements: nested lists, or one number; a complex one is a pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffDocument:
    """What `elastic3d ckpt diff` found."""

    difference: Difference
    """By digests and statistics."""
    drifts: dict[str, float]
    """How far the root of the mean square moved, relative to before, by tensor, where that is known."""
    values: tuple[ValueDifference, ...] | None
    """Of the tensors that had to be read; None without --values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigDiffDocument:
    """What `elastic3d ckpt diff --config` found."""

    before: str
    """The earlier checkpoint."""
    after: str
    """The later one."""
    before_version: str
    """Of the earlier one's configuration, "" where it has none."""
    after_version: str
    """Of the later one's, likewise."""
    changes: tuple[ConfigChange, ...]
    """By key; () where the configurations are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSteps:
    """Steps that one generation made in one layout, as the ledger has them."""

    generation: int
    """Its number."""
    first_step: int
    """The first."""
    stop_step: int
    """The one after the last."""
    layout: str
    """Sizes of the mesh axes."""
    excluded: int = 0
    """Samples that were left out of training."""
    changed: str = ""
    """What the script was allowed to change before them, "" for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenanceDocument:
    """What `elastic3d ckpt provenance` tells."""

    checkpoint: str
    """Its name."""
    root: str
    """The digest that covers all but `distrusted` and `compared`."""
    step: int
    """How many steps the run had made."""
    provenance: Provenance | None
    """Configuration, code and packages; None where the checkpoint does not say."""
    data: str
    """Fingerprint of the data set, "" for one that has none."""
    data_seed: int | None
    """Of the order of samples; None where the checkpoint does not say."""
    generations: tuple[GenerationSteps, ...]
    """Which generation made which steps, oldest first."""
    rollbacks: tuple[Rollback, ...]
    """What was left out since the loss had jumped up."""
    distrusted: tuple[Distrust, ...]
    """The store's rules for states that a device which computes wrongly, or a spike of the loss, may have spoilt."""
    compared: CodeComparison | None
    """The folder of `--code`; None without `--verify`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyDocument:
    """What `elastic3d ckpt verify` found."""

    bytes: int
    """That were read."""
    findings: tuple[Finding, ...]
    """What is wrong; () for nothing."""
    faults: dict[str, int]
    """How many of these, by kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHomes:
    """Where a checkpoint's tensors belong in a pipeline. All by parameter, which an optimizer's tensors follow."""

    blocks: str
    """Path of the numbered modules, "" for none."""
    count: int
    """How many there are."""
    last: tuple[str, ...]
    """What belongs to the last stage."""
    whole: tuple[str, ...]
    """What is not cut."""
    guessed: tuple[str, ...]
    """Tensors outside the blocks that are counted to the first stage because nothing says better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderDocument:
    """Ranks that read each tile once for all of them, and what they would read."""

    ranks: tuple[int, ...]
    """Of the mesh that was asked for."""
    places: tuple[RankPlace, ...]
    """Theirs on the axes, in the same order."""
    needed: int
    """Bytes of the regions that they hold."""
    read: int
    """Bytes of all requests, gaps between tiles included."""
    stored: int
    """Bytes of the tiles, as they are stored."""
    tiles: int
    """How many."""
    requests: int
    """How many."""
    packs: int
    """How many."""
    over_read: float | None
    """Bytes read for each that is needed, None where none is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardDocument:
    """What `elastic3d ckpt plan` tells of another mesh."""

    checkpoint: str
    """Its name."""
    target: MeshSizes
    """The mesh that was asked for."""
    slots: int
    """Ranks that read together."""
    homes: TensorHomes
    """How stages would be cut."""
    readers: tuple[ReaderDocument, ...]
    """In order of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TagsDocument:
    """What `elastic3d ckpt tag` lists."""

    tags: dict[str, str]
    """Checkpoints by tag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TagDocument:
    """What `elastic3d ckpt tag` did."""

    tag: str
    """The name."""
    checkpoint: str
    """What it points to now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UntagDocument:
    """What `elastic3d ckpt untag` did."""

    untagged: str
    """The name that points to nothing any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinsDocument:
    """What `elastic3d ckpt pin` lists."""

    pins: dict[str, str]
    """Reasons by checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinDocument:
    """What `elastic3d ckpt pin` did."""

    pinned: str
    """The checkpoint."""
    reason: str
    """Why, "" where nobody said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpinDocument:
    """What `elastic3d ckpt unpin` did."""

    unpinned: str
    """The checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GcPlanDocument:
    """What `elastic3d ckpt gc --dry-run` would do."""

    dry_run: bool = True
    """Nothing was changed."""
    kept: tuple[str, ...]
    """Checkpoints that stay."""
    dropped: tuple[str, ...]
    """Checkpoints that go."""
    objects: int
    """How many it would delete."""
    bytes: int
    """What they take."""
    over: int
    """Bytes that the kept checkpoints would take above --keep-bytes."""
    names: tuple[str, ...]
    """Of the objects, in the order of deletion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GcDocument:
    """What `elastic3d ckpt gc` did."""

    dry_run: bool = False
    """It was done."""
    dropped: tuple[str, ...]
    """Checkpoints that are committed no more."""
    objects: int
    """How many it deleted."""
    bytes: int
    """What they took."""
    spared: int
    """How many were condemned but needed after all, or gone already."""
    waiting: float
    """Seconds until what is condemned may go, 0 when nothing waits; call again then."""
    over: int
    """Bytes that the kept checkpoints take above --keep-bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairDocument:
    """What `elastic3d ckpt repair` left."""

    checkpoint: str | None
    """What `latest` points to, None for nothing."""
    generation: int
    """The newest that may commit."""
    committed: tuple[str, ...]
    """All committed checkpoints, newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportDocument:
    """What `elastic3d ckpt import` made."""

    checkpoint: str
    """Its name."""
    root: str
    """The digest of its contents."""
    totals: Totals
    """What it holds."""
    moved: bool
    """Whether `latest` points to it now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportDocument:
    """What `elastic3d ckpt export` wrote."""

    checkpoint: str
    """Its name."""
    step: int
    """Its step."""
    target: str
    """The file or folder."""
    kind: str
    """Its format."""
    tensors: int
    """How many."""
    bytes: int
    """Of all of them."""
    left_out: int
    """Objects, which are no tensors, that were not written."""


CheckpointDocument = (
    LsDocument
    | LogDocument
    | DuDocument
    | ShowDocument
    | TreeDocument
    | StatsDocument
    | CatDocument
    | DiffDocument
    | ConfigDiffDocument
    | ProvenanceDocument
    | VerifyDocument
    | ReshardDocument
    | TagsDocument
    | TagDocument
    | UntagDocument
    | PinsDocument
    | PinDocument
    | UnpinDocument
    | GcPlanDocument
    | GcDocument
    | RepairDocument
    | ImportDocument
    | ExportDocument
)
