"""The weights that a run begins with, in place of those that its seed gives: `run.shard(..., weights=...)`.

They are opened only when they are needed, which is where a run begins at step 0: a state that it goes on from has all.
What they do not have (and may lack) gets the values that the seed gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

import torch
from torch import nn

from checkpointing.errors import CheckpointError
from checkpointing.stores.address import redacted
from elastic3d.devices import ComputeDevice
from elastic3d.errors import ModelError, StateError, UsageError
from elastic3d.log import process_log
from elastic3d.parallel.state import TensorInMemory, held_by_model, local, sharded_like
from elastic3d.pretrained import names
from elastic3d.pretrained.adapters import computed_from_weights
from elastic3d.pretrained.matching import Matched, ModelTensors, as_loaded, match, tensors_of
from elastic3d.pretrained.names import OF_A_RUN
from elastic3d.pretrained.source import WeightsSource, open_source


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptWeights:
    """What a state says of the weights that its run began with."""

    named: str
    """As the script named them, without secrets."""
    fingerprint: str
    """The same for the same weights, wherever they lie."""


class Weights:
    """Weights of another tool or run, and which of a model's tensors they are.

    named: path or `URL@checkpoint`. accept: patterns of names that may be missing there, or unexpected. key: file with
    the key of a store, "" for none.
    """

    def __init__(self, named: str | PathLike[str], accept: str | Iterable[str] = (), *, key: str = "") -> None:
        self._named = fspath(named) if isinstance(named, PathLike) else named
        self._key = key
        given: Any = accept
        one = isinstance(given, str) or not isinstance(given, Iterable)
        self._accept: tuple[str, ...] = (given,) if one else tuple(given)
        if not isinstance(self._named, str) or not self._named:
            raise UsageError(f"run.shard: weights={named!r}: give a path, or URL@checkpoint for a store of elastic3d")
        if not all(isinstance(pattern, str) for pattern in self._accept):
            raise UsageError(f"run.shard: weights_accept={accept!r}: give patterns of names, such as ('lm_head.*',)")
        self._model: ModelTensors | None = None
        self._computed = ""
        self._source: WeightsSource | None = None
        self._matched: Matched | None = None
        self.bytes = 0
        """How many of this rank's were read."""

    @property
    def named(self) -> str:
        """As the user has named them, without secrets."""
        return redacted(self._named)

    def look_at(self, outline: nn.Module) -> None:
        """Take note of the whole model, of which only names, shapes and dtypes are looked at."""
        self._model, self._computed = tensors_of(outline), computed_from_weights(outline)

    def foresee(self, outline: nn.Module) -> None:
        """Refuse what does not fit a model before any rank joins, as far as this process can read the weights.

        A run that goes on from a state need not have them any more.
        """
        self.look_at(outline)
        try:
            self.source()
        except StateError:
            return
        self.match()

    def match(self) -> Matched:
        """Return which tensors they are; StateError where they cannot be read, StateUnfit where they do not fit."""
        if self._matched is None:
            assert self._model is not None
            arrangement = as_loaded(self._model, self.source().specs)
            arranged = None if arrangement is None else self.source().arranged(arrangement)
            if arranged is not None:
                self._source = arranged
            matched = match(self._model, self.source().specs, self._accept, self.named)
            if self._computed and any(map(names.is_added, matched.fresh)):
                raise ModelError(
                    f"weights={self.named!r} have no adapters, and {self._computed}: their initial values are computed "
                    "from weights that are not there yet when the model is built. Trying again does not help: use "
                    'init_lora_weights=True or "gaussian" without use_dora, or weights that have the adapters'
                )
            self._matched = matched
        return self._matched

    def source(self) -> WeightsSource:
        """Return what they are read from, opened once; StateError."""
        if self._source is None:
            self._source = open_source(self._named, self._key)
        return self._source

    def kept(self) -> KeptWeights:
        """Return what a state says of them."""
        return KeptWeights(named=self.named, fingerprint=self.source().fingerprint)

    def in_words(self) -> str:
        """Return what a run begins with, for people."""
        matched = self.match()
        said = f"the run begins with the weights of {self.named} ({self.source().fingerprint[:28]})"
        if matched.fresh:
            said += f"; {len(matched.fresh)} tensors that are not there by the seed, such as {matched.fresh[0]}"
        if matched.left:
            said += f"; {len(matched.left)} there left out, such as {matched.left[0]}"
        return said

    def fill(self, model: nn.Module, device: ComputeDevice, arrived: Callable[[], object]) -> frozenset[str]:
        """Read this rank's part of what is there into its part of a model; return the names of what was read.

        arrived: called after each part. StateError for what cannot be read.
        """
        matched, source = self.match(), self.source()
        assert self._model is not None
        first = {name: one for one, all_names in self._model.names.items() for name in all_names}
        here = {one.spec.key.removeprefix(OF_A_RUN): one.tensor for one in held_by_model(model)}
        there = {name: matched.there[first[name]] for name in here if first[name] in matched.there}
        wanted = [TensorInMemory(spec=source.specs[there[name]], tensor=here[name]) for name in there]
        try:
            self.bytes = source.fill(wanted, device, arrived)
            for name in there:
                for other in matched.again.get(first[name], ()):
                    self._compare(here[name], there[name], other, device)
        except (CheckpointError, OSError) as error:
            raise StateError(f"weights={self.named!r} cannot be read: {error}") from error
        process_log().emit(
            "weights.read", weights=self.named, tensors=len(there), bytes=self.bytes, fresh=len(matched.fresh)
        )
        return frozenset(there)

    def _compare(self, tensor: torch.Tensor, one: str, other: str, device: ComputeDevice) -> None:
        """Refuse weights in which what is one tensor in the model has two values."""
        source = self.source()
        if source.same(one, other):
            return
        second = sharded_like(tensor, torch.empty_like(local(tensor)))
        source.fill([TensorInMemory(spec=source.specs[other], tensor=second)], device, lambda: None)
        if not torch.equal(local(second), local(tensor)):
            raise StateError(
                f"weights={self.named!r}: {one} and {other} are one tensor in this model, and differ there: one of "
                "them would be lost. Trying again does not help: build the model without tying them "
                "(tie_word_embeddings=False in transformers)"
            )
