"""Imports checkpoints of other tools and exports ours, in a bounded amount of memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from checkpointing.errors import ForeignFormat, Inconsistent, NotExportable, Superseded
from checkpointing.format.grid import TILE_BYTES
from checkpointing.format.tiles import LONGEST_KEY, Piece, TensorSpec, is_key
from checkpointing.interchange import dcp_files, objects, safetensors_files, torch_files
from checkpointing.interchange.appearing import appearing
from checkpointing.interchange.contents import Contents
from checkpointing.interchange.foreign import Foreign, Progress, Slab, slabs
from checkpointing.interchange.tensors import DTYPES, object_piece, shortened, shown
from checkpointing.reading.reader import Checkpoint, read_latest
from checkpointing.saving.commit import Committed, commit
from checkpointing.saving.options import SaveOptions
from checkpointing.saving.save import save_rank
from checkpointing.stores.protocol import Store

PART_BYTES = 128 << 20
"""Approximate bytes of the parts in which an import is written, one after the other."""


class Kind(StrEnum):
    """Whose format it is."""

    DCP = "dcp"
    TORCH = "torch"
    SAFETENSORS = "safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The result of an export.

    target: the file or folder. tensors: their number. bytes: of all of them. left_out: objects that were not written.
    """

    target: Path
    tensors: int
    bytes: int
    left_out: int = 0


_READ: Mapping[Kind, Callable[[Path], Foreign]] = {
    Kind.DCP: dcp_files.read,
    Kind.TORCH: torch_files.read,
    Kind.SAFETENSORS: safetensors_files.read,
}
_WRITE: Mapping[Kind, Callable[[Contents, Mapping[str, TensorSpec], Path, Progress], None]] = {
    Kind.DCP: dcp_files.write,
    Kind.TORCH: torch_files.write,
    Kind.SAFETENSORS: safetensors_files.write,
}


def import_checkpoint(
    kind: str,
    source: str | os.PathLike[str],
    store: Store,
    *,
    step: int = 0,
    facts: Mapping[str, Any] | None = None,
    tile_bytes: int = TILE_BYTES,
    progress: Progress | None = None,
) -> Committed:
    """Bring another tool's checkpoint into a store, and make it the latest there.

    source: a DCP folder, a file of `torch.save`, a `.safetensors` file, a folder of shards or their index. Nothing in
    it is executed. facts: by default those that were exported with it, else what it was imported from. tile_bytes: as
    in `SaveOptions`. The generation is that of the store: no other writer is fenced out, and Superseded says that the
    store already has this step or a later one. Repeated after a failure, it writes only the parts that are missing.

    ForeignFormat names what cannot be kept; nothing is cast.
    """
    known, path = _kind(kind), Path(source)
    options = SaveOptions(tile_bytes=tile_bytes)
    if not path.exists():
        raise ForeignFormat(f"{path}: there is no such file or folder")
    ref = read_latest(store)
    generation = 1 if ref is None else max(1, ref.generation)
    if ref is not None and ref.step is not None and (ref.made_in or 0, ref.step) > (generation, step):
        raise Superseded(f"store {store.url}: latest is at step {ref.step}; import as a later step than {step}")
    try:
        foreign = _READ[known](path)
    except OSError as error:
        raise ForeignFormat(f"{path}: cannot be read: {error}") from error
    if not foreign.tensors and not foreign.objects:
        raise ForeignFormat(f"{path}: holds nothing")
    keys = dict.fromkeys([*foreign.objects, *(stored.spec.key for stored in foreign.tensors)])
    strange = [shown(objects.name_of(key)) for key in keys if not is_key(key)]
    if strange:
        raise ForeignFormat(
            f"{path}: {shortened(strange)}: a name has at most {LONGEST_KEY:,} printable characters here; load the "
            "checkpoint, give another name, and save it again"
        )
    parts = list(_parts(foreign, tile_bytes))
    recorded = facts if facts is not None else foreign.facts or {"imported": {"kind": known.value}}
    total = sum(unit.nbytes for part in parts for unit in part if isinstance(unit, Slab))
    count = _Count(progress or _silent, total)
    for rank, part in enumerate(parts):
        try:
            save_rank(
                store,
                step=step,
                made_in=generation,
                attempt=0,
                rank=rank,
                world=len(parts),
                pieces=_pieces(part, count),
                facts=dict(recorded),
                options=options,
            )
        except Inconsistent as error:
            raise Inconsistent(
                f"store {store.url}: something else was saved or imported as step {step}; give another step: {error}"
            ) from error
    return commit(store, step=step, made_in=generation, attempt=0, committed_in=generation, world=len(parts))


def export_checkpoint(
    kind: str,
    checkpoint: Checkpoint,
    target: str | os.PathLike[str],
    *,
    prefix: str = "",
    progress: Progress | None = None,
) -> Exported:
    """Write a checkpoint in another tool's format, verifying every tile.

    target: must not exist. A DCP folder; a file of `torch.save`; a file if it ends in `.safetensors`, else a Hugging
    Face folder with one `model.safetensors`, or shards of 5 GB and their index. It appears whole or not at all. prefix:
    write only the tensors below it, and leave it out of their names, as for a model without its optimizer; without one,
    objects are written too, except into a Hugging Face folder, which holds only tensors. Facts go into safetensors'
    metadata; DCP and torch have no place for them.

    NotExportable names the tensors that the format cannot hold, Unloadable the pickles that torch does not consider
    plain data (only an export to `torch` loads them).
    """
    known, path = _kind(kind), Path(target)
    contents = Contents(checkpoint)
    specs = {
        name.removeprefix(prefix): spec
        for name, spec in ((contents.name(spec.key), spec) for spec in contents.tensors)
        if name.startswith(prefix) and name != prefix
    }
    if not specs and not (contents.objects and not prefix):
        raise NotExportable(f"{checkpoint.name}: has no tensor whose name begins with {prefix!r}")
    strange = [f"{spec.key}: {spec.dtype}" for spec in specs.values() if spec.dtype not in DTYPES]
    if strange:
        raise NotExportable(f"this torch does not have the dtype of {shortened(strange)}; upgrade it")
    with appearing(path) as partial:
        _WRITE[known](contents, specs, partial, progress or _silent)
    tensors_alone = bool(prefix) or (known is Kind.SAFETENSORS and path.suffix != ".safetensors")
    return Exported(
        target=path,
        tensors=len(specs),
        bytes=sum(spec.box.numel * spec.itemsize for spec in specs.values()),
        left_out=len(contents.objects) if tensors_alone else 0,
    )


def _kind(kind: str) -> Kind:
    try:
        return Kind(kind)
    except ValueError:
        raise ValueError(f"{kind!r} is no kind of checkpoint; known are {', '.join(Kind)}") from None


def _silent(done: int, total: int) -> None:
    """Report nothing."""


class _Count:
    """Counts the bytes read so far, for the progress."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def add(self, nbytes: int) -> None:
        """Count some more."""
        self._done += nbytes
        self._progress(self._done, self._total)


def _parts(foreign: Foreign, tile_bytes: int) -> Iterator[list[Slab | Piece]]:
    """Yield what is written together: a pure function of the files, so that a repeat finds its parts."""
    part: list[Slab | Piece] = [object_piece(key, data) for key, data in foreign.objects.items()]
    held = 0
    for stored in foreign.tensors:
        if not stored.box.numel:
            part.append(Piece(spec=stored.spec, box=stored.box, data=memoryview(b"")))
        for slab in slabs(stored, tile_bytes):
            if held + slab.nbytes > PART_BYTES and part:
                yield part
                part, held = [], 0
            part.append(slab)
            held += slab.nbytes
    yield part


def _pieces(part: list[Slab | Piece], count: _Count) -> Iterator[Piece]:
    for unit in part:
        if isinstance(unit, Piece):
            yield unit
        else:
            yield Piece(spec=unit.stored.spec, box=unit.box, data=unit.read())
            count.add(unit.nbytes)
