"""How long a death and a join hold a job up, and in which part of it: ours beside two peers, one model, one machine.

One repeat of ours kills one of four nodes and lets a fresh one join; one repeat of a peer kills one of four agents.
Kill to next step is the time from SIGKILL to the first step committed by the next membership, building, loading and
that step included.

The peers are torchrun's c10d with DCP, its timings tuned by hand (last call 1 s, keep-alive 1 s) and its shared-store
bug avoided, where never the agent dies that hosts its store, since the job would not survive it; and torchft, where pip
can install it, whose replicas each hold the whole model, also tuned.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.table import Table

from chaos.bench import recovery_parts
from chaos.bench.forming import install
from chaos.bench.recovery_parts import Recovered, Took
from chaos.bench.spread import spread
from chaos.faults.moment import When
from chaos.faults.orders import Join
from chaos.faults.process import Kill
from chaos.history.follow import Follower
from chaos.machine.cluster import Cluster, Launch
from chaos.machine.processes import MARK, end_all, free_port, leashed, wait_until
from chaos.playing.play import play
from chaos.playing.setting import Setting
from chaos.servers.etcd import EtcdServer
from elastic3d.clock import SYSTEM

STEPS, KILL, JOIN = 30, 10, 20
PATIENCE = 150.0
"""Seconds for each thing that is waited for."""

PEER = Path(__file__).with_name("peer_dcp.py")
TORCHFT = Path(__file__).with_name("peer_torchft.py")
TORCHFT_PACKAGES = (("--no-deps", "torchft==0.2.0"), ("opentelemetry-exporter-otlp-proto-http",))
"""What pip is to install for torchft, each by a command: without its dependencies, of which torch is there already."""


@dataclass(slots=True)
class Repeats:
    """The repeats of all systems; None where one did not go on in time. missing: why torchft is not measured."""

    deaths: list[Recovered | None] = field(default_factory=list)
    joins: list[Recovered | None] = field(default_factory=list)
    torchrun: list[Recovered | None] = field(default_factory=list)
    torchft: list[Recovered | None] = field(default_factory=list)
    missing: str = ""

    def tables(self) -> list[Table]:
        """Return the parts of a death and of a join."""
        title = "torchrun c10d + DCP, tuned"
        columns = {"elastic3d": self.deaths, title: self.torchrun}
        if self.torchft:
            columns["torchft, tuned"] = self.torchft
        deaths = recovery_parts.table("four nodes, one killed: to the end of the next step", columns)
        repeated = ([r.steps_repeated for r in column if r is not None] for column in columns.values())
        deaths.add_row("steps repeated", *(spread(steps, "", 0) if steps else "" for steps in repeated))
        return [deaths, recovery_parts.table("a node joins: from the last step to the next", {"elastic3d": self.joins})]

    def as_json(self) -> dict[str, Any]:
        """Return all repeats."""
        return asdict(self)


def measure(repeats: int, say: Callable[[str], None] = lambda text: None) -> Repeats:
    """Measure all systems in turns, so that other load affects them alike."""
    made = Repeats()
    with tempfile.TemporaryDirectory(prefix="elastic3d-bench-") as folder:
        packages = Path(folder, "torchft")
        made.missing = next(filter(None, (install(wanted, packages) for wanted in TORCHFT_PACKAGES)), "")
        if made.missing:
            say(f"torchft is not measured: {made.missing}")
        for number in range(repeats):
            death, join = ours()
            made.deaths.append(death)
            made.joins.append(join)
            say(f"recovery {number + 1} of {repeats}: elastic3d: {_said(death)}; a join: {_said(join)}")
            made.torchrun.append(peer())
            say(f"recovery {number + 1} of {repeats}: torchrun: {_said(made.torchrun[-1])}")
            if not made.missing:
                made.torchft.append(torchft(packages))
                say(f"recovery {number + 1} of {repeats}: torchft: {_said(made.torchft[-1])}")
    return made


def _said(one: Recovered | None) -> str:
    return "none" if one is None else f"{one.seconds:.2f} s, {one.beyond:.2f} s beyond a step"


def ours(steps: int = STEPS) -> tuple[Recovered | None, Recovered | None]:
    """Play one kill and one join; return both."""
    faults = (Kill(node="node1", when=When(step=KILL)), Join(when=When(step=JOIN)))
    with tempfile.TemporaryDirectory() as folder, EtcdServer() as etcd:
        outcome = play(Setting(steps=steps), faults, etcd=etcd, workdir=Path(folder), name="bench")
        events = Follower(Path(folder) / "events").poll()
    killed_at = next((at for at, text in outcome.picture.news if text.startswith("chaos: kill")), None)
    views = {view.cause: view for view in outcome.picture.generations}
    death = None if killed_at is None else recovery_parts.of_death(events, killed_at)
    repeated = views["death"].steps_repeated if "death" in views else None
    return _with_repeated(death, repeated), recovery_parts.of_join(events)


def _with_repeated(one: Recovered | None, steps: int | None) -> Recovered | None:
    if one is None:
        return None
    return Recovered(parts=one.parts, step=one.step, step_processor=one.step_processor, steps_repeated=steps)


def peer(steps: int = 60) -> Recovered | None:
    """Kill one agent of torchrun's c10d and wait for the next step of the others."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        out.mkdir()
        port = free_port()
        launch = Launch(
            run_id="bench",
            endpoint=f"127.0.0.1:{port}",
            script=PEER,
            script_args=(f"--out={out}", f"--steps={steps}"),
            min_nodes=2,
            max_nodes=4,
            backend="c10d",
            conf={"last_call_timeout": "1", "keep_alive_interval": "1", "keep_alive_max_attempt": "2"},
            max_restarts=10,
            environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )
        with Cluster(launch, Path(folder)) as cluster:
            # The first agent hosts the store, and must not be the victim.
            cluster.start_node("node0")
            wait_until(lambda: _listens(port), PATIENCE)
            for number in (1, 2, 3):
                cluster.start_node(f"node{number}")
            if not wait_until(lambda: _newest(out, 4).step >= KILL, PATIENCE):
                return None
            killed_at, before = SYSTEM.wall(), _newest(out)
            # torchrun leaves a killed agent's workers alive; the loss of the whole node is measured.
            workers = cluster.node("node2").keepers()
            cluster.kill_node("node2")
            for pid in workers:
                os.kill(pid, signal.SIGKILL)
            if not wait_until(lambda: _first(out, killed_at + 0.2, 3) is not None, PATIENCE):
                return None
            first = _first(out, killed_at + 0.2, 3)
            assert first is not None
            marks = [mark for file in out.glob("marks-*.jsonl") for mark in _json_lines(file)]
            marks = sorted((mark for mark in marks if mark["at"] > killed_at), key=lambda mark: float(mark["at"]))
            marks.append({"name": recovery_parts.FIRST_STEP, "at": first.at})
            recovered = recovery_parts.of_peer(marks, killed_at, _median_step(out, 4))
            return _with_repeated(recovered, max(0, before.step - first.step + 1))


def torchft(packages: Path, steps: int = 1000) -> Recovered | None:
    """Kill one of four replicas of torchft and wait for the next step of the others."""
    with tempfile.TemporaryDirectory() as folder, _lighthouse(packages) as (address, start):
        out = Path(folder)
        replicas = [
            start((f"--out={out}", f"--steps={steps}", f"--lighthouse={address}", f"--replica={number}"))
            for number in range(4)
        ]
        if not wait_until(lambda: _newest(out, 4).step >= KILL, PATIENCE):
            return None
        killed_at, before = SYSTEM.wall(), _newest(out)
        replicas[1].kill()
        if not wait_until(lambda: _first(out, killed_at, 3) is not None, PATIENCE):
            return None
        first = _first(out, killed_at, 3)
        assert first is not None
        took = Took(name=recovery_parts.FIRST_STEP, seconds=first.at - killed_at)
        recovered = Recovered(parts=(took,), step=_median_step(out, 4))
        return _with_repeated(recovered, max(0, before.step - first.step + 1))


@contextlib.contextmanager
def _lighthouse(packages: Path) -> Iterator[tuple[str, Callable[[Sequence[str]], subprocess.Popen[str]]]]:
    """Run torchft's lighthouse; yield its address and what starts a replica. All end with the block."""
    mark = uuid.uuid4().hex
    path = [str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}
    module = f"{__package__}.{TORCHFT.stem}"

    def start(arguments: Sequence[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            leashed([sys.executable, "-m", module, *arguments]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if "--serve" in arguments else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    server = start(["--serve"])
    try:
        assert server.stdout is not None
        yield server.stdout.readline().strip(), start
    finally:
        end_all(mark)
        server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@dataclass(frozen=True, slots=True)
class _Step:
    """One line of a peer's file."""

    step: int
    at: float
    world: int


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # not all of it is written yet
            continue


def _lines(out: Path, world: int | None = None) -> list[_Step]:
    """Return the steps that a peer made, of all its processes, in time's order; those of one world's size."""
    files = [*out.glob("rank0-*.jsonl"), *out.glob("steps-*.jsonl")]
    lines = [_Step(int(d["step"]), float(d["at"]), int(d["world"])) for file in files for d in _json_lines(file)]
    return sorted((line for line in lines if world in (None, line.world)), key=lambda line: line.at)


def _newest(out: Path, world: int | None = None) -> _Step:
    return (_lines(out, world) or [_Step(0, 0.0, 0)])[-1]


def _first(out: Path, moment: float, world: int) -> _Step | None:
    return next((line for line in _lines(out, world) if line.at > moment), None)


def _median_step(out: Path, world: int) -> float:
    """Return the median time between two steps of one process."""
    times: dict[int, float] = {}
    for line in _lines(out, world):
        times.setdefault(line.step, line.at)
    gaps = [times[later] - times[step] for step, later in pairwise(sorted(times)) if later == step + 1]
    return statistics.median(gaps) if gaps else 0.0
