"""How much host memory a node needs: what its slots' buffers come to hold, and the rest."""

from __future__ import annotations

import dataclasses

import pytest

from elastic3d.admission.host_memory import AGENT, CONTEXT, SLOT, host_memory
from elastic3d.devices import PINNED
from elastic3d.planner.described import Optimizer, Training, describe
from elastic3d.planner.devices import Number
from elastic3d.planner.shapes import RecomputedShare, shape_named
from elastic3d.snapshots.holdings import HOME_BUFFERS
from elastic3d.values import Layout, ModelProfile

GIB = 1 << 30


def profile(optimizer: Optimizer = Optimizer.ADAMW) -> ModelProfile:
    training = Training(
        global_batch=512,
        micro_batch=1,
        number=Number.BF16,
        optimizer=optimizer,
        recompute=RecomputedShare("none"),
    )
    return describe(shape_named("llama-7b"), training)


def test_snapshots_are_every_buffer_of_every_slot() -> None:
    """Parameters and both moments in fp32, spread over all ranks; on one stage their sum is the model's."""
    model = profile()
    needed = host_memory(Layout(pp=1, dp=16, tp=1), model, nodes=2, slots=8, device_bytes=None)
    state = model.parameters * 12 / 2
    assert needed.snapshots == pytest.approx(HOME_BUFFERS * state, rel=1e-6)
    assert needed.replicas == needed.snapshots
    assert needed.restoring == pytest.approx(state + 8 * 2 * PINNED, rel=1e-6)
    assert needed.processes == AGENT + 8 * (SLOT + CONTEXT)
    assert needed.training == 0


def test_a_node_alone_keeps_nothing_for_a_buddy() -> None:
    """And all of the state is its own."""
    alone = host_memory(Layout(pp=1, dp=8, tp=1), profile(), nodes=1, slots=8, device_bytes=None)
    both = host_memory(Layout(pp=1, dp=16, tp=1), profile(), nodes=2, slots=8, device_bytes=None)
    assert alone.replicas == 0
    assert alone.snapshots == pytest.approx(2 * both.snapshots, rel=1e-6)


def test_the_fullest_stage_counts() -> None:
    """With the embedding at one end and the output at the other, no node has less than the mean."""
    model = profile()
    cut = host_memory(Layout(pp=2, dp=8, tp=1), model, nodes=2, slots=8, device_bytes=None)
    assert cut.snapshots >= HOME_BUFFERS * model.parameters * 12 / 2


def test_replicas_of_the_state_are_counted() -> None:
    """With two copies of the sharded state, each rank holds twice as much."""
    layout = Layout(pp=1, dp=16, tp=1)
    once = host_memory(layout, profile(), nodes=2, slots=8, device_bytes=None)
    twice = host_memory(dataclasses.replace(layout, replicas=2), profile(), nodes=2, slots=8, device_bytes=None)
    assert twice.snapshots == pytest.approx(2 * once.snapshots, rel=1e-6)


def test_an_optimizer_without_state_takes_a_third() -> None:
    """SGD keeps parameters only."""
    layout = Layout(pp=1, dp=16, tp=1)
    adam = host_memory(layout, profile(), nodes=2, slots=8, device_bytes=None)
    sgd = host_memory(layout, profile(Optimizer.SGD), nodes=2, slots=8, device_bytes=None)
    assert sgd.snapshots == pytest.approx(adam.snapshots / 3, rel=1e-6)


def test_on_cpus_training_itself_is_in_it() -> None:
    """Nothing is on its way to a device."""
    needed = host_memory(Layout(pp=1, dp=4, tp=1), profile(), nodes=2, slots=2, device_bytes=3 * GIB)
    assert needed.training == 6 * GIB
    assert needed.restoring == 0
    assert needed.processes == AGENT + 2 * SLOT


def test_the_limit_is_the_sum_and_a_tenth_in_whole_gib() -> None:
    """As Kubernetes writes it."""
    needed = host_memory(Layout(pp=1, dp=16, tp=1), profile(), nodes=2, slots=8, device_bytes=None)
    parts = (needed.snapshots, needed.replicas, needed.restoring, needed.training, needed.processes)
    assert needed.total == sum(parts)
    assert needed.total * 1.1 <= needed.limit < needed.total * 1.1 + GIB
    assert needed.quantity == f"{needed.limit // GIB}Gi"
