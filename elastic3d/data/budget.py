"""Micro-batches cut by a budget of tokens: a step's samples, grouped by length so that little of them is filler.

The samples of a step, longest first and equals in their order, are taken one after the other. A group ends before its
padded size, the length of its longest sample times their number, would exceed the budget. No grouping of the same
samples has fewer groups. Groups are then cut in half, always the one of the largest padded size, until `multiple`
divides their number. All this follows from the lengths of the step's samples, and from nothing else.

Lengths are given as a column, or as a function of a sample's number: every rank has to know those of the whole step,
to know how many micro-batches there are and which are its own, and must not load samples of others for that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from elastic3d.data.dataset_facts import is_numbered, name_of
from elastic3d.data.making import naming
from elastic3d.data.permutation import Indices
from elastic3d.data.stratified import Stratified
from elastic3d.errors import ConfigurationError, UsageError
from elastic3d.values import HERE

CHUNK = 1 << 20

Lengths = NDArray[np.int64]
Places = NDArray[np.intp]
LengthsOf = Callable[[Indices], Lengths]
"""Returns the lengths of samples by their numbers, in tokens."""


class OverBudget(StrEnum):
    """How to treat a sample that is longer than the budget."""

    REFUSE = "refuse"
    ALONE = "alone"


class TokenBudget:
    """Micro-batches of as many samples as fit `tokens` when they are padded to the longest among them.

        batches = run.batches(texts, global_batch=512, micro_batch=elastic3d.TokenBudget(8192, lengths=sizes), ...)

    tokens: the budget, of the longest sample's length times the number of samples. lengths: one number of tokens for
    each sample, as a column of the data set, or a function of a sample's number; None, the default, for the data set's
    own `lengths`, or those of a mixture's sources. Of a stratified data set they go by the numbers of what was
    stratified, as labels do; of a mixture one source after the other. too_long: "refuse", the default, for a sample
    that is longer than the budget, or "alone" to make it a micro-batch by itself, which exceeds the budget. multiple:
    the number of micro-batches of every step is a multiple of this one, 1 by default; it divides the global batch.
    """

    def __init__(
        self,
        tokens: int,
        *,
        lengths: Sequence[int] | NDArray[Any] | Callable[[int], int] | None = None,
        too_long: str = "refuse",
        multiple: int = 1,
    ) -> None:
        for name, value in (("tokens", tokens), ("multiple", multiple)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"TokenBudget: {name} is a whole number, 1 or more; it is {value!r}")
        if too_long not in list(OverBudget):
            raise UsageError(f"TokenBudget: too_long must be one of {', '.join(OverBudget)}; it is {too_long!r}")
        self.tokens, self.multiple, self.too_long = tokens, multiple, OverBudget(too_long)
        self._lengths = lengths

    def __repr__(self) -> str:
        """Return the call that makes it, without its lengths."""
        return f"TokenBudget({self.tokens}, too_long={str(self.too_long)!r}, multiple={self.multiple})"

    def of(self, dataset: Any) -> Budget:
        """Return the budget for the samples of a data set; UsageError for a stream, and lengths that are not theirs."""
        if not is_numbered(dataset):
            raise UsageError(
                "micro_batch=TokenBudget(...) cuts a step before its samples are loaded, and a stream does not say how "
                "long they will be; give a map-style data set, or a number of samples as micro_batch="
            )
        given = getattr(dataset, "lengths", None) if self._lengths is None else self._lengths
        if self._lengths is not None and isinstance(dataset, Stratified):
            given = dataset.renumbered(given)
        name = functools.partial(name_of, dataset)
        if given is None:
            raise UsageError(
                f"TokenBudget: {type(dataset).__name__} has no `lengths`; give them, as lengths=column of one number "
                "for each sample, or as a function of a sample's number: TokenBudget(8192, lengths=...)"
            )
        alone = self.too_long is OverBudget.ALONE
        if callable(given):
            called = _Called(given, name)
            return Budget(tokens=self.tokens, multiple=self.multiple, alone=alone, lengths=called, name=name)
        column = _column(given, len(dataset))
        shortest, longest, digest = _looked_over(column)
        if longest > self.tokens and not alone:
            first = next(
                start + int(np.argmax(column[start : start + CHUNK] > self.tokens))
                for start in range(0, len(column), CHUNK)
                if int(column[start : start + CHUNK].max()) > self.tokens
            )
            raise _too_long(name(first), int(column[first]), self.tokens)
        return Budget(
            tokens=self.tokens,
            multiple=self.multiple,
            alone=alone,
            shortest=shortest,
            longest=longest,
            digest=digest,
            lengths=lambda samples: np.asarray(column[samples], dtype=np.int64),
            name=name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A budget and what is known of the lengths: part of a run's order. tokens, multiple: as in `TokenBudget`.

    alone: samples that are longer are micro-batches by themselves. shortest, longest: of all samples, 0 where a
    function has their lengths; digest: of all lengths, "" likewise. lengths, name: of samples by their numbers; they
    are no part of what is written, and None in what is read.
    """

    tokens: int
    multiple: int = 1
    alone: bool = False
    shortest: int = 0
    longest: int = 0
    digest: str = ""
    lengths: LengthsOf | None = field(default=None, compare=False, repr=False, metadata=HERE)
    name: Callable[[int], str] | None = field(default=None, compare=False, repr=False, metadata=HERE)

    def __str__(self) -> str:
        """Return it in words, for people."""
        more = f", lengths {self.digest[:12]}" if self.digest else ""
        multiple = f", multiple={self.multiple}" if self.multiple > 1 else ""
        return f"TokenBudget({self.tokens}{multiple}{more})"

    def check(self, global_batch: int, leaf: int = 1) -> None:
        """Raise ConfigurationError where a step of so many samples may have no number of micro-batches that will do."""
        if self.multiple % leaf:
            raise ConfigurationError(
                f"leaf={leaf} micro-batches are summed together, and TokenBudget(multiple={self.multiple}) makes "
                f"numbers of them that it does not divide; TokenBudget(multiple={leaf * -(-self.multiple // leaf)}) "
                "would do"
            )
        if global_batch % self.multiple:
            above = self.multiple * -(-global_batch // self.multiple)
            raise ConfigurationError(
                f"TokenBudget(multiple={self.multiple}) does not divide global_batch={global_batch}, of which "
                f"there may be as many micro-batches as samples; global_batch={above} would do"
            )

    def bounds(self, global_batch: int) -> tuple[int, int]:
        """Return the fewest and the most micro-batches that a step of so many samples may have."""
        longest = self.longest or self.tokens
        fewest = -(-global_batch // max(1, self.tokens // max(1, self.shortest)))
        most = -(-global_batch // max(1, self.tokens // longest))
        return self._up(fewest), self._up(most)

    def groups(self, samples: Indices) -> list[tuple[Places, int]]:
        """Return the micro-batches of a step, each with its tokens, fillers aside.

        Of each the places of its samples among `samples`, longest first.
        UsageError for a sample that is longer than the budget, unless it may be alone.
        """
        lengths = self.lengths_of(samples)
        long = np.flatnonzero(lengths > self.tokens)
        if long.size and not self.alone:
            number = int(samples[long[0]])
            called = f"sample {number}" if self.name is None else self.name(number)
            raise _too_long(called, int(lengths[long[0]]), self.tokens)
        return [(places, int(lengths[places].sum())) for places in cut(lengths, self.tokens, self.multiple)]

    def lengths_of(self, samples: Indices) -> Lengths:
        """Return the lengths of samples by their numbers."""
        assert self.lengths is not None, "the budget of a saved state does not know the lengths of samples"
        return self.lengths(samples)

    def _up(self, number: int) -> int:
        return self.multiple * -(-number // self.multiple)


def cut(lengths: Lengths, tokens: int, multiple: int = 1) -> list[Places]:
    """Return samples of these lengths in groups whose padded size is at most `tokens`, by their places.

    A single sample may be longer. multiple: of the number of groups; it divides that of samples.
    """
    order = np.argsort(-lengths, kind="stable")
    sizes = np.maximum(1, lengths[order]).tolist()
    groups, at = [], 0
    while at < len(sizes):
        stop = min(len(sizes), at + max(1, tokens // sizes[at]))
        groups.append((at, stop))
        at = stop

    def padded(number: int) -> tuple[bool, int]:
        first, stop = groups[number]
        return stop - first > 1, sizes[first] * (stop - first)

    for _ in range(-len(groups) % multiple):
        largest = max(range(len(groups)), key=padded)
        first, stop = groups[largest]
        middle = (first + stop + 1) // 2
        groups[largest : largest + 1] = [(first, middle), (middle, stop)]
    return [order[first:stop] for first, stop in groups]


class _Called:
    """The lengths of samples, by a function of their numbers."""

    def __init__(self, function: Callable[[int], int], name: Callable[[int], str]) -> None:
        self._function, self._name = function, name

    def __call__(self, samples: Indices) -> Lengths:
        return np.array([self._one(number) for number in samples.tolist()], dtype=np.int64)

    def _one(self, number: int) -> int:
        with naming(lambda: f"lengths= of {self._name(number)}"):
            made: Any = self._function(number)
        if not isinstance(made, int | np.integer) or isinstance(made, bool) or made < 0:
            raise UsageError(f"TokenBudget: lengths= gave {made!r} for {self._name(number)}, and not a whole number")
        return int(made)


def _column(given: Any, samples: int) -> NDArray[Any]:
    column = np.asarray(given)
    if column.ndim != 1 or len(column) != samples or column.dtype.kind not in "iu":
        raise UsageError(
            f"TokenBudget: lengths must be one whole number for each of {samples} samples, or a function of a sample's "
            f"number; they are an array of {column.dtype} of shape {list(column.shape)}"
        )
    return column


def _looked_over(column: NDArray[Any]) -> tuple[int, int, str]:
    """Return the shortest and the longest of all lengths, and their digest."""
    digest, least, most = blake3(), None, 0
    for start in range(0, len(column), CHUNK):
        part = column[start : start + CHUNK].astype(np.int64)
        here = int(part.min())
        if here < 0:
            raise UsageError(f"TokenBudget: sample {start + int(part.argmin())} was given a length of {here}")
        least, most = here if least is None else min(least, here), max(most, int(part.max()))
        digest.update(part.tobytes())
    return least or 0, most, digest.hexdigest(length=16)


def _too_long(sample: str, length: int, tokens: int) -> UsageError:
    return UsageError(
        f"TokenBudget: {sample} has {length} tokens, more than the budget of {tokens}; cut or "
        f'drop such samples, take tokens={length}, or have each be a micro-batch by itself: too_long="alone"'
    )
