from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic3d.values import Layout
from tests.parallel import mains
from tests.parallel.models import Model, Plain
from tests.parallel.worlds import Orders, run_world

pytestmark = pytest.mark.gloo


def test_initial_weights_are_those_of_a_plain_script() -> None:
    """The parts of a model that was built whole and then cut equal the model that a script builds."""
    torch.manual_seed(3)
    plain = dict(Model().named_parameters())
    names: set[str] = set()
    for report in run_world(mains.initial, Orders(layout=Layout(pp=2, dp=2))):
        assert report.ended == "done", report.error
        for name, value in report.result.items():
            if name in plain:
                assert torch.equal(value, plain[name]), name
                names.add(name)
    assert names == set(plain)


def test_a_large_model_begins_alike_in_every_layout() -> None:
    """Weights of a model that is never whole are keyed by module, and its buffers are real."""
    ways = []
    for layout in (Layout(pp=1, dp=1), Layout(pp=3, dp=1), Layout(pp=1, dp=2)):
        whole: dict[str, torch.Tensor] = {}
        for report in run_world(mains.initial_large, Orders(layout=layout)):
            assert report.ended == "done", report.error
            whole.update(report.result)
        ways.append(whole)
    names = dict(Plain().named_parameters()) | dict(Plain().named_buffers())
    for way in ways:
        assert way.keys() == names.keys()
        for name, value in way.items():
            assert torch.equal(value, ways[0][name]), name
    assert torch.equal(ways[0]["places.waves"], Plain().places.waves)
    assert float(ways[0]["blocks.0.up.weight"].std()) > 0
    assert not torch.equal(ways[0]["blocks.0.up.weight"], ways[0]["blocks.1.up.weight"])


@pytest.mark.parametrize("main", [mains.measured, mains.measured_on_meta], ids=["values", "meta"])
def test_measuring_reports_the_profile_and_ends_in_restore(main: object) -> None:
    """A measuring trainer reports blocks, sizes and one digest per job, on meta if the model allows it."""
    (report,) = run_world(main, Orders(layout=Layout(pp=1, dp=1), measuring=True))  # type: ignore[arg-type]
    assert report.ended == "measured", report.error
    assert report.profile is not None
    assert report.profile.micro_batches == 7
    assert report.profile.micro_batch == 2
    model = Model() if main is mains.measured else Plain()
    assert report.profile.blocks == len(model.blocks)
    assert report.profile.parameters == sum(p.numel() for p in model.parameters())


def test_a_trainer_proves_nothing_that_the_measuring_one_has_proven() -> None:
    """Two passes over the whole model on meta, in each generation; without their outcome they are made."""
    (measured,) = run_world(mains.observed, Orders(layout=Layout(pp=1, dp=1), measuring=True))
    assert measured.proven is not None, measured.error
    for proven in (measured.proven, None):
        reports = run_world(mains.observed, Orders(layout=Layout(pp=2, dp=1), proven=proven))
        for report in reports:
            assert report.ended == "done", report.error
            assert set(report.result) == ({"cpu"} if proven else {"meta", "cpu"})


def test_all_ranks_leave_at_the_same_step(tmp_path: Path) -> None:
    """Ranks told at different steps leave together, after a snapshot that was waited for."""
    orders = Orders(layout=Layout(pp=2, dp=1), leave_at={0: 1, 1: 2}, keep=tmp_path, snapshot_every=2)
    for report in run_world(mains.train, orders):
        assert (report.ended, report.error) == ("left", "3")
        assert report.snapshots == [(2, False, False), (3, False, True)]
    one_only = Orders(layout=Layout(pp=2, dp=1), leave_at={0: 1}, checkpoint_every=3)
    for report in run_world(mains.train, one_only):
        assert report.ended == "done", report.error
        assert report.snapshots == [(3, True, False)]


def test_a_lost_peer_is_reported_to_the_port() -> None:
    """A rank that dies within a step is a lost peer to the others, never an exception in main."""
    for layout in (Layout(pp=2, dp=1), Layout(pp=1, dp=2)):
        first, second = run_world(mains.dies, Orders(layout=layout))
        assert first.ended == "peer lost", first.error
        assert second.ended == "died"


def test_an_error_in_the_users_code_is_not_a_lost_peer() -> None:
    """The user's own exception passes through main, also out of a pipeline that wraps it."""
    for layout in (Layout(pp=1, dp=1), Layout(pp=2, dp=1)):
        last = run_world(mains.fails, Orders(layout=layout))[-1]
        assert last.ended == "raised"
        assert "a bug of the user's" in last.error


@pytest.mark.parametrize(
    ("choices", "order"),
    [
        ({}, ["vote", "sums", "update"]),
        ({"clip": 0.5}, ["sums", "vote", "update"]),
        pytest.param({"skip": True}, ["sums", "vote", "update"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_vote_goes_beside_the_last_pieces_of_the_gradient(choices: dict[str, Any], order: list[str]) -> None:
    """Where it says nothing of the gradient; no rank updates before it has both."""
    reports = run_world(partial(mains.train_noted, **choices), Orders(layout=Layout(pp=1, dp=2)))
    assert [report.result for report in reports] == [order, order], reports[0].error
