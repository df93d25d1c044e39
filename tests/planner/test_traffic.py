"""Gradients between nodes are counted by the layout, exchange by exchange, or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic3d.planner.passing import passed_on
from elastic3d.planner.traffic import GradientTraffic, gradient_traffic
from elastic3d.values import Layout, ModelProfile
from tests.planner.machines import profile

MODEL = profile(blocks=8, micro_batches=16)
"""12 M parameters in fp32."""

BYTES = 12e6 * 4


def by_exchanges(layout: Layout, model: ModelProfile, slots: int) -> tuple[float, float]:
    """Return bytes a turn and a step, by going through all that each rank sends, as `reduction/fold.py` does, or
    `reduction/passed.py`."""
    dp, shards, replicas = layout.dp, layout.shards, layout.replicas
    turn = step = 0.0
    if passed_on(layout):
        for rank in range(dp):
            apart = [other for other in range(dp) if rank // slots != other // slots]
            turn += BYTES / shards * sum(rank // shards == other // shards for other in apart)
            turn += BYTES / shards * ((rank + shards) % dp in apart)
            if rank >= dp - shards:
                # `Passing.spread`, instead of going on to the first replica.
                step += BYTES / shards * sum(rank % shards == other % shards for other in apart)
                step -= BYTES / shards * ((rank + shards) % dp in apart)
        return turn, step
    for rank in range(dp):
        for other in range(dp):
            if rank // slots != other // slots:
                turn += BYTES / dp
                # `Fold._gather`: from a way of a shard's sum to each rank that holds the shard.
                step += BYTES / dp * (replicas > 1 and other % shards == rank // replicas)
    return turn, step


@pytest.mark.parametrize("slots", [1, 2, 4, 8])
@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_what_is_sent_is_what_each_rank_sends_to_each_other_node(replicas: int, slots: int) -> None:
    """In one stage, whatever a node has of ranks and however the state is replicated."""
    layout = Layout(pp=1, dp=8, replicas=replicas)
    got = gradient_traffic(layout, MODEL, slots)
    assert (got.turn, got.step) == pytest.approx(by_exchanges(layout, MODEL, slots))
    assert got.turn_samples == 8


def test_a_replica_on_each_node_sends_what_the_reductions_own_account_says() -> None:
    """F / S a turn of each rank, and once more of the last replica: see `parallel/reduction/ordered.py`. Pieces that
    all go to their owners would be G * (d - S) / d of each."""
    got = gradient_traffic(Layout(pp=1, dp=32, replicas=4), MODEL, slots=8)
    assert got.turn == pytest.approx(32 * BYTES / 8)
    assert got.step == pytest.approx(8 * (3 - 1) * BYTES / 8)
    assert got.of_step(64) == 2 * got.turn + got.step
    assert got.of_step(65) == 3 * got.turn + got.step
    whole = gradient_traffic(Layout(pp=1, dp=32), MODEL, slots=8)
    assert whole.turn == pytest.approx(32 * BYTES * (32 - 8) / 32)
    assert got.turn * 6 == pytest.approx(whole.turn)


def test_stages_and_tensor_parallel_ranks_send_their_own_parts() -> None:
    """Together as much as one stage, of what is not cut once for each tp rank; nothing within a node."""
    one = gradient_traffic(Layout(pp=1, dp=4), MODEL, slots=1)
    assert gradient_traffic(Layout(pp=2, dp=4), MODEL, slots=1).turn == pytest.approx(one.turn)
    assert gradient_traffic(Layout(pp=1, dp=4, tp=2), MODEL, slots=2).turn == pytest.approx(one.turn * (8 + 2 * 4) / 12)
    assert gradient_traffic(Layout(pp=2, dp=4), MODEL, slots=4).turn == 0
    assert gradient_traffic(Layout(pp=4, dp=1), MODEL, slots=1) == GradientTraffic()


def test_pieces_are_as_wide_as_they_are_sent() -> None:
    """In 16 bits where they were computed so, once for a leaf of several micro-batches, and then in 32."""
    layout, half = Layout(pp=1, dp=4), replace(MODEL, compute_bytes=2)
    full = gradient_traffic(layout, MODEL, slots=1)
    assert gradient_traffic(layout, half, slots=1).turn == full.turn / 2
    leaves = gradient_traffic(layout, replace(half, leaf=2, micro_batch=3), slots=1)
    assert (leaves.turn, leaves.turn_samples) == (full.turn, 4 * 2 * 3)


def test_what_is_not_known_is_said() -> None:
    """And is 0, which no step adds to."""
    for model, layout in (
        (replace(MODEL, reduction="fast"), Layout(pp=1, dp=4)),
        (MODEL, Layout(pp=1, dp=4, zero=2, shares=(1, 1, 1, 2))),
        (replace(MODEL, experts=4), Layout(pp=1, dp=4)),
    ):
        got = gradient_traffic(layout, model, slots=1)
        assert got.why
        assert got.of_step(999) == 0


def test_thousands_of_ranks_are_counted_at_once() -> None:
    """The keeper does so at the beginning of a generation."""
    got = gradient_traffic(Layout(pp=1, dp=16384, replicas=2048), MODEL, slots=8)
    assert got.turn == pytest.approx(16384 * BYTES / 8)
    got = gradient_traffic(Layout(pp=1, dp=16384), MODEL, slots=8)
    assert got.turn == pytest.approx(16384 * BYTES * (1 - 8 / 16384))
