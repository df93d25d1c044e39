"""What of a sample goes to the model: columns that its forward does not take are left out, as transformers does."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from elastic3d.data.collating import TARGETS, Collate, Collating
from elastic3d.errors import UsageError


def base_of(model: nn.Module) -> Any:
    """Return the model of transformers that PEFT may have wrapped."""
    get: Any = getattr(model, "get_base_model", None)
    return get() if callable(get) else model


class KnownColumns:
    """Makes samples into a micro-batch without what `forward` of a model does not take; for `collate=`.

    collator: makes the rest into a micro-batch; None for tensors that are stacked.
    """

    def __init__(self, model: nn.Module, collator: Collate | None) -> None:
        base = base_of(model)
        self._model = type(base).__name__
        self._names = {*inspect.signature(base.forward).parameters, *TARGETS, "label_ids"}
        self._collator = collator or stacked

    def __call__(self, samples: list[Any]) -> Any:
        """Return a micro-batch of what is left."""
        return self._collator([self._known(one) for one in samples])

    def _known(self, sample: Any) -> Any:
        if not isinstance(sample, Mapping):
            return sample
        kept = {name: value for name, value in sample.items() if name in self._names}
        if not kept:
            raise UsageError(
                f"no column of the sample is taken by {self._model}.forward: it has {', '.join(map(str, sample))}. "
                "Tokenise it, or give TrainingArguments remove_unused_columns=False and a data_collator"
            )
        return kept


def stacked(samples: list[Any]) -> Any:
    """Return samples of one shape as a pair (input, target)."""
    return Collating().pair(samples, lambda place: f"sample {place} of the micro-batch")
