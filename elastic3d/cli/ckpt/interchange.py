"""`ckpt import`: other tools' checkpoints, streamed."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from checkpointing.format.manifest import facts_digest
from elastic3d.cli.ckpt.documents import ImportDocument
from elastic3d.cli.ckpt.place import StorePlace
from elastic3d.cli.ckpt.render.words import count, size
from elastic3d.cli.ckpt.telling import bar, tell
from elastic3d.errors import UsageError


class CheckpointFormat(StrEnum):
    """The format of another tool's checkpoint."""

    DCP = "dcp"
    TORCH = "torch"
    SAFETENSORS = "safetensors"


SUFFIXES = {
    ".pt": CheckpointFormat.TORCH,
    ".pth": CheckpointFormat.TORCH,
    ".bin": CheckpointFormat.TORCH,
    ".ckpt": CheckpointFormat.TORCH,
    ".safetensors": CheckpointFormat.SAFETENSORS,
}

_LARGEST = (1 << 63) - 1
_Kind = Annotated[
    CheckpointFormat | None,
    typer.Option("--as", help="The format.", show_default="by the path's name or contents"),
]


def import_(
    place: StorePlace,
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A file, or a folder for DCP and sharded ones.")],
    kind: _Kind = None,
    step: Annotated[int, typer.Option("--step", min=0, max=_LARGEST, help="The step it was made at.")] = 0,
    facts: Annotated[
        str, typer.Option("--facts", metavar="JSON", help="An object kept beside the tensors.", show_default=False)
    ] = "",
    *,
    as_json: bool,
) -> None:
    """Import another tool's checkpoint, and commit it to the store.

    Reads DCP's folders, `torch.save` files (without running anything in them) and safetensors, also Hugging Face's
    sharded layout. Tensors are streamed, so that the whole never has to fit in memory. Import into a store of its own:
    in one to which a job writes, the job's checkpoints are refused until it is past the imported step.

    Examples:

        elastic3d ckpt import s3://bucket/gpt-1b old/model.safetensors --step 1200

        elastic3d ckpt import /data/run-7 llama/ --as safetensors

        elastic3d ckpt import /data/run-7 dcp-folder/ --facts '{"origin": "run 6"}'
    """
    if not source.exists():
        raise UsageError(f"{source} is not there; give the file or folder to import, as this machine sees it")
    kind = kind or guess(source)
    said = _object(facts) if facts else None
    store = place.open(write=True, make=True)
    with bar(f"importing {source.name}") as advance:
        from checkpointing.interchange import import_checkpoint  # imports torch, which takes seconds

        done = import_checkpoint(str(kind), source, store, step=step, facts=said, progress=advance)
    totals = done.totals
    what = f"{done.checkpoint}: {count(totals.tensors, 'tensor')}, {size(totals.bytes)} from {source}"
    data = ImportDocument(checkpoint=done.checkpoint, root=done.root, totals=totals, moved=done.moved)
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
    elif source.suffix in SUFFIXES:
        return SUFFIXES[source.suffix]
    raise UsageError(f"{source}: cannot tell which format that is; give --as dcp, torch or safetensors")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--facts is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError('--facts is not a JSON object, such as {"origin": "run 6"}')
    try:
        facts_digest(value)
    except ValueError as error:
        raise UsageError(f"--facts: {error}") from error
    return value
