from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elastic3d.devices.cpu import CpuDevice
from elastic3d.errors import LayoutError, ModelError, UsageError
from elastic3d.parallel import initial
from elastic3d.parallel.pipeline import chain, stages
from elastic3d.parallel.randomness import Randomness
from elastic3d.parallel.refusals import OutsidePromise, look_at_model, look_at_optimizer
from elastic3d.planner import RankPlace, place_of
from elastic3d.planner.shares import stage_of_block
from elastic3d.values import Layout, Schedule
from tests.parallel.models import Model, NamedPlain, Plain

WIDTH = 4
TOKENS = torch.zeros(2, 3, dtype=torch.long)


class Chain(nn.Module):
    """The smallest chain; the refused models below differ from it in one thing each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


class AddsBetween(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) * 2.0
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class AddsAfter(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float().tanh()


class Reversed(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Skips(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[1](self.blocks[0](self.embed(x))))  # type: ignore[no-any-return]


class UsedTwice(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.embed(self.head(x).argmax(-1)))  # type: ignore[no-any-return]


class Tied(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class OwnParameter(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(WIDTH))


class ReturnsTwo(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(x), x


class Pairs(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReturnsTwo(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x, _ = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Masked(nn.Linear):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * mask.unsqueeze(-1)


class PassesMask(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Masked(WIDTH, WIDTH) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = tokens != 0
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)  # type: ignore[no-any-return]


class HeadFirst(Chain):
    def __init__(self) -> None:
        super().__init__()
        blocks = self.blocks
        del self.blocks
        self.blocks = blocks


REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    (AddsBetween, r"between the model's input|between module 'embed' and module 'blocks.0'"),
    (AddsAfter, r"not the output of its last module, module 'head'"),
    (Reversed, r"blocks run out of order: 'blocks.2'"),
    (Skips, r"'blocks.2' does not run"),
    (UsedTwice, r"'embed' runs 2 times"),
    (Tied, r"'embed.weight' and 'head.weight' are one tensor"),
    (OwnParameter, r"parameter 'places' is used by forward outside of any module"),
    (Pairs, r"'blocks.0' returns a tuple of 2 tensors"),
    (PassesMask, r"'blocks.0' gets a further argument that was computed from the input's values"),
    (HeadFirst, r"module 'head' is registered before the blocks .* but runs after 'blocks.2'"),
]


@pytest.mark.parametrize(("build", "message"), REFUSED, ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_model_that_is_no_chain_is_refused_by_name(build: Callable[[], nn.Module], message: str, device: str) -> None:
    """Each way of not being a chain is reported with the part's name and what would work."""
    with torch.device(device):
        model = build()
    with pytest.raises(ModelError, match=message) as caught:
        chain.prove(model, "blocks", TOKENS.to(device))
    assert "leave blocks= out" in str(caught.value) or "register modules in the order" in str(caught.value)


def test_a_chain_is_proved_without_side_effects() -> None:
    """Its activation and links are found, and neither random numbers nor the training mode change."""
    model = initial.outline(Plain).eval()
    before = torch.get_rng_state()
    proof = chain.prove(model, "blocks", TOKENS.to("meta"))
    assert (proof.activation.shape, proof.activation.dtype, proof.activation.requires_grad) == (
        (2, 3, 6),
        torch.float32,
        True,
    )
    assert proof.links == ("embed", "drop", "head")
    assert torch.equal(before, torch.get_rng_state())
    assert not model.training
    assert not model.embed._forward_hooks


@pytest.mark.parametrize("count", [1, 2, 3])
def test_stages_in_sequence_equal_the_whole_model(count: int) -> None:
    """Cut models called in turn compute the same bits as the whole one, under global names."""
    whole = initial.whole(Plain, 0).eval()
    links = chain.prove(whole, "blocks", TOKENS).links
    x = TOKENS
    names: set[str] = set()
    for stage in range(count):
        part = initial.whole(Plain, 0).eval()
        cut = stages.cut(part, "blocks", Layout(pp=count, dp=1), stage)
        stages.cut_links(part, "blocks", links, cut)
        assert isinstance(part.drop, stages.Absent) == (stage > 0)
        x = part(x)
        mine = {name for name, _ in part.named_parameters()}
        assert not mine & names
        names |= mine
    assert torch.equal(x, whole(TOKENS))
    assert names == {name for name, _ in whole.named_parameters()}


@pytest.mark.parametrize("schedule", [Schedule.INTERLEAVED, Schedule.ZBV])
def test_a_rank_with_several_stages_has_one_model_with_a_part_for_each(schedule: Schedule) -> None:
    """Parts in order equal the whole; the rank's model has the very same parameters."""
    whole = initial.whole(Deep, 0).eval()
    links = chain.prove(whole, "inner.blocks", TOKENS).links
    layout = Layout(pp=2, dp=1, virtual=2, schedule=schedule, cuts=(1, 3, 4), zero=2)
    parts: dict[int, stages.Stage] = {}
    names: list[str] = []
    for rank in range(2):
        model = initial.whole(Deep, 0).eval()
        mine = stages.cut(model, "inner.blocks", layout, rank)
        stages.cut_links(model, "inner.blocks", links, mine)
        held = {name: id(parameter) for part in mine for name, parameter in part.module.named_parameters()}
        assert held == {name: id(parameter) for name, parameter in model.named_parameters()}
        assert len(held) == sum(1 for part in mine for _ in part.module.parameters())
        assert {name for name, _ in model.named_buffers()} == {name for name, _ in whole.named_buffers()}
        names += held
        parts |= {part.stage: part for part in mine}
    assert [len(parts[stage].present) for stage in range(4)] == [1, 2, 1, 1]
    x = TOKENS
    for stage in range(4):
        x = parts[stage].module(x)
    assert torch.equal(x, whole(TOKENS))
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())


class Deep(nn.Module):
    """A chain within a chain, with a buffer on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Plain(depth=5)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def test_hooks_of_a_part_are_its_own() -> None:
    """A hook on one part's containers, or on its stand-ins, does not fire in another part."""
    model = initial.whole(Plain, 0)
    first, second = stages.cut(model, "blocks", Layout(pp=1, dp=1, virtual=2), 0)
    seen: list[str] = []
    first.module.register_forward_pre_hook(lambda *_: seen.append("module"))
    for name, block in first.blocks:
        block.register_forward_pre_hook(lambda *_, name=name: seen.append(name))
    second.module(torch.zeros(2, 3, 6))
    assert seen == []
    first.module(TOKENS)
    assert seen == ["module", "blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_blocks_may_be_in_a_dictionary(count: int) -> None:
    """Under any names, in the order in which they were put there; stages in turn compute the bits of the whole."""
    whole = initial.whole(NamedPlain, 0).eval()
    proof = chain.prove(whole, "blocks", TOKENS)
    x, names = TOKENS, []
    for stage in range(count):
        part = initial.whole(NamedPlain, 0).eval()
        cut = stages.cut(part, "blocks", Layout(pp=count, dp=1), stage)
        stages.cut_links(part, "blocks", proof.links, cut)
        assert [name for name, _ in cut[0].blocks] == ["blocks.first", "blocks.second", "blocks.10"]
        names += [name for name, _ in cut[0].present]
        x = part(x)
    assert torch.equal(x, whole(TOKENS))
    assert names == ["blocks.first", "blocks.second", "blocks.10"]
    assert stages.comparable(whole, "blocks")


def test_blocks_are_distributed_evenly_and_in_order() -> None:
    """Runs are contiguous and differ by at most one block."""
    for blocks in range(1, 12):
        for count in range(1, blocks + 1):
            spread = [stage_of_block(block, blocks, count) for block in range(blocks)]
            sizes = [spread.count(stage) for stage in range(count)]
            assert spread == sorted(spread)
            assert max(sizes) - min(sizes) <= 1
            assert min(sizes) >= 1


def test_a_wrong_name_of_the_blocks_lists_the_right_ones() -> None:
    """The candidates are listed with their lengths."""
    with pytest.raises(ModelError, match=r"no such module in Chain. Those in the model: 'blocks' \(3\)"):
        stages.find_blocks(Chain(), "layers")
    with pytest.raises(ModelError, match="a Linear, not a ModuleList"):
        stages.find_blocks(Chain(), "head")
    with pytest.raises(ModelError, match="the model has no such list"):
        stages.find_blocks(nn.Linear(2, 2), "blocks")
    with pytest.raises(LayoutError, match=r"more pipeline stages \(4\) than the model has blocks \(3\)"):
        stages.cut(Chain(), "blocks", Layout(pp=4, dp=1), 0)


def test_blocks_deep_inside_a_model_are_found() -> None:
    """A dotted path names the ends on each level."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Chain()
            self.last = nn.Linear(9, 9)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.inner(x))  # type: ignore[no-any-return]

    assert stages.ends(Wrapped(), "inner.blocks") == (["inner.embed"], ["last", "inner.head"])
    links = chain.prove(Wrapped(), "inner.blocks", TOKENS).links
    assert links == ("inner.embed", "inner.head", "last")
    part = Wrapped()
    stages.cut(part, "inner.blocks", Layout(pp=2, dp=1), 1)
    assert [name for name, m in part.named_modules() if isinstance(m, stages.Absent)] == [
        "inner.embed",
        "inner.blocks.0",
        "inner.blocks.1",
    ]


def test_random_numbers_depend_on_the_place_alone() -> None:
    """A block draws the same whether those before it are local or stand-ins, and other numbers elsewhere."""

    def drawn(stage: int | None, micro_batch: int = 0) -> list[float]:
        seen: list[float] = []
        model = Model(dropout=0.0)
        blocks = [(f"blocks.{i}", b) for i, b in enumerate(model.blocks)]
        if stage is not None:
            blocks = list(stages.cut(model, "blocks", Layout(pp=2, dp=1), stage)[0].blocks)
        randomness = Randomness(5, CpuDevice())
        randomness.install(model, blocks)
        for _, block in blocks:
            block.register_forward_hook(lambda *_: seen.append(float(torch.rand(()))))
        randomness.at(3, micro_batch)
        model(TOKENS if stage in (0, None) else torch.zeros(2, 3, 7))
        return seen

    whole = drawn(None)
    assert drawn(0) == drawn(1) == whole
    assert len(set(whole)) == len(whole)
    assert not set(drawn(None, micro_batch=1)) & set(whole)


def test_places_are_laid_out_with_the_pipeline_outermost() -> None:
    """Ranks of one stage are neighbours."""
    layout = Layout(pp=2, dp=3)
    assert [place_of(rank, layout) for rank in (0, 2, 3, 5)] == [
        RankPlace(pp=0, dp=0, tp=0),
        RankPlace(pp=0, dp=2, tp=0),
        RankPlace(pp=1, dp=0, tp=0),
        RankPlace(pp=1, dp=2, tp=0),
    ]
    with pytest.raises(LayoutError, match="rank 6"):
        place_of(6, layout)


def test_unsupported_parameters_and_optimizers_are_named() -> None:
    """Scalar parameters, mixed dtypes, fused optimizers and batch statistics."""

    class Odd(nn.Module):
        def __init__(self, parameter: nn.Parameter) -> None:
            super().__init__()
            self.linear, self.odd = nn.Linear(2, 2), parameter

    with pytest.raises(ModelError, match="parameter 'odd' has no dims"):
        look_at_model(Odd(nn.Parameter(torch.tensor(1.0))), [])
    mixed = Odd(nn.Parameter(torch.ones(2, dtype=torch.bfloat16)))
    with pytest.raises(ModelError, match=r"'odd' \(torch.bfloat16\) and 'linear.weight' \(torch.float32\)"):
        look_at_model(mixed, [])
    look_at_model(mixed, [("linear", mixed.linear)])
    with pytest.warns(OutsidePromise, match="module '1' .BatchNorm1d."):
        look_at_model(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        look_at_model(Plain(), [])
    fused = torch.optim.AdamW(nn.Linear(2, 2).parameters(), fused=True)
    with pytest.raises(UsageError, match=r"AdamW\(fused=True\)"):
        look_at_optimizer(fused, ordered=True)
    look_at_optimizer(fused, ordered=False)


def test_a_large_model_that_cannot_be_initialised_is_refused() -> None:
    """A module whose parameters it cannot initialise itself is named."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

    bare = initial.skeleton(lambda: nn.Sequential(nn.Linear(2, 2), Bare()))
    with pytest.raises(ModelError, match=r"module '1' \(Bare\) has parameters but no reset_parameters"):
        initial.fill(bare, "", 0, CpuDevice())
    with pytest.raises(ModelError, match="needs a function that builds the model"):
        initial.whole(lambda: 3, 0)  # type: ignore[arg-type, return-value]


def test_blocks_are_timed_only_where_they_are_one_work_and_nothing_compiles_the_hooks() -> None:
    """A hook in what is compiled as a whole would fail; around a block that was compiled before, it is outside."""

    def nested() -> nn.Module:
        inner = nn.Module()
        inner.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        outer = nn.Module()
        outer.inner = inner
        return outer

    def layers(model: nn.Module) -> Any:
        return stages.find_blocks(model, "inner.layers")

    model = nested()
    assert stages.comparable(model, "inner.layers")
    assert not stages.comparable(model, None)
    layers(model)[1] = nn.Linear(4, 5)
    assert not stages.comparable(model, "inner.layers")
    for place in ("inner.layers.1", "inner", ""):
        model = nested()
        model.get_submodule(place).compile(backend="eager", fullgraph=True)
        assert not stages.comparable(model, "inner.layers"), place
    model = nested()
    model.inner = torch.compile(model.inner, backend="eager")
    assert not stages.comparable(model, "inner.layers")
    model = nested()
    for number, layer in enumerate(layers(model)):
        layers(model)[number] = torch.compile(layer, backend="eager", fullgraph=True)
    assert stages.comparable(model, "inner.layers")
