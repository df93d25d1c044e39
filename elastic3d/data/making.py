"""Samples are made: whatever a data set raises or draws belongs to one of them, which is named.

A data set that draws from the global random numbers of torch, numpy or Python (an augmentation, say) gets them seeded
by the position of the sample in the run, so that it draws the same in every layout, and its draws do not affect others.
That cannot be done in a thread beside the model, which draws from the same generators: there a draw is detected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elastic3d import global_random
from elastic3d.data.permutation import key


class Drawn(BaseException):
    """A data set drew from global random numbers where it must not. Never leaves this package.

    No Exception: a data set that takes another sample where one cannot be read would take that for such a case.
    """


class Draws(Protocol):
    """How global random numbers are treated while samples are made."""

    def around(self) -> AbstractContextManager[None]:
        """Return the context in which one micro-batch is made."""
        ...

    def before(self, position: int) -> None:
        """Prepare for the sample at one position of the run."""
        ...


class Keyed:
    """Seed the generators by position; lent: restore them after each micro-batch."""

    def __init__(self, seed: int, *, lent: bool) -> None:
        self._seed, self._lent = seed, lent

    def around(self) -> AbstractContextManager[None]:
        """Return the context that restores the generators, if they are lent."""
        return _lent() if self._lent else nullcontext()

    def before(self, position: int) -> None:
        """Seed all three generators."""
        seed = int(key("sample", self._seed, position))
        torch.default_generator.manual_seed(seed)
        global_random.seed(seed)


class Undrawn:
    """Raise `Drawn` when a data set draws: for a thread beside the one that trains.

    beside: whether the model may draw at the same time. Before that, a draw is undone.
    """

    def __init__(self) -> None:
        self.beside = False
        self._others = _Others()

    @contextmanager
    def around(self) -> Iterator[None]:
        """Watch torch's operations in this thread, and compare the other generators before and after."""
        with nullcontext() if self.beside else _lent():
            before = self._states()
            with _refusing(), self._others.unmoved():
                yield
            if before != self._states():
                raise Drawn

    def before(self, position: int) -> None:
        """Do nothing."""

    def _states(self) -> bytes:
        return b"" if self.beside else _torchs()


class UndrawnBetween:
    """Raise `Drawn` when a data set draws in the thread that trains, while the model computes nothing.

    Then torch's generator can be compared, too. To watch each operation takes longer than most samples do, so that only
    those of what is made first are, for draws on another device than the host.
    """

    def __init__(self) -> None:
        self._others, self._watched = _Others(), False

    @contextmanager
    def around(self) -> Iterator[None]:
        """Compare the generators before and after some micro-batches are made."""
        before = _torchs()
        with nullcontext() if self._watched else _refusing(), self._others.unmoved():
            yield
        self._watched = True
        if before != _torchs():
            raise Drawn


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    drawn: Callable[[], None]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not (kwargs or {}).get("generator"):
            self.drawn()
        return func(*args, **(kwargs or {}))


@contextmanager
def _watching(drawn: Callable[[], None]) -> Iterator[None]:
    """Call `drawn` whenever this thread draws from torch's global generator."""
    watch = _Watch()  # type: ignore[no-untyped-call]
    watch.drawn = drawn
    with watch:
        yield


@contextmanager
def _refusing() -> Iterator[None]:
    """Raise `Drawn` where this thread draws from torch's global generator; in the end, too, if that was caught."""
    drawn = False

    def refuse() -> None:
        nonlocal drawn
        drawn = True
        raise Drawn

    try:
        with _watching(refuse):
            yield
    finally:
        if drawn:
            raise Drawn


class DrawsNoticed:
    """Whether a sample was made with `any` random numbers of the global generators.

    Of torch's it sees the draws of this thread, of numpy's and Python's those of all threads.
    """

    def __init__(self) -> None:
        self.any = False

    @contextmanager
    def around(self) -> Iterator[None]:
        """Watch while a sample is made."""
        before = global_random.state()
        with _watching(self._drawn):
            yield
        self.any |= before != global_random.state()

    def _drawn(self) -> None:
        self.any = True


def _torchs() -> bytes:
    """Return the state of torch's default generator."""
    return torch.get_rng_state().numpy().tobytes()


class _Others:
    """Compares the states of the generators of numpy and Python, around one micro-batch after the other."""

    def __init__(self) -> None:
        self._state: Callable[[], Any] = global_random.state

    @contextmanager
    def unmoved(self) -> Iterator[None]:
        """Raise `Drawn` if they are others afterwards."""
        before = self._state()
        yield
        if before != self._state():
            raise Drawn
        self._state = global_random.quick_state


@contextmanager
def _lent() -> Iterator[None]:
    state = torch.get_rng_state()
    try:
        with global_random.lent():
            yield
    finally:
        torch.set_rng_state(state)


@contextmanager
def naming(what: Callable[[], str]) -> Iterator[None]:
    """Add to an exception the sample for which it was raised."""
    try:
        yield
    except Exception as error:
        error.add_note(f"elastic3d: this was raised for {what()}")
        raise


def pinned(value: Any) -> Any:
    """Return a collated value in memory from which a CUDA device copies without waiting."""
    return mapped(value, lambda tensor: tensor.pin_memory())


def moved(value: Any, device: torch.device) -> Any:
    """Return a collated value on a device; from pinned memory the copy is not waited for."""
    return mapped(
        value, lambda tensor: tensor.to(device, non_blocking=tensor.is_pinned() if device.type == "cuda" else False)
    )


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a collated value with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: mapped(item, change) for name, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(item, change) for item in value)
    return value
