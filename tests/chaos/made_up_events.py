"""Events of made-up jobs, for tests of code that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chaos.faults.fault import Fault
from chaos.history.follow import Event, picture
from chaos.playing.outcome import Outcome
from chaos.playing.setting import Setting

BATCH = 16


def event(
    name: str, at: float, *, generation: int = 0, node: str = "node0", rank: int | None = None, **fields: Any
) -> Event:
    return Event(name=name, at=at, generation=generation, node=node, slot=0, rank=rank, fields=fields)


def outcome_of(events: Sequence[Event], made: Sequence[tuple[Fault, str]], at: float, *, steps: int) -> Outcome:
    """Return a job of these events to which faults were made at one time, each to a node or to "" for none."""
    return Outcome(
        setting=Setting(steps=steps, global_batch=BATCH),
        faults=tuple(fault for fault, _ in made),
        picture=picture(events),
        digest="abc",
        exit_codes={},
        killed=(),
        undone=(),
        leftovers=(),
        made=tuple((fault, at) for fault, _ in made),
        hit=tuple(node for _, node in made),
        events=tuple(events),
    )


def sealed(number: int, at: float, cause: str, nodes: list[str], spares: tuple[str, ...] = ()) -> Event:
    layout = {"pp": 2, "dp": len(nodes) // 2, "tp": 1, "zero": 3} if len(nodes) % 2 == 0 else None
    layout = layout or {"pp": 1, "dp": len(nodes), "tp": 1, "zero": 3}
    return event(
        "generation.sealed",
        at,
        number=number,
        cause=cause,
        nodes=nodes,
        spares=list(spares),
        layout=layout,
        leader=nodes[-1],
        detail="",
    )


def restored(generation: int, at: float, source: str, step: int, loss: float | None = None) -> Event:
    known = {} if loss is None else {"loss": loss.hex()}
    return event("state.restored", at, generation=generation, rank=0, source=source, step=step, seconds=None, **known)


def step(number: int, at: float, generation: int, *, loss: float | None = None) -> Event:
    return event(
        "step.committed",
        at,
        generation=generation,
        rank=0,
        step=number,
        loss=(5.0 - number / 10 if loss is None else loss).hex(),
        gradient_norm=1.0,
        seconds=0.4,
        safe_step=number - 1,
        samples=[(number - 1) * BATCH, number * BATCH],
        sample_sum=number * 7,
    )


def a_step_that_nobody_told_of(loss: float) -> list[Event]:
    """Return six steps: rank 0 ends before it tells of step 2, from which the next generation goes on."""
    two = ["node0", "node1"]
    return [
        sealed(1, 10.0, "start", two),
        step(1, 11.0, 1),
        sealed(2, 12.0, "failure", two),
        restored(2, 12.5, "memory", 2, loss),
        *(step(number, 10.0 + number, 2) for number in range(3, 7)),
    ]


def a_death_and_a_join() -> list[Event]:
    """Return six steps: node1 dies after step 3, which is repeated; node4 joins before step 5."""
    four = ["node0", "node1", "node2", "node3"]
    return [
        sealed(1, 10.0, "start", four),
        restored(1, 10.5, "none", 0),
        step(1, 11.0, 1),
        step(2, 11.4, 1),
        step(3, 11.8, 1),
        event("peer.lost", 12.05, peer="node1", evidence="refused"),
        sealed(2, 12.1, "death", ["node0", "node2", "node3"]),
        restored(2, 12.6, "memory", 2),
        step(3, 13.0, 2),
        step(4, 13.4, 2),
        event("member.joined", 13.5, node="node4", incarnation="x"),
        sealed(3, 13.9, "join", ["node0", "node2", "node3", "node4"]),
        restored(3, 14.0, "memory", 4),
        step(5, 14.3, 3),
        step(6, 14.7, 3),
    ]
