from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from elastic3d.data import check
from elastic3d.data.positions import Order
from elastic3d.devices import device_at
from elastic3d.parallel import norms
from elastic3d.parallel.digest import combine
from elastic3d.training import Run, run_alone
from elastic3d.values import Layout
from tests.parallel import mains
from tests.parallel.models import Model, Sentences, loss_fn
from tests.parallel.worlds import Orders, Report, run_world

pytestmark = pytest.mark.gloo


def layout(pp: int, dp: int, zero: int = 3) -> Layout:
    return Layout(pp=pp, dp=dp, zero=zero)


def finished(reports: list[Report]) -> list[Report]:
    for report in reports:
        assert report.ended == "done", report.error
    return reports


@pytest.fixture(scope="module")
def reference() -> Report:
    """The run of one rank, which every layout must equal."""
    return finished(run_world(mains.train, Orders(layout=layout(1, 1))))[0]


@pytest.mark.parametrize(
    "shape", [(2, 1, 3), (4, 1, 3), (1, 2, 3), (1, 2, 2), (1, 3, 3), (2, 2, 2), (2, 3, 3)], ids=str
)
def test_every_layout_ends_with_one_digest(reference: Report, shape: tuple[int, int, int]) -> None:
    """Parameters and AdamW state, with dropout, clipping, a schedule and unused parameters, 7 micro-batches a step."""
    equals(reference, shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [(1, 4, 2), (1, 4, 3), (2, 2, 3), (3, 2, 2), (4, 1, 2), (1, 5, 3), (1, 7, 2), (1, 8, 3), (2, 3, 2)],
    ids=str,
)
def test_further_layouts_end_with_the_same_digest(reference: Report, shape: tuple[int, int, int]) -> None:
    """More shapes, up to more replicas than micro-batches."""
    equals(reference, shape)


def equals(reference: Report, shape: tuple[int, int, int]) -> None:
    reports = finished(run_world(mains.train, Orders(layout=layout(*shape))))
    assert {report.result for report in reports} == {reference.result}
    for report in reports:
        mine = [(r.step, r.loss, r.gradient_norm, r.samples, r.sample_sum) for r in report.records]
        assert mine == [(r.step, r.loss, r.gradient_norm, r.samples, r.sample_sum) for r in reference.records]


def test_one_rank_equals_a_plain_script() -> None:
    """With the same seed a hand-written loop over torch alone gives the same parameters and optimizer state."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(3)
    model = Model(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    order = Order(length=37, global_batch=14, micro_batch=2, seed=11)
    data = Sentences()
    losses = []
    for step in range(4):
        total = 0.0
        for index in range(7):
            pairs = [data[i] for i in order.micro_batch_samples(step, index)]
            inputs, targets = (torch.stack(side) for side in zip(*pairs, strict=True))
            loss = loss_fn(model(inputs), targets)
            (loss / 7).backward()
            total += float(loss)
        losses.append(total / 7)
        optimizer.step()
        optimizer.zero_grad()

    def main(run: Run) -> None:
        losses_of_run, sharded, adam = plain_main(run)
        assert losses_of_run == losses
        for (name, mine), (other, theirs) in zip(model.named_parameters(), sharded.named_parameters(), strict=True):
            assert name == other
            assert torch.equal(mine, theirs), name
            assert optimizer.state[mine].keys() == adam.state[theirs].keys(), name
            for key, value in optimizer.state[mine].items():
                assert torch.equal(value, adam.state[theirs][key]), (name, key)

    run_alone(main, threads=1)


def plain_main(run: Run) -> tuple[list[float], torch.nn.Module, torch.optim.Optimizer]:
    model = run.shard(lambda: Model(dropout=0.0), blocks="blocks", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=14, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    losses = []
    for batch in batches.until(step=4):
        loss = run.backward(model, batch, loss_fn)
        run.step(optimizer, loss=loss)
        losses.append(float(loss))
    return losses, model, optimizer


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    """The test model has parameters that are never used, and some used on a few micro-batches only."""
    torch.manual_seed(3)
    model = Model(dropout=0.0)
    used = []
    for index in range(8):
        inputs, targets = Sentences()[index]
        model.zero_grad()
        loss_fn(model(inputs.unsqueeze(0)), targets.unsqueeze(0)).backward()
        used.append(model.blocks[1].odd.grad is not None)
        assert model.blocks[1].never.grad is None
    assert {True, False} == set(used)


@pytest.mark.parametrize("shapes", [((1, 1), (2, 1), (2, 2)), ((1, 2), (1, 3))], ids=str)
def test_recomputed_blocks_draw_the_same_numbers(shapes: tuple[tuple[int, int], ...]) -> None:
    """Whole blocks recomputed in the backward pass, under 1F1B too, repeat their dropout."""
    digests = {finished(run_world(mains.train_checkpointed, Orders(layout=layout(*s))))[0].result for s in shapes}
    assert len(digests) == 1


def test_bfloat16_parameters_keep_the_promise() -> None:
    """Parts and sums in bf16 give one digest as well."""
    shapes = [(1, 1), (2, 1), (1, 3)]
    digests = {finished(run_world(mains.train_bfloat16, Orders(layout=layout(*s))))[0].result for s in shapes}
    assert len(digests) == 1


@pytest.mark.parametrize("zero", [2, 3])
def test_the_fast_reduction_trains_but_promises_no_bits(zero: int) -> None:
    """Losses agree up to rounding between layouts, with the last round only partly filled."""
    one = finished(run_world(mains.train_fast, Orders(layout=layout(1, 1))))[0].result
    two = finished(run_world(mains.train_fast, Orders(layout=layout(2, 2, zero))))[0].result
    assert one == pytest.approx(two, rel=1e-4)


@pytest.mark.parametrize(
    "path",
    [[(1, 3, 3), (4, 1, 3)], [(2, 2, 2), (1, 1, 3), (1, 2, 3)]],
    ids=str,
)
def test_a_change_of_layout_changes_no_bit(reference: Report, path: list[tuple[int, int, int]], tmp_path: Path) -> None:
    """Leaving at a step and going on in another layout, from the tiles of all ranks, ends with the same digest."""
    took: Path | None = None
    for number, shape in enumerate(path):
        last = number == len(path) - 1
        kept = tmp_path / str(number)
        kept.mkdir()
        world = Layout(pp=shape[0], dp=shape[1], zero=shape[2])
        leave = {} if last else dict.fromkeys(range(world.world), 0)
        reports = run_world(mains.train, Orders(layout=world, keep=kept, take=took, leave_at=leave))
        assert {report.ended for report in reports} == {"done" if last else "left"}, reports[0].error
        if took:
            assert {report.restored for report in reports} == {("memory", number, number)}
        took = kept
    assert {report.result for report in reports} == {reference.result}


def test_groups_frozen_parameters_and_schedules_survive_a_change_of_layout(tmp_path: Path) -> None:
    """Scheduled hyperparameters of each group are restored exactly, also where a stage has an empty group."""
    whole = finished(run_world(mains.train_with_groups, Orders(layout=layout(1, 1))))[0].result
    first = Orders(layout=layout(2, 2), keep=tmp_path, leave_at=dict.fromkeys(range(4), 2))
    assert {report.ended for report in run_world(mains.train_with_groups, first)} == {"left"}
    second = run_world(mains.train_with_groups, Orders(layout=layout(2, 1), take=tmp_path))
    assert {report.result for report in finished(second)} == {whole}


@pytest.mark.parametrize("shape", [(1, 2, 2), (1, 2, 3), (2, 2, 2)], ids=str)
def test_what_is_unfrozen_in_the_run_is_trained_in_every_layout(
    shape: tuple[int, int, int], thawed: Report, tmp_path: Path
) -> None:
    """Parts of a unit and whole ones, which are frozen again before the end; also where a run goes on after that."""
    main = partial(mains.train_with_groups, thaw=2, refreeze=4)
    assert {report.result for report in finished(run_world(main, Orders(layout=layout(*shape))))} == {thawed.result}
    first = Orders(layout=layout(*shape), keep=tmp_path, leave_at=dict.fromkeys(range(shape[0] * shape[1]), 2))
    assert {report.ended for report in run_world(main, first)} == {"left"}
    second = run_world(main, Orders(layout=layout(1, 2), take=tmp_path))
    assert {report.result for report in finished(second)} == {thawed.result}


@pytest.fixture(scope="module")
def thawed() -> Report:
    """The run of one rank, which is not what it would be if all stayed frozen."""
    main = partial(mains.train_with_groups, thaw=9)
    frozen = finished(run_world(main, Orders(layout=layout(1, 1))))[0]
    main = partial(mains.train_with_groups, thaw=2, refreeze=4)
    report = finished(run_world(main, Orders(layout=layout(1, 1))))[0]
    assert report.result != frozen.result
    return report


def test_gradients_that_the_optimizer_does_not_take_end_with_their_step(tmp_path: Path) -> None:
    """They count in the norm by which a step's gradient is clipped, and never in that of a later step."""
    whole = finished(run_world(mains.train_head, Orders(layout=layout(1, 1))))[0]
    for shape in ((1, 2), (2, 1)):
        reports = finished(run_world(mains.train_head, Orders(layout=layout(*shape))))
        assert {report.result for report in reports} == {whole.result}
    first = Orders(layout=layout(1, 1), keep=tmp_path, leave_at={0: 2})
    assert {report.ended for report in run_world(mains.train_head, first)} == {"left"}
    second = finished(run_world(mains.train_head, Orders(layout=layout(1, 1), take=tmp_path)))
    assert {report.result for report in second} == {whole.result}


def test_norms_and_digests_do_not_depend_on_order() -> None:
    """Rows added elementwise, and digests sorted by name, are the same in any order of arrival."""
    rows, cpu = torch.randn(11, 301), device_at("cpu", 0)
    assert torch.equal(norms.row_squares([rows], cpu)[3:5], norms.row_squares([rows[3:5].clone()], cpu))
    assert combine({"a": "1", "b": "2"}) == combine({"b": "2", "a": "1"})


def test_the_ledger_accounts_for_every_sample(reference: Report) -> None:
    """The samples that the ranks' votes report are those that the order prescribes."""
    order = Order(length=37, global_batch=14, micro_batch=2, seed=11)
    for record in reference.records:
        assert record.sample_sum == order.sum_of_positions(*record.samples)
    assert check((), order).whole
