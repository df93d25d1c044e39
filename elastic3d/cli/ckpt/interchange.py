"""`ckpt import` and `export`: other tools' checkpoints, streamed."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from checkpointing.reading.announcing import reading
from elastic3d.cli.ckpt.completing import complete_checkpoints
from elastic3d.cli.ckpt.documents import ExportDocument, ImportDocument
from elastic3d.cli.ckpt.naming import choose
from elastic3d.cli.ckpt.place import StorePlace
from elastic3d.cli.ckpt.render.words import count, size
from elastic3d.cli.ckpt.telling import bar, tell
from elastic3d.errors import UsageError


class CheckpointFormat(StrEnum):
    """The format of another tool's checkpoint."""

    DCP = "dcp"
    TORCH = "torch"
    SAFETENSORS = "safetensors"


_SUFFIXES = {
    ".pt": CheckpointFormat.TORCH,
    ".pth": CheckpointFormat.TORCH,
    ".bin": CheckpointFormat.TORCH,
    ".ckpt": CheckpointFormat.TORCH,
    ".safetensors": CheckpointFormat.SAFETENSORS,
}

_Kind = Annotated[
    CheckpointFormat | None,
    typer.Option("--as", help="The format.", show_default="by the path's name or contents"),
]


def import_(
    place: StorePlace,
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A file, or a folder for DCP and sharded ones.")],
    kind: _Kind = None,
    step: Annotated[int, typer.Option("--step", min=0, help="The step it was made at.")] = 0,
    facts: Annotated[
        str, typer.Option("--facts", metavar="JSON", help="An object kept beside the tensors.", show_default=False)
    ] = "",
    *,
    as_json: bool,
) -> None:
    """Import another tool's checkpoint, and commit it to the store.

    Reads DCP's folders, `torch.save` files (without running anything in them) and safetensors, also Hugging Face's
    sharded layout. Tensors are streamed, so that the whole never has to fit in memory.

    Examples:

        elastic3d ckpt import s3://bucket/gpt-1b old/model.safetensors --step 1200

        elastic3d ckpt import /data/run-7 llama/ --as safetensors

        elastic3d ckpt import /data/run-7 dcp-folder/ --facts '{"origin": "run 6"}'
    """
    if not source.exists():
        raise UsageError(f"{source} is not there")
    kind = kind or guess(source)
    said = _object(facts) if facts else None
    store = place.open(write=True)
    with bar(f"importing {source.name}") as advance:
        from checkpointing.interchange import import_checkpoint  # imports torch, which takes seconds

        done = import_checkpoint(str(kind), source, store, step=step, facts=said, progress=advance)
    totals = done.totals
    what = f"{done.checkpoint}: {count(totals.tensors, 'tensor')}, {size(totals.bytes)} from {source}"
    data = ImportDocument(checkpoint=done.checkpoint, root=done.root, totals=totals, moved=done.moved)
    tell(store, data, lambda _: Text(what, overflow="fold"), as_json=as_json)


def export(
    place: StorePlace,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A file or folder that is not there yet.")],
    checkpoint: Annotated[
        str,
        typer.Option("--of", metavar="CHECKPOINT", help="Which one.", autocompletion=complete_checkpoints),
    ] = "latest",
    kind: _Kind = None,
    prefix: Annotated[
        str, typer.Option("--prefix", help="Only tensors under this prefix, such as model/; it is cut off their names.")
    ] = "",
    *,
    as_json: bool,
) -> None:
    """Write a checkpoint in another tool's format: DCP, safetensors or torch.save.

    Every tile is checked as it is read. Tensors are streamed, so that the whole never has to fit in memory.

    Examples:

        elastic3d ckpt export s3://bucket/gpt-1b model.safetensors --prefix model/

        elastic3d ckpt export s3://bucket/gpt-1b average.safetensors --prefix extra/ema/module.

        elastic3d ckpt export s3://bucket/gpt-1b dcp-folder --as dcp --of verified

        elastic3d ckpt export /data/run-7 model.pt --of 1200
    """
    if kind is None and target.suffix not in _SUFFIXES:
        raise UsageError(f"{target}: give --as dcp, torch or safetensors, or a name that ends in .pt or .safetensors")
    kind = kind or _SUFFIXES[target.suffix]
    if target.exists():
        raise UsageError(f"{target} is there already; nothing is overwritten")
    store = place.open()
    with reading(store, choose(store, checkpoint).name) as opened, bar(f"exporting {target.name}") as advance:
        from checkpointing.interchange import export_checkpoint  # imports torch, which takes seconds

        done = export_checkpoint(str(kind), opened, target, prefix=prefix, progress=advance)
    what = f"{target}: {count(done.tensors, 'tensor')}, {size(done.bytes)} of {opened.name}, as {kind}"
    if done.left_out:
        what += f"; {count(done.left_out, 'object')} that are not tensors left out"
    data = ExportDocument(
        checkpoint=opened.name,
        target=str(target),
        kind=str(kind),
        tensors=done.tensors,
        bytes=done.bytes,
        left_out=done.left_out,
    )
    tell(store, data, lambda _: Text(what, overflow="fold"), as_json=as_json)


def guess(source: Path) -> CheckpointFormat:
    """Return the format of the checkpoint at a path; UsageError if neither its name nor its contents show it."""
    if source.is_dir():
        if (source / ".metadata").exists():
            return CheckpointFormat.DCP
        if any(source.glob("*.safetensors")) or any(source.glob("*.safetensors.index.json")):
            return CheckpointFormat.SAFETENSORS
    elif source.name.endswith(".safetensors.index.json"):
        return CheckpointFormat.SAFETENSORS
    elif source.suffix in _SUFFIXES:
        return _SUFFIXES[source.suffix]
    raise UsageError(f"{source}: cannot tell which format that is; give --as dcp, torch or safetensors")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--facts is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError('--facts is not a JSON object, such as {"origin": "run 6"}')
    return value
