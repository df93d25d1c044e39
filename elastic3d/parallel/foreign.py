"""Calls models that were written elsewhere, without any change to them or their configuration.

A dictionary becomes keyword arguments if forward has parameters of those names, as the models of transformers expect;
any other input is the one positional argument. If forward has a parameter `use_cache`, it is called with False: keys
and values for generation are never read in training, and would hold every block's memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from elastic3d.errors import UsageError


def uncompiled() -> AbstractContextManager[None]:
    """Have what torch compiles in a model run as it is written, for a pass that is only looked at."""
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


class Caller:
    """How one model is called. Made from the whole model, before any part of it is wrapped or replaced."""

    def __init__(self, model: nn.Module) -> None:
        parameters = inspect.signature(model.forward).parameters
        self._names = {p.name for p in parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        self._fixed = {"use_cache": False} if "use_cache" in self._names else {}

    def spreads(self, given: Any) -> bool:
        """Return whether an input is passed as keyword arguments."""
        return isinstance(given, Mapping) and bool(given) and self._names.issuperset(given)

    def __call__(self, model: nn.Module, given: Any, beside: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """Return the output of `model`, or of a part of it, for one micro-batch's input. beside: other arguments."""
        if self.spreads(given):
            return model(**{**self._fixed, **beside, **given})
        if isinstance(given, Mapping) and not self._names.isdisjoint(given):
            strange = ", ".join(repr(name) for name in given if name not in self._names)
            raise UsageError(
                f"the input is a dictionary, and forward of {type(model).__name__} has no parameter for its entries "
                f"{strange}; leave them out of the samples, or of what run.batches(..., collate=) makes of them"
            )
        return model(given, **self._fixed, **beside)
