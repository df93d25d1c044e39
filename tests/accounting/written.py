"""What nodes might have written, for tests: a run is made up event by event, times are seconds since it began."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from elastic3d.accounting.clock_offsets import by_one_clock, clock_offsets
from elastic3d.accounting.goodput import Goodput, goodput, missing
from elastic3d.accounting.node_lives import in_starts, lives
from elastic3d.accounting.node_spans import node_spans
from elastic3d.accounting.past_run import PastRun, past_run
from elastic3d.accounting.recorded_events import RecordedEvent, recorded
from elastic3d.accounting.spans import Span
from elastic3d.membership.stalls import RankStall, RankState
from elastic3d.worker.keeper.silence import Silence
from elastic3d.worker.processes import events as w
from elastic3d.worker.processes.slot import SlotPort

EPOCH = 1_700_000_000
TWO = ["a", "b"]
STALL = RankStall(
    rank=1,
    step=3,
    made=3,
    phase="forward",
    silent=4000,
    allowed_idle=3000,
    allowed_busy=30000,
    beat=10,
    state=RankState.IDLE,
)


class _Slot:
    """A slot whose rank may be followed."""

    def follow(self, trainer: int, on: bool) -> None:
        """Do nothing."""


class Written:
    """Event lines by node, as they are written."""

    def __init__(self, run: str = "made-up") -> None:
        self.run = run
        self.lines: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def say(self, node: str, at: float, name: str, **fields: Any) -> None:
        """Have a node write an event."""
        line = {"run": self.run, "node": node, "slot": 0, **fields, "event": name, "at": EPOCH + at}
        self.lines[node].append(line)

    def seal(
        self, number: int, at: float, cause: str, nodes: Sequence[str], spares: Sequence[str] = (), **fields: Any
    ) -> None:
        """Have all members write that a generation was sealed."""
        for node in (*nodes, *spares):
            about = {"number": number, "cause": cause, "nodes": list(nodes), "spares": list(spares)}
            self.say(node, at, "generation.sealed", **about, leader=nodes[0], **fields)

    def begin(self, number: int, at: float, nodes: Sequence[str], step: int = 0, source: str = "memory") -> None:
        """Have trainers start at a time; they take 1 s to build the model, 0.5 s for others, 0.5 s for the state."""
        for rank, node in enumerate(nodes):
            self.say(node, at, "trainer.started", generation=number, rank=rank, pid=7)
            parts = [["building", 1.0, 0.9], ["awaiting", 0.5, 0.0], ["loading", 0.5, 0.1]]
            about = {"source": source, "step": step, "parts": parts}
            self.say(node, at + 2, "state.restored", generation=number, rank=rank, **about)

    def step(self, number: int, at: float, generation: int, node: str, seconds: float = 1.0, **fields: Any) -> None:
        """Have the node of rank 0 write a step."""
        about = {"step": number, "seconds": seconds, "loss": (4.0).hex(), "samples": [8 * number - 8, 8 * number]}
        self.say(node, at, "step.committed", generation=generation, rank=0, **about, **fields)

    def steps(self, first: int, last: int, after: float, generation: int, node: str) -> float:
        """Have steps of 1 s written, one right after the other; return when the last was made."""
        for number in range(first, last + 1):
            after += 1.0
            self.step(number, after, generation, node)
        return after

    def silent(self, node: str, at: float, generation: int, rank: RankStall) -> None:
        """Have the keeper of a node of one slot hear that its rank is silent."""
        slots = cast(list[SlotPort], [_Slot()])
        keeper = Silence(slots, lambda event: None, emit=lambda name, **fields: self.say(node, at, name, **fields))
        keeper.begin(f"{generation}.7", "1", {0: 11})
        keeper.heard(w.RankSilent(slot=0, trainer=11, over=True, rank=rank))

    def end(self, number: int, at: float, nodes: Sequence[str]) -> None:
        """Have trainers return, and half a second later their nodes."""
        for node in nodes:
            self.say(node, at, "trainer.exited", generation=number, kind="done", step=9)
            self.say(node, at + 0.5, "job.ended", kind="done")

    def sort(self) -> None:
        """Put the lines in the order in which nodes write them."""
        for lines in self.lines.values():
            lines.sort(key=lambda line: line["at"])

    def files(self, folder: Path) -> Path:
        """Write the files."""
        self.sort()
        folder.mkdir(parents=True, exist_ok=True)
        for node, lines in self.lines.items():
            with (folder / f"{node}-0.jsonl").open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
        return folder

    def read(self, *, sort: bool = True) -> tuple[PastRun, Mapping[str, tuple[Span, ...]], Goodput]:
        """Return what is made of it. sort: lines are in the order of their times."""
        if sort:
            self.sort()
        return account({node: [json.dumps(line) for line in lines] for node, lines in self.lines.items()})


def account(lines: Mapping[str, Sequence[str]]) -> tuple[PastRun, Mapping[str, tuple[Span, ...]], Goodput]:
    """Return the run of what each node wrote, its spans and its account."""
    events: dict[str, list[RecordedEvent]] = {}
    for node, mine in lines.items():
        events[node] = [event for line in mine if (event := recorded(line, node)) is not None]
    all_lives = in_starts([life for node, mine in events.items() for life in lives(node, mine)])
    clocks = clock_offsets(all_lives)
    run = past_run(by_one_clock(all_lives, clocks))
    spans = node_spans(run)
    return run, spans, goodput("made-up", run, spans, clocks, remarks=missing(run, clocks))


def spent(account: Goodput, node: str) -> dict[str, float]:
    """Return a node's categories that are not empty, in seconds."""
    mine = next(one for one in account.nodes if one.node == node)
    return {category.value: time / 1e6 for category, time in mine.by_category.items() if time}


def cost(account: Goodput, number: int, start: int = 0) -> dict[str, float]:
    """Return what a generation cost, in node-seconds."""
    one = next(one for one in account.generations if (one.number, one.start) == (number, start))
    return {category.value: time / 1e6 for category, time in one.by_category.items() if time}


def started(nodes: list[str]) -> Written:
    """Return a run whose nodes start at 0, are sealed at 1, and have their state at 3."""
    written = Written()
    for node in nodes:
        written.say(node, 0, "node.started")
        written.say(node, 0.5, "member.joined", incarnation="1")
    written.seal(1, 1, "start", nodes)
    written.begin(1, 1, nodes, source="none")
    return written


def assert_nested(made: list[dict[str, Any]]) -> None:
    """Assert that slices of a thread lie in each other or apart, and that instants belong to their thread."""
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for one in made:
        match one["ph"]:
            case "X":
                assert one["dur"] > 0
                threads.setdefault((one["pid"], one["tid"]), []).append((one["ts"], one["ts"] + one["dur"]))
            case "i":
                assert one["s"] == "t"
            case other:
                assert other == "M"
    for slices in threads.values():
        around: list[int] = []
        for start, stop in slices:
            while around and around[-1] <= start:
                around.pop()
            assert not around or stop <= around[-1]
            around.append(stop)
