"""What it costs a node to be seen: its first keeper's processor time for a step's events, account, metrics and curves.

All of it is done by keepers, beside training, so that a step is longer by at most what it takes of a processor. The
product's own parts take the records of steps, as they do in a job: the event file is written, the account is the
leader's, metrics are scraped as often as by a Prometheus that asks every `SCRAPE` seconds, and two trackers write. A
configuration more is measured at each turn, in turns, so that other load affects all of them; what is reported is the
processor time of the whole process, threads that write included, less that of the bare loop.
"""

from __future__ import annotations

import statistics
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from chaos.bench.spread import spread
from elastic3d.clock import processor_seconds
from elastic3d.health import sheet
from elastic3d.health.sheet import StepSheet
from elastic3d.membership import events as m
from elastic3d.membership.policy import Policy
from elastic3d.metrics.address import metrics_address
from elastic3d.port import StateRestored, StepRecord
from elastic3d.rendezvous.settings import Settings
from elastic3d.trackers.choice import chosen
from elastic3d.values import Cause, Generation, Layout, Node, Slot
from elastic3d.worker.journal import Journal
from elastic3d.worker.keeper.curves import Curves
from elastic3d.worker.keeper.goodput import LiveGoodput
from elastic3d.worker.keeper.injected import NodeProcesses
from elastic3d.worker.keeper.node_metrics import LiveNode, NodeMetrics
from elastic3d.worker.keeper.step_waits import WaitsReporter
from elastic3d.worker.keeper.trainer_group import TrainerGroup
from elastic3d.worker.processes import events as w

STEP = 0.5
"""Seconds of the step that costs are shares of."""

BAR = 0.002
"""Share of a step that being seen may cost."""

SCRAPE = 15.0
"""Seconds from one scrape to the next."""

STEPS = 960
"""Steps of one measurement by default: whole rows, and whole scrapes."""

WORLDS = ((2, 1), (16, 8), (128, 8))
"""Nodes, and slots of each."""

PARTS = ("nothing", "events", "account", "metrics", "curves")
"""Each with all before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeeingCost:
    """Microseconds of a step, by part with all before it, in each turn; of a world of so many nodes and ranks."""

    nodes: int
    ranks: int
    micros: dict[str, tuple[float, ...]]

    @property
    def share(self) -> float:
        """Share of a step that all of it takes, by the medians."""
        own = statistics.median(self.micros[PARTS[-1]]) - statistics.median(self.micros[PARTS[0]])
        return own / 1e6 / STEP


def measure(
    repeats: int,
    *,
    worlds: Sequence[tuple[int, int]] = WORLDS,
    steps: int = STEPS,
    say: Callable[[str], None] = lambda text: None,
) -> list[SeeingCost]:
    """Measure all worlds, `repeats` times each, three at least."""
    costs = []
    for nodes, slots in worlds:
        say(f"seeing: {nodes} nodes of {slots} slots")
        micros: dict[str, list[float]] = {part: [] for part in PARTS}
        for _ in range(max(3, repeats)):
            for count, part in enumerate(PARTS):
                with tempfile.TemporaryDirectory() as folder:
                    micros[part].append(_turn(Path(folder), nodes, slots, count, steps))
        costs.append(
            SeeingCost(nodes=nodes, ranks=nodes * slots, micros={part: tuple(took) for part, took in micros.items()})
        )
    return costs


def table(costs: list[SeeingCost]) -> Table:
    """Return what each part takes with all before it, and the share of a step."""
    shown = Table("ranks", *(f"{part}, µs per step" for part in PARTS), f"of a step of {STEP:g} s")
    shown.title = f"seeing: processor time of a keeper, a scrape each {SCRAPE:g} s"
    for cost in costs:
        shown.add_row(
            str(cost.ranks), *(spread(cost.micros[part], "", 0) for part in PARTS), f"{100 * cost.share:.3f} %"
        )
    return shown


def passed(costs: list[SeeingCost]) -> bool:
    """Return whether all worlds are below the bar."""
    return all(cost.share < BAR for cost in costs)


def _formed(nodes: int, slots: int) -> Generation:
    places = tuple(Slot(tile_port=1) for _ in range(slots))
    names = tuple(Node(name=f"node{number}", incarnation="1", address="h", slots=places) for number in range(nodes))
    return Generation(number=1, cause=Cause.START, nodes=names, layout=Layout(pp=1, dp=nodes, tp=slots, zero=2))


def _record(step: int, rows: list[sheet.Row], world: int) -> StepRecord:
    sheets = tuple(rows[rank] for rank in sheet.speakers(step, world))
    return StepRecord(
        generation=1, step=step, loss=2.5, gradient_norm=1.0, seconds=STEP, safe_step=step - 1,
        etcd_away_everywhere=False, samples=(8 * step - 8, 8 * step), sample_sum=step, until=1 << 20, sheets=sheets,
        data=0.01, copy=0.01, tokens=8192,
    )  # fmt: skip


def _turn(folder: Path, nodes: int, slots: int, count: int, steps: int) -> float:
    """Return the microseconds of processor time that a step takes with the first `count` parts beside the loop."""
    generation = _formed(nodes, slots)
    me, world = generation.nodes[0], nodes * slots
    group = TrainerGroup(generation=generation, first_rank=0, trainers={slot: slot for slot in range(slots)})
    settings = Settings(endpoints="", run_id="run", mode="resident", node=me.name, address="127.0.0.1", policy=Policy())
    goodput = LiveGoodput(me.name, lambda detail: None) if count > 1 else None
    metrics = NodeMetrics(settings, metrics_address("127.0.0.1:0")) if count > 2 else None
    served: dict[str, str] = {}

    def observe(event: str, fields: Any) -> None:
        served.update(fields if event == "metrics.served" else {})
        if goodput is not None:
            goodput.observe(event, fields)
        if metrics is not None:
            metrics.observe(event, fields)

    journal = Journal(str(folder / "events") if count else None, "run", me.name, observe=observe)
    waits = WaitsReporter(journal.emit, goodput.waited) if goodput is not None else None
    curves = Curves(_trackers(folder) if count > 3 else (), run_id="run", emit=journal.emit)
    if metrics is not None:
        metrics.serve(
            LiveNode(
                pulse=lambda: None,
                processes=lambda: NodeProcesses(agent="", keepers=(), trainers={}),
                awaited=lambda: 0,
                answers=lambda: None,
                goodput=goodput.seconds if goodput is not None else dict,
            ),
            journal.emit,
        )
    try:
        journal.noted(m.GenerationPut(generation=generation, revision=1))
        if goodput is not None:
            goodput.noted(m.GenerationPut(generation=generation, revision=1))
            goodput.resume(None)
        curves.began(generation, me)
        curves.restored(StateRestored(source="none", step=0, generation=0))
        rows = [StepSheet(work=1.0, rounds=4.0, forward=0.1, backward=0.2, data=0.01, wait_dp=0.1).row] * world
        records = [_record(step, rows, world) for step in range(1, steps + 1)]
        before = processor_seconds()
        for record in records:
            if count:
                journal.trainer(w.StepFinished(slot=0, trainer=0, record=record), 1, 0)
            if goodput is not None and waits is not None:
                goodput.stepped(record)
                waits.stepped(record, group)
                if record.step % int(10 / STEP) == 0:
                    goodput.due(last=True)
            if metrics is not None:
                metrics.stepped(record, group)
                if record.step % int(SCRAPE / STEP) == 0:
                    _scrape(str(served["address"]))
            if count > 3:
                curves.stepped(record, generation)
        journal.flush(30.0)
        curves.finish()
        curves.wait()
        return 1e6 * (processor_seconds() - before) / steps
    finally:
        if metrics is not None:
            metrics.close()
        journal.close()


def _trackers(folder: Path) -> Any:
    return chosen([f"csv:{folder / 'curves.csv'}", f"jsonl:{folder / 'curves.jsonl'}"])


def _scrape(address: str) -> None:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        answer.read()
