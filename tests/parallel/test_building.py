"""How a model's weights come to be: block by block, and not at all where a state is going to bring them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from elastic3d.parallel import initial
from elastic3d.training import Run
from elastic3d.training.standalone import StandalonePort
from elastic3d.values import Layout
from tests.parallel import building_mains, mains, numeric_mains
from tests.parallel.models import Model, Plain, Sentences
from tests.parallel.worlds import Orders, run_world


@pytest.mark.gloo
@pytest.mark.parametrize("layout", [Layout(pp=1, dp=2), Layout(pp=1, dp=1, tp=2)], ids=str)
def test_a_device_never_holds_more_than_its_part_and_two_blocks(layout: Layout) -> None:
    """Whether the model is built whole on the host or filled on the device, at once or when no state was found."""
    for report in run_world(building_mains.build_within, Orders(layout=layout)):
        assert report.ended == "done", report.error
        assert report.result == [False, True, False, True]


@pytest.mark.gloo
@pytest.mark.long
@pytest.mark.parametrize("main", [mains.train, numeric_mains.train_tied_large])
def test_a_state_that_is_not_there_after_all_changes_no_bit(main: Any) -> None:
    """Built whole or module by module, over replicas and stages."""
    shapes = [Layout(pp=1, dp=2, zero=3), Layout(pp=2, dp=1) if main is mains.train else Layout(pp=1, dp=3, zero=2)]
    reports = run_world(main, Orders(layout=Layout(pp=1, dp=1)))
    for shape in shapes:
        reports += run_world(main, Orders(layout=shape, expects_state=True))
    for report in reports:
        assert report.ended == "done", report.error
        assert getattr(report.result, "digest", report.result) == getattr(
            reports[0].result, "digest", reports[0].result
        )


@pytest.mark.gloo
@pytest.mark.parametrize("main", [mains.initial, mains.initial_large], ids=["whole", "large"])
def test_who_looks_before_the_state_is_loaded_sees_initial_weights(main: Any) -> None:
    """On every stage, as in a generation that has no state to load."""
    seen: list[dict[str, torch.Tensor]] = []
    for expects_state in (False, True):
        seen.append({})
        for report in run_world(main, Orders(layout=Layout(pp=2, dp=1), expects_state=expects_state)):
            assert report.ended == "done", report.error
            seen[-1].update(report.result)
    assert seen[0].keys() == seen[1].keys()
    for name, value in seen[0].items():
        assert torch.equal(value, seen[1][name]), name


class Drawn(nn.Linear):
    """Knows how often real weights of its kind were drawn."""

    times = 0

    def reset_parameters(self) -> None:
        Drawn.times += not self.weight.is_meta
        super().reset_parameters()


@contextmanager
def shard(build: Callable[[], nn.Module], *, expects_state: bool, **options: Any) -> Iterator[tuple[Run, nn.Module]]:
    port = StandalonePort()
    port.assignment = replace(port.assignment, expects_state=expects_state)
    run = Run(port)
    model = run.shard(build, seed=3, **options)
    try:
        yield run, model
    finally:
        if run._assembly is not None:
            run._assembly.stop_watching()


def restore(run: Run, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.restore(model=model, optimizer=optimizer, batches=run.batches(Sentences(), global_batch=4, micro_batch=2))


@pytest.mark.parametrize("whole_below", [1 << 30, 0], ids=["whole", "large"])
def test_weights_are_not_drawn_where_a_state_is_expected(whole_below: int) -> None:
    """Only when it turns out that there is none; optimizers and data sets are made without looking at them."""
    Drawn.times = 0
    with shard(lambda: Drawn(2, 2), expects_state=True, whole_below=whole_below) as (run, model):
        assert Drawn.times == 0
        optimizer = torch.optim.AdamW(model.parameters())
        batches = run.batches(Sentences(), global_batch=4, micro_batch=2)
        assert Drawn.times == 0
        run.restore(model=model, optimizer=optimizer, batches=batches)
        assert Drawn.times == 1
    with shard(lambda: Drawn(2, 2), expects_state=False, whole_below=whole_below) as (_, same):
        assert torch.equal(model.weight, same.weight)  # type: ignore[arg-type]


def test_a_change_made_before_there_turned_out_to_be_no_state_is_kept() -> None:
    """The first operation on any weight gives all of them their values."""
    changed = []
    for expects_state in (False, True):
        with shard(Model, expects_state=expects_state) as (run, model):
            with torch.no_grad():
                model.head.weight.mul_(0.5)  # type: ignore[union-attr, operator]
            kept = [parameter.detach().clone() for parameter in model.parameters()]
            restore(run, model)
            assert all(torch.equal(one, other) for one, other in zip(kept, model.parameters(), strict=True))
            changed.append(kept)
    assert all(torch.equal(one, other) for one, other in zip(*changed, strict=True))


def test_what_a_script_draws_does_not_depend_on_whether_weights_were_drawn() -> None:
    """A choice of samples for evaluation, say, is the same in every generation."""
    drawn = []
    for expects_state in (False, True):
        with shard(Model, expects_state=expects_state) as (run, model):
            early = torch.randperm(9)
            restore(run, model)
            drawn.append((early.tolist(), torch.randperm(9).tolist()))
    assert drawn[0] == drawn[1]


def hooked() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(2))
    parameter.register_hook(torch.neg)  # type: ignore[no-untyped-call]
    return parameter


class Noisy(nn.Module):
    """Has a parameter, and lets `then` do something after it."""

    def __init__(self, then: Callable[[Noisy], Any]) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2)
        then(self)


@pytest.mark.parametrize(
    "then",
    [
        lambda model: model.register_buffer("noise", torch.randn(2), persistent=False),
        lambda model: setattr(model, "order", torch.randperm(4).tolist()),
        lambda model: setattr(model, "first", {"line": [model.line.weight.detach().clone()]}),
        lambda model: setattr(model, "size", float(model.line.weight.detach().norm())),
        lambda model: model.line.weight.register_hook(torch.neg),
        lambda model: setattr(model, "other", hooked()),
    ],
    ids=["buffer", "python", "kept", "number", "hook", "early hook"],
)
def test_a_model_that_depends_on_values_is_built_whole_all_the_same(then: Callable[[Noisy], Any]) -> None:
    """Else a buffer that is no state, say, would be another one in each generation."""

    def build() -> nn.Module:
        return Noisy(then)

    assert initial.blank(build, 3, initial.outline(build)) is None
    with shard(build, expects_state=True) as (_, model):
        torch.manual_seed(3)
        plain = build()
        assert torch.equal(model.line.weight, plain.line.weight)  # type: ignore[union-attr, arg-type]
        if "noise" in dict(plain.named_buffers()):
            assert torch.equal(model.noise, plain.noise)  # type: ignore[arg-type]


def test_what_is_no_parameter_is_there_without_values_too() -> None:
    """Buffers that are no state, ties, and what the model's code has set on a parameter."""

    def build() -> nn.Module:
        model = Plain()
        model.head.weight = model.embed.weight
        model.head.bias.decay = False  # type: ignore[attr-defined]
        return model

    with shard(build, expects_state=True) as (run, model):
        assert run._assembly is not None
        assert run._assembly.deferred is not None
        assert torch.equal(model.places.waves, Plain().places.waves)  # type: ignore[union-attr, arg-type]
        assert model.head.weight is model.embed.weight  # type: ignore[union-attr]
        assert model.head.bias.decay is False  # type: ignore[union-attr]


def test_buffers_of_a_large_model_are_drawn_under_the_seed() -> None:
    """Not from whatever the process has drawn before."""

    def build() -> nn.Module:
        return Noisy(lambda model: model.register_buffer("noise", torch.randn(4)))

    torch.manual_seed(1)
    one = initial.skeleton(build, 3)
    torch.manual_seed(2)
    assert torch.equal(one.noise, initial.skeleton(build, 3).noise)  # type: ignore[arg-type]
