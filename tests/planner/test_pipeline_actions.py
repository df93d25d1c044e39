"""Orders of actions: those of torch's own schedule classes, run in a world with simulated peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as of_torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic3d.planner.pipeline_actions import Action, Pass, orders
from elastic3d.planner.schedules import problem, rank_of_stage, stages_of_rank
from elastic3d.values import Layout, Schedule

CLASSES: dict[Schedule, Any] = {
    Schedule.GPIPE: of_torch.ScheduleGPipe,
    Schedule.ONE_F_ONE_B: of_torch.Schedule1F1B,
    Schedule.INTERLEAVED: of_torch.ScheduleInterleaved1F1B,
    Schedule.ZERO_BUBBLE: of_torch.ScheduleInterleavedZeroBubble,
    Schedule.ZBV: of_torch.ScheduleZBVZeroBubble,
    Schedule.DUALPIPE_V: of_torch.ScheduleDualPipeV,
}
PASSES = {"F": Pass.FORWARD, "B": Pass.BACKWARD, "I": Pass.INPUT, "W": Pass.WEIGHT}
CASES = [
    (schedule, pp, rounds, virtual)
    for schedule in Schedule
    for pp in (2, 3, 4, 8)
    for rounds in (2, 4, 5, 8, 12, 16, 17)
    for virtual in (1, 2, 3)
]


@contextmanager
def world(size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def torchs(layout: Layout, rounds: int) -> list[list[Action]]:
    """Return torch's order for a layout, without gaps."""
    assert layout.schedule is not None
    x = torch.zeros(1, 1, device="meta")
    stages = [
        PipelineStage(nn.Identity(), number, layout.stages, torch.device("meta"), input_args=(x,), output_args=(x,))
        for number in stages_of_rank(layout, 0)
    ]
    single = layout.schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B)
    made = CLASSES[layout.schedule](stages[0] if single else stages, rounds, loss_fn=lambda out, target: out.sum())
    order = made._get_pipeline_order() if single else made.pipeline_order
    done = [list(_flat(order[rank])) for rank in range(layout.pp)]
    if layout.schedule is Schedule.ONE_F_ONE_B:
        # torch runs the right order, but its drawing counts the last rank's forwards from 1.
        late = Counter(a.micro_batch for a in done[-1] if a.kind is Pass.FORWARD)
        assert set(late) == set(range(1, rounds + 1))
        done[-1] = [a._replace(micro_batch=a.micro_batch - (a.kind is Pass.FORWARD)) for a in done[-1]]
    return done


def _flat(actions: Any) -> Iterator[Action]:
    for action in actions:
        if action is None:
            continue
        for one in action.sub_actions or (action,):
            if one.computation_type.value in PASSES:
                yield Action(PASSES[one.computation_type.value], one.stage_index, one.microbatch_index)


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_action_orders_match_torchs(pp: int) -> None:
    """For every schedule that a layout may have, ranks do the same in the same order as under torch."""
    seen = set()
    with world(pp):
        for schedule, size, rounds, virtual in CASES:
            layout = Layout(pp=size, dp=1, zero=2, schedule=schedule, virtual=virtual)
            if size == pp and problem(layout, blocks=64, micro_batches=rounds) is None:
                assert orders(schedule, pp=pp, rounds=rounds, virtual=virtual) == torchs(layout, rounds), layout
                seen.add(schedule)
    assert seen == set(Schedule)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_each_micro_batch_is_computed_once(schedule: Schedule) -> None:
    """Every stage goes forward once and back once with every micro-batch, on the rank that has the stage."""
    for _, pp, rounds, virtual in [case for case in CASES if case[0] is schedule]:
        layout = Layout(pp=pp, dp=1, zero=2, schedule=schedule, virtual=virtual)
        if problem(layout, blocks=64, micro_batches=rounds) is not None:
            continue
        done = orders(schedule, pp=pp, rounds=rounds, virtual=virtual)
        halves = {Pass.BACKWARD: [Pass.INPUT, Pass.WEIGHT]}
        counted = [
            Action(k, a.stage, a.micro_batch) for acts in done for a in acts for k in halves.get(a.kind, [a.kind])
        ]
        assert len(counted) == len(set(counted)) == 3 * layout.stages * rounds
        assert all(rank_of_stage(layout, a.stage) == rank for rank, own in enumerate(done) for a in own)
