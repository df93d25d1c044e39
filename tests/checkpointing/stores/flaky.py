"""A store whose requests and answers get lost as a script says."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from checkpointing import Store
from checkpointing.errors import StoreError


class Flaky:
    """Fails as told: `faults` says of each call of `methods` whether it is done (`ok`), lost (`before`) or its answer
    is (`after`). `between` runs after a call whose answer is lost, as other clients might.
    """

    def __init__(self, store: Store, faults: Iterable[str], methods: tuple[str, ...], between: Any = None) -> None:
        self.store = store
        self.calls: list[str] = []
        self._faults = iter(faults)
        self._methods = methods
        self._between = between
        self._lock = threading.Lock()

    def __getattr__(self, method: str) -> Any:
        inner = getattr(self.store, method)
        if method not in self._methods:
            return inner

        def call(*arguments: Any, **named: Any) -> Any:
            with self._lock:
                fault = next(self._faults, "ok")
                self.calls.append(method)
            if fault == "before":
                raise StoreError(f"{method}: the request was lost")
            answer = inner(*arguments, **named)
            if isinstance(answer, Iterator):
                answer = iter(list(answer))
            if fault == "after":
                if self._between is not None:
                    self._between()
                raise StoreError(f"{method}: the answer was lost")
            return answer

        return call


def every_other() -> Iterator[str]:
    """Lose a request, let one pass, lose an answer, let one pass, and so on."""
    return itertools.cycle(["before", "ok", "after", "ok"])
