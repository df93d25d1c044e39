"""Writes a checkpoint as a folder that `from_pretrained` loads: configuration, weights, what comes with them."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpointing.errors import NotExportable
from checkpointing.format.tiles import TensorSpec
from checkpointing.interchange import Exported
from checkpointing.interchange.appearing import appearing
from checkpointing.interchange.contents import Contents
from checkpointing.interchange.foreign import Progress
from checkpointing.interchange.safetensors_files import FileTensor, check, write_shards
from checkpointing.reading.reader import Checkpoint
from elastic3d.huggingface.architecture import tensors_of
from elastic3d.huggingface.describing import CONFIG, GENERATION, Description
from elastic3d.huggingface.fitting import fit

PREFIX = "model/"
"""Where runs keep the model."""


def export_model(
    checkpoint: Checkpoint,
    target: Path,
    description: Description,
    *,
    prefix: str = PREFIX,
    shard_bytes: int | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write the tensors below a prefix as a model of transformers; the folder appears whole or not at all.

    Tensors are streamed, and each tile is checked. `config.json` has the dtype that most of the weights are stored in:
    nothing is cast, here or when the folder is loaded. shard_bytes: most of a file, 5 GB by default.

    NotExportable where the tensors are not those of the model that is described; UsageError and ConfigurationError for
    one that transformers does not know.
    """
    contents = Contents(checkpoint)
    specs = {
        name.removeprefix(prefix): spec
        for name, spec in ((contents.name(spec.key), spec) for spec in contents.tensors)
        if name.startswith(prefix) and name != prefix
    }
    if not specs:
        raise NotExportable(f"{checkpoint.name}: has no tensor whose name begins with {prefix!r}")
    tensors = fit(specs, tensors_of(description), architecture=description.architecture, same=contents.same)
    check({name: _named(name, one) for name, one in tensors.items()})
    described = description.with_dtype(_dtype(tensors))
    with appearing(target) as folder:
        folder.mkdir()
        _write(folder / CONFIG, described.config)
        if described.generation is not None:
            _write(folder / GENERATION, described.generation)
        for file in described.copied:
            if file.is_dir():
                shutil.copytree(file, folder / file.name, copy_function=shutil.copyfile)
            else:
                shutil.copyfile(file, folder / file.name)
        write_shards(contents, tensors, folder, progress or _silent, shard_bytes=shard_bytes)
    return Exported(target=target, tensors=len(tensors), bytes=sum(one.nbytes for one in tensors.values()), left_out=0)


def _named(name: str, one: FileTensor) -> TensorSpec:
    return TensorSpec(key=name, dtype=one.spec.dtype, shape=one.shape)


def _dtype(tensors: Mapping[str, FileTensor]) -> str:
    """Return the dtype of most of the weights."""
    sizes: Counter[str] = Counter()
    for one in tensors.values():
        if "float" in one.spec.dtype:
            sizes[one.spec.dtype] += one.nbytes
    return sizes.most_common(1)[0][0] if sizes else "float32"


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def _silent(done: int, total: int) -> None:
    """Report nothing."""
