"""Streams for the tests, which worlds and workers can import."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.parallel.models import LENGTH, VOCABULARY

Sample = tuple[torch.Tensor, torch.Tensor]


def sentence(number: int) -> Sample:
    """Return the sentence of a number."""
    tokens = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(number))
    return tokens[:-1], tokens[1:]


class Numbers:
    """0, 1, 2 ... as (number, number * 10), for `length` samples an epoch."""

    def __init__(self, length: int = 10**9) -> None:
        self.length = length
        self.made = 0

    def __iter__(self) -> Iterator[Sample]:
        for number in range(self.length):
            self.made += 1
            yield torch.tensor(number), torch.tensor(number * 10)


class Skipping(Numbers):
    """The same, whose iterator passes over samples without making them."""

    def __iter__(self) -> Any:
        return _Skipper(self)


class _Skipper:
    def __init__(self, stream: Skipping) -> None:
        self._stream, self._at = stream, 0

    def __iter__(self) -> _Skipper:
        return self

    def __next__(self) -> Sample:
        if self._at >= self._stream.length:
            raise StopIteration
        self._stream.made += 1
        self._at += 1
        return torch.tensor(self._at - 1), torch.tensor((self._at - 1) * 10)

    def skip(self, count: int) -> int:
        count = min(count, self._stream.length - self._at)
        self._at += count
        return count


class Stateful:
    """Sentences whose order depends on earlier ones, so that only its own state can restore it."""

    def __init__(self, length: int = 9) -> None:
        self._length, self._at, self._mixed = length, 0, 1
        self._loaded = False
        self.made = 0

    def __iter__(self) -> Iterator[Sample]:
        if not self._loaded:
            self._at = 0
        self._loaded = False
        while self._at < self._length:
            self._at += 1
            self._mixed = (self._mixed * 31 + self._at) % 1009
            self.made += 1
            yield sentence(self._mixed)

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at, "mixed": self._mixed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at, self._mixed, self._loaded = state["at"], state["mixed"], True
