"""The seeds of random numbers: of the place in the run and in the model, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from elastic3d.devices.cpu import CpuDevice
from elastic3d.errors import ModelError
from elastic3d.parallel import initial
from elastic3d.parallel.costs import measure_costs
from elastic3d.parallel.pipeline import chain
from elastic3d.parallel.randomness import Randomness, keyed_seed
from elastic3d.parallel.tensor import proof
from elastic3d.parallel.tensor.taking import take
from elastic3d.training import Run, run_alone


class Told(CpuDevice):
    """Notes seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds: list[int] = []

    def seed(self, seed: int) -> None:
        self.seeds.append(seed)


@pytest.mark.parametrize("part", [None, 3])
@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("chunk", [None, 0, 2])
@pytest.mark.parametrize("place", ["start", "blocks.11 in", "it's", 'a "b"', "ü"])
def test_a_seed_is_keyed_by_all_that_names_its_place(
    place: str, chunk: int | None, parts: bool, part: int | None
) -> None:
    device: Any = Told()
    randomness = Randomness(17, device)
    randomness.part = part
    randomness.at(1000, 7, chunk=chunk)
    randomness.enter(place, parts=parts)
    where = (1000, 7) if chunk is None else (1000, 7, chunk)
    assert device.seeds == [keyed_seed(17, *where, *((place, part) if parts else (place,)))]


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Have no test run what another one has compiled of the same classes."""
    torch.compiler.reset()


class Dropping(nn.Module):
    """A block that draws."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dropout = nn.Linear(3, 3), nn.Dropout(0.5)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        dropped: torch.Tensor = self.dropout(self.inner(given))
        return dropped


class Decorated(Dropping):
    """One whose forward is compiled."""

    @torch.compile(backend="eager", fullgraph=True)  # type: ignore[untyped-decorator]
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return super().forward(given)


def in_place() -> nn.Module:
    """Return a block that is compiled as it is."""
    block = Dropping()
    block.compile(backend="eager", fullgraph=True)
    return block


class Stack(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, block: Callable[[], nn.Module] = Dropping) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            given = block(given)
        return given


def trained(build: Callable[[], nn.Module], **options: Any) -> str:
    """Return the digest of a model that was trained for some steps."""
    digests: list[str] = []

    def main(run: Run) -> None:
        model = run.shard(build, seed=3, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = run.batches([(torch.ones(3), torch.ones(3))] * 4, global_batch=4, micro_batch=2)
        run.restore(model=model, optimizer=optimizer, batches=batches)
        for batch in batches.until(step=3):
            run.step(optimizer, loss=run.backward(model, batch, nn.functional.mse_loss))
        digests.append(run.digest())

    run_alone(main)
    return digests[0]


def test_a_compiled_model_is_not_compiled_anew_for_each_seed() -> None:
    """Seeds are numbers that compiled code would be made for, one after the other, until torch gives up."""

    def build(*, compiled: bool) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
        if compiled:
            model.compile(backend="eager")
        return model

    with torch._dynamo.config.patch(error_on_recompile=True):
        digest = trained(partial(build, compiled=True))
    assert digest == trained(partial(build, compiled=False))


@pytest.mark.parametrize(("block", "recompute"), [(in_place, "none"), (Decorated, "none"), (Decorated, "full")])
def test_blocks_may_be_compiled_without_any_break(block: Callable[[], nn.Module], recompute: str) -> None:
    """What is around a block is no part of what is compiled, and its random numbers are those of its place."""
    digest = trained(partial(Stack, block), blocks="blocks", recompute=recompute)
    assert digest == trained(Stack, blocks="blocks")


def test_blocks_that_are_compiled_in_place_are_not_computed_again() -> None:
    """torch would compile that too: with other random numbers, or other code in a process's first step."""
    with pytest.raises(ModelError, match=r"block 'blocks.0' is compiled in place.*, decorate its forward with @torch"):
        trained(partial(Stack, in_place), blocks="blocks", recompute="full")


def test_a_model_that_is_compiled_around_its_blocks_without_any_break_is_refused() -> None:
    """torch's own error says which block, and what to do."""

    class Whole(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.compile(backend="eager", fullgraph=True)

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                given = block(given)
            return given

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"random numbers at 'blocks.0 in'.* Leave out its fullgr"):
        trained(Whole, blocks="blocks")


def test_what_is_compiled_without_any_break_is_looked_at_as_it_is_written() -> None:
    """Costs are measured, and stages and parts proved, where nothing can be compiled."""
    given = torch.ones(2, 3, device="meta")
    plan = {"blocks.*.inner": "column-gathered"}
    for block in (in_place, Decorated):
        model, written = initial.outline(partial(Stack, block)), initial.outline(Stack)
        assert measure_costs(model, "blocks", given) == measure_costs(written, "blocks", given)
        assert chain.prove(model, "blocks", given).activation.shape == given.shape
        scheme = take(model, plan, 3)
        assert scheme is not None
        assert proof.prove(model, "blocks", given, scheme) == ("blocks.0",)
