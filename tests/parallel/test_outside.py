"""What a script does outside steps: its own forward passes, and checkpoints on request."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from elastic3d.errors import UsageError
from elastic3d.training import Main, Run
from elastic3d.training.standalone import StandalonePort
from elastic3d.values import Layout
from tests.parallel import outside_mains as mains
from tests.parallel.worlds import Orders, run_world

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(300)]


def test_every_rank_may_evaluate_without_stages() -> None:
    """The ranks meet before the pass, and train on after it."""
    reports = run_world(mains.evaluate, Orders(layout=Layout(pp=1, dp=2)))
    assert [report.error for report in reports] == ["", ""]
    assert reports[0].result == reports[1].result != 0.0


@pytest.mark.parametrize(
    ("layout", "precision"),
    [(Layout(pp=1, dp=2, zero=2), "fp32"), (Layout(pp=1, dp=1, zero=2), "bf16")],
    ids=str,
)
def test_a_pass_of_the_scripts_own_changes_neither_updates_nor_snapshots(
    layout: Layout, precision: str, tmp_path: Path
) -> None:
    """Wherever it is made: gradients are clipped, weights are the updated ones, and snapshots have the whole state."""
    ended = {}
    for after, training in (("", False), ("backward", False), ("backward", True), ("step", False), ("step", True)):
        kept = tmp_path / f"{after}-{training}"
        kept.mkdir()
        main = partial(mains.passed_between, after=after, training=training, precision=precision)
        reports = run_world(main, Orders(layout=layout, keep=kept, snapshot_every=1))
        assert {report.error for report in reports} == {""}
        ended[kept.name] = {report.result for report in reports} | {keys(file) for file in kept.iterdir()}
        assert len(list(kept.iterdir())) == 3 * layout.world
    assert len(set(map(frozenset, ended.values()))) == 1, ended


def keys(file: Path) -> tuple[str, frozenset[str]]:
    """Return the rank and the keys of one snapshot; some are of the optimizer."""
    _, tiles = pickle.loads(file.read_bytes())
    names = frozenset(spec.key for spec, _, _ in tiles)
    assert any(name.startswith("optimizer/") for name in names)
    return file.name.split(".")[2], names


@pytest.mark.parametrize(
    "main", [mains.evaluate_alone, pytest.param(mains.evaluate_alone_elsewhere, marks=pytest.mark.long)]
)
def test_evaluation_on_one_rank_is_refused(main: Main) -> None:
    """It would wait for ever. The script error, on any backend, names the calling rank and what to do instead."""
    first = run_world(main, Orders(layout=Layout(pp=1, dp=2)))[0]
    assert first.ended == "raised", first.error
    assert "model(...) outside run.backward was called on rank 0, and not on every rank" in first.error


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (mains.evaluate_at_the_end, "model(...) outside run.backward was called on rank 0 when main had returned on"),
        (mains.digest_at_the_end, "run.digest() was called on rank 0 when main had returned on"),
        (mains.gather_at_the_end, "a collective on rank 0 failed when main had returned on rank 1"),
        (mains.leave_early, "a collective on rank 0 failed when main had returned on rank 1 after step 2"),
    ],
)
def test_a_rank_still_working_is_told_when_the_others_have_ended(main: Main, words: str) -> None:
    """After the loop, or in its midst, the others end well; it is no lost peer, which would be retried."""
    first, second = run_world(main, Orders(layout=Layout(pp=1, dp=2, zero=3)))
    assert (first.ended, second.ended) == ("raised", "done"), first.error
    assert words in first.error
    assert "on every rank alike" in first.error


def test_the_model_cannot_be_called_with_stages() -> None:
    """A rank has only some of the layers: refused before anything is computed."""
    reports = run_world(mains.evaluate, Orders(layout=Layout(pp=2, dp=1)))
    assert all("layers of its own stage alone" in report.error for report in reports)


def test_any_rank_may_ask_for_a_checkpoint() -> None:
    """All make it, of the step under way and no other."""
    reports = run_world(mains.save_once, Orders(layout=Layout(pp=1, dp=2)))
    assert [report.error for report in reports] == ["", ""]
    for report in reports:
        # The end of a run is a checkpoint as well, without a request.
        assert [(step, checkpoint) for step, checkpoint, _ in report.snapshots] == [(2, True), (3, False)]


def test_a_job_without_a_store_cannot_save() -> None:
    """Nothing would be kept, as the start of the run announced."""
    port = StandalonePort()
    Run(port).save()
    port.assignment = replace(port.assignment, store_prefix="1.1")
    with pytest.raises(UsageError, match="no store to save to"):
        Run(port).save()
