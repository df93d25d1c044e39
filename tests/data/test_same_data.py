"""Data that changes its shape over a run, in worlds of real ranks: every layout gives the same digest."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from elastic3d.values import Layout
from tests.parallel import mains
from tests.parallel.worlds import Orders, Report, run_world

pytestmark = pytest.mark.gloo


def finished(reports: list[Report]) -> set[str]:
    for report in reports:
        assert report.ended == "done", report.error
    return {report.result for report in reports}


@pytest.fixture(scope="module")
def grown() -> set[str]:
    """The digest of one rank."""
    return finished(run_world(mains.train_growing, Orders(layout=Layout(pp=1, dp=1))))


def test_a_growing_batch_gives_one_digest_in_every_layout(grown: set[str], tmp_path: Path) -> None:
    """M changes from step to step; pipelines and reductions follow, also across a change of world."""
    assert finished(run_world(mains.train_growing, Orders(layout=Layout(pp=1, dp=3)))) == grown
    first = Orders(layout=Layout(pp=2, dp=1), keep=tmp_path, leave_at={0: 2, 1: 2})
    assert {report.ended for report in run_world(mains.train_growing, first)} == {"left"}
    then = Orders(layout=Layout(pp=2, dp=1, zero=2), take=tmp_path)
    assert finished(run_world(mains.train_growing, then)) == grown


@pytest.fixture(scope="module")
def streamed() -> set[str]:
    """The digest of one rank that reads a stream."""
    return finished(run_world(mains.train_stream, Orders(layout=Layout(pp=1, dp=1))))


def test_a_stream_gives_one_digest_across_changes_of_world(streamed: set[str], tmp_path: Path) -> None:
    """Three stages, of which the middle one needs no samples; then two replicas go on from its cursor."""
    first = Orders(layout=Layout(pp=3, dp=1), keep=tmp_path, leave_at={0: 2, 1: 2, 2: 2})
    assert {report.ended for report in run_world(mains.train_stream, first)} == {"left"}
    then = Orders(layout=Layout(pp=1, dp=2), take=tmp_path)
    assert finished(run_world(mains.train_stream, then)) == streamed


def test_strata_give_one_digest_across_changes_of_world(tmp_path: Path) -> None:
    """Two stages of one replica, then three replicas."""
    alone = finished(run_world(mains.train_stratified, Orders(layout=Layout(pp=1, dp=1))))
    first = Orders(layout=Layout(pp=2, dp=1), keep=tmp_path, leave_at={0: 2, 1: 2})
    assert {report.ended for report in run_world(mains.train_stratified, first)} == {"left"}
    then = Orders(layout=Layout(pp=1, dp=3), take=tmp_path)
    assert finished(run_world(mains.train_stratified, then)) == alone


def test_a_mixture_that_changes_on_the_way_gives_the_digest_of_one_that_was_to(tmp_path: Path) -> None:
    """Two replicas stop after step 2; three go on with other weights and one more source, as if meant from the start.

    Who goes on without them has the past right, and no state of another past is taken.
    """
    alone = finished(run_world(mains.train_mixture_changed, Orders(layout=Layout(pp=1, dp=1))))
    first = Orders(layout=Layout(pp=1, dp=2), keep=tmp_path, leave_at={0: 2, 1: 2})
    assert {report.ended for report in run_world(mains.train_mixture, first)} == {"left"}
    then = Orders(layout=Layout(pp=1, dp=3), take=tmp_path)
    assert finished(run_world(mains.train_mixture_changed, then)) == alone
    assert finished(run_world(mains.train_mixture, then)) != alone
    assert all("trained on a mixture" in report.error for report in run_world(mains.train_stratified, then))


@pytest.fixture(scope="module")
def packed() -> set[str]:
    """The digest of one rank that trains on packed documents."""
    return finished(run_world(mains.train_packed, Orders(layout=Layout(pp=1, dp=1))))


def test_packed_documents_give_one_digest_across_changes_of_world(packed: set[str], tmp_path: Path) -> None:
    """The contents of a row are settled before anything is cut."""
    first = Orders(layout=Layout(pp=1, dp=2), keep=tmp_path, leave_at={0: 2, 1: 2})
    assert {report.ended for report in run_world(mains.train_packed, first)} == {"left"}
    then = Orders(layout=Layout(pp=2, dp=1), take=tmp_path)
    assert finished(run_world(mains.train_packed, then)) == packed


def test_texts_padded_to_the_longest_give_one_digest_across_changes_of_world(tmp_path: Path) -> None:
    """What `collate` makes, and draws, belongs to a micro-batch; stages pass on activations of its shape."""
    padded = finished(run_world(mains.train_padded, Orders(layout=Layout(pp=1, dp=1))))
    first = Orders(layout=Layout(pp=1, dp=3), keep=tmp_path, leave_at={0: 2, 1: 2, 2: 2})
    assert {report.ended for report in run_world(mains.train_padded, first)} == {"left"}
    then = Orders(layout=Layout(pp=1, dp=2, zero=3), take=tmp_path)
    assert finished(run_world(mains.train_padded, then)) == padded
    assert finished(run_world(mains.train_padded, Orders(layout=Layout(pp=2, dp=1)))) == padded


def test_texts_padded_to_one_length_go_through_stages() -> None:
    """The same bits as without stages."""
    one = finished(run_world(mains.train_padded_alike, Orders(layout=Layout(pp=1, dp=1))))
    assert finished(run_world(mains.train_padded_alike, Orders(layout=Layout(pp=2, dp=1)))) == one


def test_states_have_a_digest_of_samples_only_where_all_ranks_have_the_same() -> None:
    """What a state says beside its tensors is the same on all ranks, or it could not be saved."""
    (same,) = finished(run_world(mains.digest_of_samples, Orders(layout=Layout(pp=1, dp=2))))
    assert same
    first = partial(mains.digest_of_samples, apart=1, first=True)
    assert finished(run_world(first, Orders(layout=Layout(pp=1, dp=2)))) == {""}


def test_a_data_set_that_is_another_one_on_each_rank_is_refused() -> None:
    """As one is whose files are shuffled by each process: some samples would be trained twice, and others never."""
    for report in run_world(partial(mains.digest_of_samples, apart=1), Orders(layout=Layout(pp=1, dp=2))):
        assert report.ended == "raised"
        assert "other samples of the same numbers on rank 1 than on rank 0" in report.error
