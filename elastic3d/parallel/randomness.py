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

Most models draw nothing in evaluations, where dropout is off, and seeds take 3 % of a small model's passes. The first
evaluation is seeded, and watched; if nothing was drawn from any generator, later ones go without. They notice at their
end whether a generator has moved: then all ranks evaluate again, and those that drew with seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch
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
        self.drawn_in_evaluation: bool | None = None
        """Whether evaluations draw from any of the generators that are seeded; None before the first of them."""
        self._seeds, self._seeds_globals = True, False
        self._watched: tuple[_Draws, ...] = ()

    def at(self, step: int, micro_batch: int, *, chunk: int | None = None) -> None:
        """Set which micro-batch of which step the next forward or backward pass works on.

        chunk: which part of its sequences; None where they are not cut.
        """
        where = (self.seed, step, micro_batch) if chunk is None else (self.seed, step, micro_batch, chunk)
        self._where = repr(where)[:-1]

    def enter(self, place: str, *, parts: bool = False) -> None:
        """Seed the default generators for what comes at `place`. parts: it computes on parts of activations."""
        if not self._seeds:
            return
        # As `keyed_seed` of all of these, of which most are the same at each place.
        seed = _seed_of(f"{self._where}, {place!r}, {self.part!r})" if parts else f"{self._where}, {place!r})")
        for draws in self._watched:
            draws.look()
        self._device.seed(seed)
        if self._seeds_globals:
            global_random.seed(seed)
        for draws in self._watched:
            draws.leave()

    @property
    def keys_globals(self) -> bool:
        """Whether the model may draw from the generators of Python and numpy."""
        return self.drawn_from_globals is not False

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Surround passes of training, in which the generators of Python and numpy are seeded as far as it draws."""
        known = self.drawn_from_globals
        if known is False:
            yield
            return
        draws = _Draws(global_random.quick_state)
        with self._seeding(globals_too=True, watched=() if known else (draws,)):
            yield
        if known is None and draws.begun:
            self.drawn_from_globals = draws.any

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Surround passes of an evaluation, in which generators are seeded as in training, and left as they were."""
        watched = [_Draws(self._device.random_state)]
        if self.keys_globals:
            watched.append(_Draws(global_random.quick_state))
        known = self.drawn_in_evaluation
        with (
            self._device.keyed(self.seed),
            self._seeding(globals_too=self.keys_globals, watched=() if known else tuple(watched)),
        ):
            yield
        if not known and any(draws.begun for draws in watched):
            self.drawn_in_evaluation = any(draws.any for draws in watched)

    @contextmanager
    def unseeded_evaluation(self) -> Iterator[None]:
        """Surround an evaluation in which nothing is seeded; `drawn_in_evaluation` says if that was wrong."""
        globals_before = global_random.taken()
        with self._device.keyed(self.seed):
            before = self._device.random_state(), global_random.quick_state()
            self._seeds = False
            try:
                yield
            finally:
                self._seeds = True
            self.drawn_in_evaluation = before != (self._device.random_state(), global_random.quick_state())
        if self.drawn_in_evaluation:
            global_random.put_back(globals_before)

    @contextmanager
    def _seeding(self, *, globals_too: bool, watched: tuple[_Draws, ...]) -> Iterator[None]:
        self._seeds_globals, self._watched = globals_too, watched
        try:
            with global_random.lent() if globals_too else nullcontext():
                yield
                for draws in watched:
                    draws.look()
        finally:
            self._seeds_globals, self._watched = False, ()

    def install(self, model: nn.Module, blocks: Iterable[tuple[str, nn.Module]]) -> None:
        """Seed at the model's start, and around each block, whose names are global; stand-ins count as blocks."""
        self.before(model, "start")
        for name, block in blocks:
            self.before(block, f"{name} in", parts=self.parts_between)
            self.after(block, f"{name} out", parts=self.parts_between)

    def before(self, module: nn.Module, place: str, *, parts: bool = False) -> None:
        """Seed before each forward of a module."""
        module.register_forward_pre_hook(self._hook(place, parts))

    def after(self, module: nn.Module, place: str, *, parts: bool = False) -> None:
        """Seed after each forward of a module."""
        module.register_forward_hook(self._hook(place, parts))

    def _hook(self, place: str, parts: bool) -> Callable[..., None]:
        """Return a hook that is compiled with nothing, since compiled code would be made anew for each seed.

        torch says why where it is in the midst of what is compiled with fullgraph=True.
        """

        def hook(*_: Any) -> None:
            self.enter(place, parts=parts)

        why = (
            f"elastic3d seeds random numbers at {place!r}, which is in the midst of what is compiled here as a whole. "
            "Leave out its fullgraph=True, or compile each block by itself: block.compile(fullgraph=True)"
        )
        disabled: Callable[..., None] = torch.compiler.disable(hook, reason=why)  # type: ignore[no-untyped-call]
        return disabled


def within_passes(run: Run) -> Run:
    """Make a method that runs passes do so `Randomness.passes`."""

    @wraps(run)
    def surrounded(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._randomness.passes():
            return run(self, *args, **kwargs)

    return surrounded  # type: ignore[return-value]


class _Draws:
    """Whether passes draw from a generator: its state is compared with the one that it had when it was seeded last."""

    def __init__(self, state: Callable[[], Any]) -> None:
        self.any = self.begun = False
        self._state = state
        self._left: Any = None

    def leave(self) -> None:
        """Note the state after it was seeded."""
        if not self.any:
            self._left, self.begun = self._state(), True

    def look(self) -> None:
        """Notice whether it has moved since."""
        self.any = self.any or (self.begun and self._left != self._state())
