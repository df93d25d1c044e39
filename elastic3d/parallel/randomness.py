"""Random numbers that do not depend on the layout: keyed by (seed, step, micro-batch, place in the model).

Before each block and after it, whether the block is here or on another stage, the default generators are seeded anew,
so that the numbers drawn by a block, or by the code after it, depend neither on earlier blocks nor on the rank. The
hooks are on the block itself, outside whatever recomputes within it. Where the user's forward recomputes whole blocks,
they are seeded again in the backward pass, under the micro-batch that the backward pass says it is working on.

Where sequences are cut into chunks, the number of the chunk is in the key.

If tensor-parallel ranks have different parts of one activation, their number on that axis is in the key as well; if
they have the same, it is not.

Some models draw from the global generators of Python and numpy, too, in their passes: masks of spectrograms, layers
that are left out. They are seeded at the same places, in the first passes of a process, and as long as these draw from
them; a script's own draws between the passes are left as they are. To seed them takes 10 µs, and nothing may draw from
them in a thread beside, such as the samples of the next step, so that it ends after the first passes of a model that
does not draw. One that begins to later on is not noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

from blake3 import blake3
from torch import nn

from elastic3d import global_random
from elastic3d.devices import ComputeDevice

Run = TypeVar("Run", bound=Callable[..., Any])


def keyed_seed(*parts: object) -> int:
    """Return a 63-bit seed for `parts`, the same in every process and on every machine."""
    return _seed_of(repr(parts))


def _seed_of(text: str) -> int:
    return int.from_bytes(blake3(text.encode()).digest(8), "little") >> 1


class Randomness:
    """Seeds torch's default generators by place. `at` sets the step and micro-batch of the next pass."""

    def __init__(self, seed: int, device: ComputeDevice) -> None:
        self.seed, self._device = seed, device
        self.part: int | None = None  # the tensor-parallel rank
        self.parts_between = False  # whether activations between layers are parts
        self._where = ""
        self.at(0, 0)
        self.drawn_from_globals: bool | None = None
        """Whether training's passes draw from the generators of Python and numpy; None before the first of them."""
        self._drawn_in_evaluation: bool | None = None
        self._within: _Within | None = None

    def at(self, step: int, micro_batch: int, *, chunk: int | None = None) -> None:
        """Set which micro-batch of which step the next forward or backward pass works on.

        chunk: which part of its sequences; None where they are not cut.
        """
        where = (self.seed, step, micro_batch) if chunk is None else (self.seed, step, micro_batch, chunk)
        self._where = repr(where)[:-1]

    def enter(self, place: str, *, parts: bool = False) -> None:
        """Seed the default generators for what comes at `place`. parts: it computes on parts of activations."""
        # As `keyed_seed` of all of these, of which most are the same at each place.
        seed = _seed_of(f"{self._where}, {place!r}, {self.part!r})" if parts else f"{self._where}, {place!r})")
        self._device.seed(seed)
        if self._within is not None:
            self._within.seed(seed)

    @property
    def keys_globals(self) -> bool:
        """Whether the model may draw from the generators of Python and numpy."""
        return self.drawn_from_globals is not False

    @contextmanager
    def passes(self, *, of_training: bool = True) -> Iterator[None]:
        """Surround passes of the model, in which the generators of Python and numpy are seeded as far as it draws."""
        known = self.drawn_from_globals
        if known is None and not of_training:
            known = self._drawn_in_evaluation
        if known is False:
            yield
            return
        self._within = within = _Within(watching=known is None)
        try:
            with global_random.lent():
                yield
                within.look()
        finally:
            self._within = None
        if known is None and within.seeded:
            if of_training:
                self.drawn_from_globals = within.drawn
            else:
                self._drawn_in_evaluation = within.drawn

    def install(self, model: nn.Module, blocks: Iterable[tuple[str, nn.Module]]) -> None:
        """Seed at the model's start, and around each block, whose names are global; stand-ins count as blocks."""
        self.before(model, "start")
        for name, block in blocks:
            self.before(block, f"{name} in", parts=self.parts_between)
            self.after(block, f"{name} out", parts=self.parts_between)

    def before(self, module: nn.Module, place: str, *, parts: bool = False) -> None:
        """Seed before each forward of a module."""

        def hook(module: nn.Module, args: Any) -> None:
            self.enter(place, parts=parts)

        module.register_forward_pre_hook(hook)

    def after(self, module: nn.Module, place: str, *, parts: bool = False) -> None:
        """Seed after each forward of a module."""

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.enter(place, parts=parts)

        module.register_forward_hook(hook)


def within_passes(run: Run) -> Run:
    """Make a method that runs passes do so `Randomness.passes`."""

    @wraps(run)
    def surrounded(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._randomness.passes():
            return run(self, *args, **kwargs)

    return surrounded  # type: ignore[return-value]


class _Within:
    """Seeds the generators of Python and numpy in the course of passes. drawn: whether the model moved them since."""

    def __init__(self, *, watching: bool) -> None:
        self.drawn = self.seeded = False
        self._watching = watching
        self._left: Any = None

    def seed(self, number: int) -> None:
        """Seed them."""
        self.look()
        global_random.seed(number)
        self.seeded = True
        if self._watching:
            self._left = global_random.quick_state()

    def look(self) -> None:
        """Notice whether they have moved since they were seeded."""
        if self._watching and self.seeded and self._left != global_random.quick_state():
            self.drawn, self._watching = True, False
