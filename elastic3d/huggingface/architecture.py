"""The tensors of a class of transformers, and what its files call them.

Files of some models have other tensors than the model in memory: other names, or one for each expert where the model
has one for all. transformers itself turns the one into the other when it saves a model; here it does so with tensors
without values, and what each is a part of is seen from where it lies in the other's (absent) memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from checkpointing.format.tiles import Box
from elastic3d.errors import ConfigurationError, UsageError
from elastic3d.huggingface.describing import Description


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """A tensor of a file: which part of one of the model's it is, and the shape that it has in the file."""

    name: str
    box: Box
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensor:
    """A parameter or persistent buffer of a model. names: all that it goes by, if it is tied; the usual one first."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    parts: tuple[FilePart, ...]


def tensors_of(description: Description) -> tuple[ModelTensor, ...]:
    """Return the tensors of the model that a description is of, each once.

    ConfigurationError without transformers; UsageError for a model that it does not know, or whose files hold something
    that is no part of the model's own tensors.
    """
    model = _outline(description)
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    names: dict[int, list[str]] = {}
    values: dict[int, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        names.setdefault(id(value), []).append(name)
        values[id(value)] = value
    made = []
    for key, group in names.items():
        group.sort(key=lambda name: name in tied)
        made.append(
            ModelTensor(names=tuple(group), shape=tuple(values[key].shape), parts=_parts(model, group[0], values[key]))
        )
    return tuple(made)


def _outline(description: Description) -> Any:
    """Return the model without memory."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigurationError(
            "--to hf asks transformers what the model's files hold, and it is not installed here: "
            "`pip install 'elastic3d[hf]'`, or write the tensors alone with --to safetensors"
        ) from error
    kind, config = description.config["model_type"], description.config
    where = f"{description.origin}: {description.architecture} of model_type {kind!r}"
    built: Any = getattr(transformers, description.architecture, None)
    if kind not in transformers.CONFIG_MAPPING or not isinstance(built, type):
        raise UsageError(
            f"{where} is not in transformers {transformers.__version__}, and code of others is not run; write the "
            "tensors alone with --to safetensors"
        )
    try:
        with torch.device("meta"):
            return built(transformers.CONFIG_MAPPING[kind].from_dict(dict(config)))
    except Exception as error:  # whatever transformers has to say of a configuration
        raise UsageError(f"{where}: transformers cannot build it: {error}") from error


class _Views(TorchFunctionMode):
    """Has operations return views of what they were given, where they would copy it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.contiguous, torch.Tensor.clone):
            return args[0]
        return func(*args, **(kwargs or {}))


def _parts(model: Any, name: str, value: torch.Tensor) -> tuple[FilePart, ...]:
    """Return what files have of one tensor of a model."""
    from transformers.core_model_loading import revert_weight_conversion

    whole = torch.empty(value.shape, dtype=value.dtype, device="meta")
    refused = f"{type(model).__name__}: what its files have of {name} is no part of it"
    try:
        with _Views():
            saved = revert_weight_conversion(model, {name: whole})
    except Exception as error:  # such as for a file's tensor that several of the model make up
        raise UsageError(f"{refused}: {error}; write the tensors alone with --to safetensors") from error
    parts = []
    for key, part in sorted(saved.items()):
        box = box_of(tuple(whole.shape), part) if _shares(part, whole) else None
        if box is None:
            raise UsageError(f"{refused} that lies in it as a box; write the tensors alone with --to safetensors")
        parts.append(FilePart(name=key, box=box, shape=tuple(part.shape)))
    if sum(part.box.numel for part in parts) != whole.numel():
        raise UsageError(f"{refused} as often as it should be; write the tensors alone with --to safetensors")
    return tuple(parts)


def _shares(part: torch.Tensor, whole: torch.Tensor) -> bool:
    return bool(part.untyped_storage()._cdata == whole.untyped_storage()._cdata)


def box_of(shape: tuple[int, ...], view: torch.Tensor) -> Box | None:
    """Return which box of a contiguous tensor of this shape a view of it is, None if it is none.

    The view has the tensor's dims in their order; those in which it has one row may be missing.
    """
    strides = torch.empty(shape, device="meta").stride()
    rest, dim = view.storage_offset(), 0
    start, stop = [], []
    for size, stride in zip(shape, strides, strict=True):
        first = rest // stride % size if size else 0
        rest -= first * stride
        taken = dim < view.dim() and view.stride(dim) == stride and first + view.shape[dim] <= size
        length = view.shape[dim] if taken else 1
        dim += taken
        start.append(first)
        stop.append(first + length)
    box = Box(start=tuple(start), stop=tuple(stop))
    return box if dim == view.dim() and not rest and box.numel == view.numel() else None
