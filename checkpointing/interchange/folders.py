"""Finds out what a file or folder of another tool is, and reads where its tensors lie."""

from __future__ import annotations

import json
from pathlib import Path

from checkpointing.errors import ForeignFormat
from checkpointing.interchange import dcp_files, safetensors_files, torch_files
from checkpointing.interchange.foreign import Foreign, Stored

BIN = "pytorch_model.bin"
BIN_INDEX = f"{BIN}.index.json"
_TORCH = (".pt", ".pth", ".bin", ".ckpt")


def locate_all(source: Path) -> Foreign:
    """Return where the tensors of a checkpoint lie, whatever its kind; ForeignFormat if it is none that is known.

    source: a DCP folder; a folder of Hugging Face's, with safetensors or `pytorch_model.bin`, whole or in shards with
    their index; an index; or a file of safetensors or `torch.save`, which is read as `weights_only` does it. Only
    headers are read.
    """
    try:
        return _located(source)
    except OSError as error:
        raise ForeignFormat(f"{source}: cannot be read: {error}") from error


def _located(source: Path) -> Foreign:
    if not source.exists():
        raise ForeignFormat(f"{source}: there is no such file or folder")
    if source.is_file():
        if source.name.endswith(f".bin{BIN_INDEX.removeprefix(BIN)}"):
            return _sharded(source)
        if source.name.endswith((".safetensors", ".safetensors.index.json")):
            return safetensors_files.read(source)
        if source.suffix in _TORCH:
            return torch_files.read(source)
        raise ForeignFormat(f"{source}: is neither a .safetensors file nor one of torch.save ({', '.join(_TORCH)})")
    if (source / dcp_files.METADATA).exists():
        return dcp_files.read(source)
    for name in (safetensors_files.INDEX, "model.safetensors", BIN_INDEX, BIN):
        if (source / name).is_file():
            return _located(source / name)
    if any(source.glob("*.safetensors")):
        return safetensors_files.read(source)
    raise ForeignFormat(
        f"{source}: holds no weights that are known: no {dcp_files.METADATA} of DCP, no *.safetensors, no {BIN}"
    )


def _sharded(index: Path) -> Foreign:
    """Return the tensors of several files of `torch.save`."""
    try:
        where = json.loads(index.read_bytes())["weight_map"]
        files = sorted({str(name) for name in where.values()})
        expected = set(where)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ForeignFormat(f"{index}: is no index of shards: {error}") from error
    tensors: dict[str, Stored] = {}
    for name in files:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise ForeignFormat(f"{index}: {name!r} is not a file beside it")
        for stored in torch_files.read(index.parent / name).tensors:
            if stored.spec.key in tensors:
                raise ForeignFormat(f"{index.parent / name}: {stored.spec.key}: in another shard, too")
            tensors[stored.spec.key] = stored
    if missing := sorted(expected - tensors.keys()):
        raise ForeignFormat(f"{index}: says that its shards hold {', '.join(missing[:8])}, and they do not")
    return Foreign(tensors=tuple(tensors.values()))
