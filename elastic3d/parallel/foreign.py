"""Calling models that were written by others, without a line of change in them or in their configuration.

An input that is a dictionary becomes keyword arguments where forward has parameters of those names, as transformers'
models want it; anything else is the one positional argument. A forward that has a parameter `use_cache` is told not to
keep keys and values for generation: in training nobody reads them, and they would hold every block's memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn


class Caller:
    """How one model is called. It is made from the whole model, before anything in it is wrapped or replaced."""

    def __init__(self, model: nn.Module) -> None:
        parameters = inspect.signature(model.forward).parameters
        self._names = {p.name for p in parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        self._fixed = {"use_cache": False} if "use_cache" in self._names else {}

    def spreads(self, given: Any) -> bool:
        """Return whether an input is given as keyword arguments."""
        return isinstance(given, Mapping) and bool(given) and self._names.issuperset(given)

    def __call__(self, model: nn.Module, given: Any) -> Any:
        """Return the output of `model`, or of a part of it, for one micro-batch's input."""
        if self.spreads(given):
            return model(**{**self._fixed, **given})
        return model(given, **self._fixed)
