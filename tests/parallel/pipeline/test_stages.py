from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from elastic3d.devices.cpu import CpuDevice
from elastic3d.errors import LayoutError, ModelError, UsageError
from elastic3d.parallel import initial
from elastic3d.parallel.pipeline import chain, stages
from elastic3d.parallel.pipeline.absent import Absent
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

    def blocks_of(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Scaled(Chain):
    """Multiplies what it embeds by a buffer, in place, and what the head returns by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks_of(self.embed(x).clone().mul_(self.scale))
        return self.head(x).float().tanh() * 3.0  # type: ignore[no-any-return]


class Positioned(Chain):
    """Adds the rows of a learned table for as many positions as there are, and unpacks the shape of its input."""

    def __init__(self) -> None:
        super().__init__()
        blocks, head = self.blocks, self.head
        del self.blocks, self.head
        self.places = nn.Embedding(8, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.blocks, self.head = blocks, head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, length = x.shape
        x = self.drop(self.embed(x) + self.places(torch.arange(length)))
        return self.head(self.blocks_of(x)).view(*x.shape[:2], -1)  # type: ignore[no-any-return]


class ReadsInputAgain(Chain):
    """Masks the last module's output where the input says so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.head(self.blocks_of(self.embed(x)))
        return out.masked_fill((x == 0).unsqueeze(-1), -1.0)  # type: ignore[no-any-return]


class DrawsAfter(Chain):
    """Draws random numbers after the blocks, which the last stage seeds by place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.head(self.blocks_of(self.embed(x))), 0.5, self.training)


class ReturnsTwo(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return x, super().forward(x)


class Pairs(Chain):
    """Goes on with the second tensor that its blocks return."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReturnsTwo(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            _, x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Masked(nn.Linear):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * mask.unsqueeze(-1)


class PassesMask(Chain):
    """Gives its blocks a mask of the input's values, which every stage has then."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Masked(WIDTH, WIDTH) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = tokens != 0
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)  # type: ignore[no-any-return]


class LooksAtInput(Chain):
    """Decides by the input's values, and what it decides matters after the blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 2.0 if bool((x > 3).any()) else 1.0
        return self.head(self.blocks_of(self.embed(x))) * scale  # type: ignore[no-any-return]


class ComputesBetweenBlocks(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x) * 2.0
        return self.head(x)  # type: ignore[no-any-return]


class SkipsOver(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) * 2.0
        return self.head(self.blocks_of(x) + x)  # type: ignore[no-any-return]


class SkipsPlaces(Positioned):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.places(torch.arange(x.shape[1]))
        return self.head(self.blocks_of(self.drop(self.embed(x)) + places)) + places.sum()  # type: ignore[no-any-return]


class SkipsBlocks(Chain):
    def forward(self, x: torch.Tensor) -> Any:
        states = [self.embed(x)]
        for block in self.blocks:
            states.append(block(states[-1]))
        return self.head(states[-1]), states[1]


class UsesWeight(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks_of(self.embed(x))) @ self.embed.weight  # type: ignore[no-any-return]


class UsesHead(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks_of(self.embed(x).to(self.head.weight.dtype)))  # type: ignore[no-any-return]


class DrawsBetween(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(())
        return self.head(self.blocks_of(self.embed(x))) * noise  # type: ignore[no-any-return]


class Counts(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.head(self.blocks_of(self.embed(x)))
        self.seen.add_(out.detach().mean())
        return out  # type: ignore[no-any-return]


class DecidesByEmbedding(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        scale = 2.0 if bool((x > 0).any()) else 1.0
        return self.head(self.blocks_of(x)) * scale  # type: ignore[no-any-return]


class Reenters(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)  # type: ignore[no-any-return]


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
        return self.head(self.embed(self.head(self.blocks_of(self.embed(x))).argmax(-1)))  # type: ignore[no-any-return]


class Tied(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class OwnParameter(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(WIDTH))


class HeadFirst(Chain):
    def __init__(self) -> None:
        super().__init__()
        blocks = self.blocks
        del self.blocks
        self.blocks = blocks


REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    (ComputesBetweenBlocks, r"something between module 'blocks.0' and module 'blocks.1', where pipeline stages are"),
    (SkipsOver, r"forward returns output, which it computes from module 'embed'"),
    (SkipsPlaces, r"forward returns output, which it computes from module 'places'"),
    (SkipsBlocks, r"forward returns output\[1\], which it computes from module 'blocks.0'"),
    (UsesWeight, r"does not run on a later pipeline stage, .*'Absent' object has no attribute 'weight'"),
    (UsesHead, r"does not run on the first of several pipeline stages, .*'Absent' object has no attribute 'weight'"),
    (DrawsBetween, r"forward returns output, which it computes from random numbers"),
    (Counts, r"writes into the buffer 'seen' what it computes from module 'blocks.2'"),
    (Reenters, r"runs block 'blocks.1' where autograd does not record, .*use use_reentrant=False"),
    (Reversed, r"blocks run out of order: 'blocks.2'"),
    (Skips, r"'blocks.2' does not run"),
    (UsedTwice, r"'embed' is registered before the blocks, but runs after the blocks"),
    (Tied, r"'embed.weight' and 'head.weight' are one tensor, .* tie_word_embeddings=False"),
    (OwnParameter, r"parameter 'places' is used by forward outside of any module"),
    (HeadFirst, r"module 'head' is registered before the blocks, but runs after the blocks; .* deleted and set again"),
]


@pytest.mark.parametrize(("build", "message"), REFUSED, ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_model_that_is_no_chain_is_refused_by_name(build: Callable[[], nn.Module], message: str, device: str) -> None:
    """Each way of not being a chain is reported with the part's name and what would work."""
    with torch.device(device):
        model = build()
    with pytest.raises(ModelError, match=message) as caught:
        chain.prove(model, "blocks", TOKENS.to(device))
    assert "leave blocks= out" in str(caught.value)


def test_a_decision_by_what_only_the_first_stage_has_is_refused() -> None:
    """A pass over real values, as is made where meta does not do, notices what Python reads."""
    with pytest.raises(ModelError, match=r"decides by values that are computed from module 'embed'"):
        chain.prove(DecidesByEmbedding(), "blocks", TOKENS)


def run_in_stages(build: Callable[[], nn.Module], path: str, given: torch.Tensor, layout: Layout) -> list[nn.Module]:
    """Check that the stages of a model compute, one after the other, the bits of the whole; return the ranks' models.

    A stage that needs nothing of the input is given zeros.
    """
    whole = initial.whole(build, 0).eval()
    proof = chain.prove(whole, path, given)
    models, parts = [], {}
    for rank in range(layout.pp):
        models.append(initial.whole(build, 0).eval())
        cut = stages.cut(models[-1], path, layout, rank)
        stages.cut_further(models[-1], path, proof.early, proof.late, cut)
        for part in cut:
            stages.dress(part, proof.activation, proof.early, proof.templates, given.device)
            parts[part.stage] = part
    output: Any = None
    for stage in range(layout.stages):
        input_ = given if stage == 0 or proof.frame.everywhere else torch.zeros_like(given)
        output = proof.frame.run(parts[stage].module, input_, output)
    assert torch.equal(output, whole(given))
    return models


COMPUTES = [Scaled, Positioned, ReadsInputAgain, DrawsAfter, Pairs, PassesMask, LooksAtInput]


@pytest.mark.parametrize("build", COMPUTES)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_code_around_the_blocks_is_computed_on_the_first_and_the_last_stage(
    build: Callable[[], nn.Module], count: int
) -> None:
    """The stages in turn compute the bits of the whole model."""
    run_in_stages(build, "blocks", torch.tensor([[0, 3, 2], [1, 0, 4]]), Layout(pp=count, dp=1))


@pytest.mark.parametrize(("build", "everywhere"), [(Scaled, False), (ReadsInputAgain, True), (LooksAtInput, True)])
def test_later_stages_load_the_input_only_if_they_need_its_values(
    build: Callable[[], nn.Module], everywhere: bool
) -> None:
    """By what forward computes from it, or reads of it."""
    assert chain.prove(build(), "blocks", TOKENS).frame.everywhere == everywhere


def test_blanks_follow_the_activation_that_arrives() -> None:
    """Where ranks have parts of a sequence, so has what a later stage computes its tables from."""
    template = chain.template_of((torch.empty(2, 6, 4), torch.empty(1, 6), None))
    assert template is not None
    here, places, none = template.beside((2, 6, 4), (2, 3, 4)).blank(torch.device("cpu"))
    assert (here.shape, places.shape, none) == ((2, 3, 4), (1, 3), None)


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
    assert (list(proof.early), proof.late) == (["embed", "drop"], ())
    assert torch.equal(before, torch.get_rng_state())
    assert not model.training
    assert not model.embed._forward_hooks


@pytest.mark.parametrize("count", [1, 2, 3])
def test_stages_in_sequence_equal_the_whole_model(count: int) -> None:
    """Cut models called in turn compute the same bits as the whole one, under global names."""
    models = run_in_stages(Plain, "blocks", TOKENS, Layout(pp=count, dp=1))
    assert [isinstance(model.drop, Absent) for model in models] == [False, True, True][:count]
    names = [name for model in models for name, _ in model.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in Plain().named_parameters())


@pytest.mark.parametrize("schedule", [Schedule.INTERLEAVED, Schedule.ZBV])
def test_a_rank_with_several_stages_has_one_model_with_a_part_for_each(schedule: Schedule) -> None:
    """Parts in order equal the whole; the rank's model has the very same parameters."""
    whole = initial.whole(Deep, 0)
    layout = Layout(pp=2, dp=1, virtual=2, schedule=schedule, cuts=(1, 3, 4), zero=2)
    names: list[str] = []
    for model in run_in_stages(Deep, "inner.blocks", TOKENS, layout):
        held = [name for name, _ in model.named_parameters()]
        assert {name for name, _ in model.named_buffers()} == {name for name, _ in whole.named_buffers()}
        names += held
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    for rank in range(2):
        model = initial.whole(Deep, 0)
        mine = stages.cut(model, "inner.blocks", layout, rank)
        parts = {name: id(parameter) for part in mine for name, parameter in part.module.named_parameters()}
        assert parts == {name: id(parameter) for name, parameter in model.named_parameters()}
        assert len(parts) == sum(1 for part in mine for _ in part.module.parameters())


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
    models = run_in_stages(NamedPlain, "blocks", TOKENS, Layout(pp=count, dp=1))
    names = ["first", "second", "10"]
    assert all(list(dict(model.blocks.named_children())) == names for model in models)
    present = [name for model in models for name, b in model.blocks.named_children() if not isinstance(b, Absent)]
    assert present == names
    assert stages.comparable(NamedPlain(), "blocks")


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
    assert list(chain.prove(Wrapped(), "inner.blocks", TOKENS).early) == ["inner.embed"]
    part = Wrapped()
    stages.cut(part, "inner.blocks", Layout(pp=2, dp=1), 1)
    assert [name for name, m in part.named_modules() if isinstance(m, Absent)] == [
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
