"""What a model says of itself: the configuration of a model of transformers, which its class can be built from again.

Nothing of transformers is imported: a model is one if it has a configuration that writes itself as transformers' do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elastic3d.provenance.config import LARGEST, canonical

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """A model's own configuration."""

    architecture: str
    """Name of the model's class."""
    config: dict[str, Any]
    """What `config.json` of it has."""
    generation: dict[str, Any] | None = None
    """What `generation_config.json` has; None for a model that does not generate."""


def record_of(model: nn.Module) -> ModelRecord | None:
    """Return what a model says of itself; None for one that says nothing, or too much to be kept with each state."""
    config = _written(getattr(model, "config", None))
    if not config or "model_type" not in config:
        return None
    made = ModelRecord(
        architecture=_class_of(model),
        config=config,
        generation=_written(getattr(model, "generation_config", None)),
    )
    return made if len(canonical([made.config, made.generation])) <= LARGEST else None


def _written(config: object) -> dict[str, Any] | None:
    """Return a configuration as the file of it would have it, without where it was loaded from."""
    write = getattr(config, "to_json_string", None)
    if not callable(write):
        return None
    try:
        content = json.loads(write())
        canonical(content)
    except (TypeError, ValueError):
        return None  # somebody else's, which is kept nowhere then
    if not isinstance(content, dict):
        return None
    return {key: value for key, value in content.items() if not key.startswith("_")}


def _class_of(model: nn.Module) -> str:
    """Return the name of a model's class, before it was sharded: torch makes another one for that."""
    from torch.distributed.fsdp import FSDPModule  # whoever reads what was recorded need not have torch

    kinds = (kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    return next(kinds).__name__
