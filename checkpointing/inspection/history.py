"""The commits of a store, newest first, each with its changes and the bytes it wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from checkpointing.errors import FormatError, NoCheckpoint
from checkpointing.inspection.difference import by_key
from checkpointing.inspection.documents import CheckpointDocuments, Extent, extents, find
from checkpointing.stores.protocol import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One committed checkpoint. written: stored bytes that the previous commit does not refer to; kept: those it does.

    changed: bytes of tiles whose digests differ from those at the same place in the previous commit, or whose tensors
    it does not have; None for the oldest, and if the previous one cannot be read. recut: bytes of tiles that were cut
    elsewhere before, so that digests cannot tell. error: why this one cannot be read, "" if it can.
    """

    checkpoint: str
    modified: float
    step: int = 0
    made_in: int = 0
    committed_in: int = 0
    ranks: int = 0
    parent: str | None = None
    tensors: int = 0
    bytes: int = 0
    written: int = 0
    kept: int = 0
    changed: int | None = None
    recut: int = 0
    added: int = 0
    removed: int = 0
    error: str = ""


def history(store: Store, committed: Sequence[str], modified: Mapping[str, float]) -> Iterator[Commit]:
    """Yield the commits in the given order, newest first; the manifests of two checkpoints are in memory at once."""
    after: tuple[CheckpointDocuments | None, str, str] | None = None
    for name in committed:
        current: CheckpointDocuments | None = None
        error = ""
        try:
            current = find(store, name, modified=modified.get(name, 0.0))
        except (FormatError, NoCheckpoint) as caught:
            error = str(caught)
        if after is not None:
            yield commit_of(after[0], current, after[1], after[2], modified)
        after = current, name, error
    if after is not None:
        yield commit_of(after[0], None, after[1], after[2], modified)


def commit_of(
    documents: CheckpointDocuments | None,
    before: CheckpointDocuments | None,
    name: str,
    error: str,
    modified: Mapping[str, float],
) -> Commit:
    """Return one line of history, from a checkpoint and the one committed before it."""
    if documents is None:
        return Commit(checkpoint=name, modified=modified.get(name, 0.0), error=error)
    own = _extents(documents)
    older = _extents(before) if before is not None else set()
    record = documents.record
    changed, recut = _changed(before, documents) if before is not None else (None, 0)
    return Commit(
        checkpoint=name,
        modified=modified.get(name, 0.0),
        step=record.save.step,
        made_in=record.save.made_in,
        committed_in=record.committed_in,
        ranks=record.world,
        parent=documents.ranks[0].parent,
        tensors=len(documents.specs),
        bytes=documents.nbytes,
        written=sum(extent.length for extent in own - older),
        kept=sum(extent.length for extent in own & older),
        changed=changed,
        recut=recut,
        added=len(documents.specs.keys() - before.specs.keys()) if before is not None else 0,
        removed=len(before.specs.keys() - documents.specs.keys()) if before is not None else 0,
    )


def _extents(documents: CheckpointDocuments) -> set[Extent]:
    return {extent for tile in documents.tiles for extent in extents(tile)}


def _changed(before: CheckpointDocuments, after: CheckpointDocuments) -> tuple[int, int]:
    """Return the bytes that differ by their digests, and those that digests cannot compare."""
    old = {key: {tile.box: tile.digest for tile in tiles} for key, tiles in by_key(before.tiles).items()}
    changed = recut = 0
    for tile in after.tiles:
        known = old.get(tile.spec.key) if before.specs.get(tile.spec.key) == tile.spec else None
        if known is None:
            changed += tile.nbytes
        elif tile.box not in known:
            recut += tile.nbytes
        elif known[tile.box] != tile.digest:
            changed += tile.nbytes
    return changed, recut
