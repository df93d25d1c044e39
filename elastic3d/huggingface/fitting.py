"""The tensors of a checkpoint beside those of a class of transformers: what its files are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from checkpointing.errors import NotExportable
from checkpointing.format.tiles import TensorSpec
from checkpointing.interchange.safetensors_files import FileTensor
from checkpointing.interchange.tensors import shortened
from elastic3d.huggingface.architecture import ModelTensor


def fit(
    specs: Mapping[str, TensorSpec],
    tensors: Sequence[ModelTensor],
    *,
    architecture: str,
    same: Callable[[str, str], bool],
) -> dict[str, FileTensor]:
    """Return the tensors of the files, by name.

    specs: the checkpoint's, by the name that they have in the model. same: whether two of them, by key, are equal to
    the last bit. Of tied tensors one is written. NotExportable names all that are missing, that the model does not
    have, or that have another shape or other values than they should.
    """
    known = {name for one in tensors for name in one.names}
    wrong = _few("the model has no", sorted(specs.keys() - known))
    made: dict[str, FileTensor] = {}
    missing, shaped, untied = [], [], []
    for one in tensors:
        there = [name for name in one.names if name in specs]
        if not there:
            missing.append(one.names[0])
            continue
        spec = specs[there[0]]
        if not all(same(spec.key, specs[name].key) for name in there[1:]):
            untied.append(" and ".join(there))
        if spec.shape != one.shape:
            shaped.append(f"{there[0]}, which is {list(spec.shape)} and should be {list(one.shape)}")
            continue
        made |= {part.name: FileTensor(spec=spec, box=part.box, shape=part.shape) for part in one.parts}
    wrong += _few("the checkpoint lacks", missing)
    wrong += _few("of another shape is", shaped)
    wrong += _few("tied in the model, and of other values each, are", untied)
    if wrong:
        raise NotExportable(
            f"these tensors are not those of {architecture}: {'; '.join(wrong)}. If the model is a part of what was "
            "trained, name it by --prefix, such as model/language_model."
        )
    return made


def _few(what: str, names: list[str]) -> list[str]:
    return [f"{what} {shortened(names)}" + (f" ({len(names)} in all)" if len(names) > 1 else "")] if names else []
