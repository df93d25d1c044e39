"""Samples are made: whatever a data set raises or draws belongs to one of them, which is named.

A data set that draws from the global random numbers of torch, numpy or Python (an augmentation, say) gets them seeded
by the position of the sample in the run, so that it draws the same in every layout, and its draws do not affect others.
That cannot be done in a thread beside the model, which draws from the same generators: there a draw is detected.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elastic3d.data.permutation import key


class Drawn(Exception):
    """A data set drew from global random numbers where it must not. Never leaves this package."""


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
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)


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
            with _watching(_refuse), self._others.unmoved():
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
    the first micro-batch's are, for draws on another device than the host.
    """

    def __init__(self) -> None:
        self._others, self._watched = _Others(), False

    @contextmanager
    def around(self) -> Iterator[None]:
        """Compare the generators before and after a micro-batch is made."""
        before = _torchs()
        with nullcontext() if self._watched else _watching(_refuse), self._others.unmoved():
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


def _refuse() -> None:
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
        before = _not_torchs()
        with _watching(self._drawn):
            yield
        self.any |= before != _not_torchs()

    def _drawn(self) -> None:
        self.any = True


def _not_torchs() -> Any:
    """Return the states of the generators of numpy and Python."""
    state: Any = np.random.get_state(legacy=False)
    words = {
        name: value.tobytes() if isinstance(value, np.ndarray) else value for name, value in state["state"].items()
    }
    return random.getstate(), state["bit_generator"], words, state["has_gauss"]


def _torchs() -> bytes:
    """Return the state of torch's default generator."""
    return torch.get_rng_state().numpy().tobytes()


class _Others:
    """Compares the states of the generators of numpy and Python, around one micro-batch after the other."""

    def __init__(self) -> None:
        self._state: Callable[[], Any] = _not_torchs

    @contextmanager
    def unmoved(self) -> Iterator[None]:
        """Raise `Drawn` if they are others afterwards."""
        before = self._state()
        yield
        if before != self._state():
            raise Drawn
        self._state = _not_torchs_soon


_MT19937_BYTES = 625 * 4  # the words of its state, and which is next


def _not_torchs_soon() -> Any:
    """Return the states of both generators, but for a normal number that numpy keeps for its next call.

    numpy takes 50 µs to copy its generator's state; here it is read where numpy's ctypes interface says that it is.
    """
    generator: Any = np.random.mtrand.get_bit_generator()
    if type(generator) is not np.random.MT19937:
        return _not_torchs()
    return random.getstate(), ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


@contextmanager
def _lent() -> Iterator[None]:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


@contextmanager
def naming(what: Callable[[], str]) -> Iterator[None]:
    """Add to an exception the sample for which it was raised."""
    try:
        yield
    except Drawn:
        raise
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
