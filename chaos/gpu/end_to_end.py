"""P7: jobs of torchrun and etcd on the device: kills, joins, drains, and what a step costs."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos.faults.fault import Fault
from chaos.gpu import emulated_device
from chaos.gpu.bench import Bench
from chaos.gpu.gates import GENERATIONS
from chaos.gpu.train_marked import MARKS
from chaos.history.follow import Event, Follower
from chaos.machine.cluster import Cluster, Launch
from chaos.machine.processes import Part, wait_until
from chaos.playing.outcome import Outcome
from chaos.playing.play import play
from chaos.playing.setting import Setting
from chaos.schedules.scenario import parse_drain, parse_join, parse_kill
from chaos.servers.etcd import EtcdServer
from elastic3d.clock import SYSTEM
from elastic3d.devices.cpu import host_memory
from elastic3d.environment import DEVICE, LOG

SCRIPT = Path(__file__).with_name("train_marked.py")
PARTS = ("entered", "opened", "memory back", "groups", "built", "loaded", "stepped")
"""What a trainer notes, in order; not each is there on each device."""

LEAST = 15.0
"""Seconds for one recovery: with fewer left, nothing is killed any more."""

STANDBY = 5.0
"""Seconds to wait for a standby at most."""

ENOUGH = 1 << 30
SMALL = Setting(steps=40, global_batch=6, blocks=2, width=64, context=32, script=SCRIPT)
MIDDLE = Setting(steps=45, global_batch=24, blocks=8, width=512, context=256, script=SCRIPT)


def measure(bench: Bench) -> None:
    """Say the parts of recoveries first, then the three nodes, then the cost of a step."""
    if bench.kind == "emulated":
        os.environ[emulated_device.FOLDER] = tempfile.mkdtemp()
    with EtcdServer(binary=bench.etcd or None) as etcd:
        sizes = {"350M": (1024, 24)} if not bench.small else {"tiny": (64, 2)}
        for name, (width, blocks) in sizes.items():
            with bench.attempting("kill_to_step", model=name):
                _kills(bench, etcd, name, width, blocks, most=3 if bench.small else GENERATIONS, seconds=120.0)
        with bench.attempting("three_nodes"):
            _three_nodes(bench, etcd)
        # Two snapshots of its state, and as many of a neighbour's, must fit the host.
        if not bench.small and host_memory() > 100 * 10**9:
            with bench.attempting("kill_to_step", model="1.5B"):
                _kills(bench, etcd, "1.5B", 1600, 48, most=2, seconds=60.0)
        variants = [(1, ("--snapshot-every=0",)), (1, ()), (2, ()), (2, ("--reduction=fast",))]
        for nodes, options in variants[:1] if bench.small else variants:
            with bench.attempting("step", nodes=nodes, options=" ".join(options)):
                _step(bench, etcd, nodes, options)


def _kills(bench: Bench, etcd: EtcdServer, name: str, width: int, blocks: int, *, most: int, seconds: float) -> None:
    """Kill the trainer of a job of one slot over and over, and split the seconds to its next step."""
    end = SYSTEM.monotonic() + min(seconds, bench.left() - 5)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        marks, events = Path(folder, "marks"), Path(folder, "events")
        events.mkdir()
        out = Path(folder, "out")
        setting = Setting(steps=ENOUGH, blocks=blocks, width=width, context=32 if bench.small else 256, script=SCRIPT)
        given = setting.arguments(store="", events=events, out=out)
        launch = Launch(
            run_id=f"kills-{name}-{os.getpid()}",
            endpoint=etcd.endpoint,
            script=SCRIPT,
            script_args=(*given, "--checkpoint-every=0"),
            # One machine is killed on purpose, over and over: nothing is to be held against it.
            conf={"mode": "resident", "flaps": "0", "damping": "0.2"},
            environment={MARKS: str(marks), DEVICE.name: bench.kind, LOG.name: "debug"},
        )
        cluster = stack.enter_context(Cluster(launch, Path(folder, "nodes")))
        node = cluster.start_node("node0")
        follower, known = Follower(events), list[Event]()
        begun = 0
        try:
            for number in range(most + 1):
                if number and end - SYSTEM.monotonic() < LEAST:
                    break
                trainers = node.processes(Part.TRAINERS) if number else []
                killed = SYSTEM.wall()
                for pid in trainers:
                    os.kill(pid, signal.SIGKILL)

                def stepped(killed: float = killed, trainers: Sequence[int] = trainers) -> bool:
                    return not node.alive or bool(_life(marks, killed, trainers).get("stepped"))

                wait_until(stepped, end - SYSTEM.monotonic(), interval=0.02)
                life = _life(marks, killed, trainers)
                if "stepped" not in life:
                    why = "the job ended" if not node.alive else "no step in time"
                    raise RuntimeError(f"kill {number}: {why}; the end of its log: {cluster.tail('node0', 8)}")
                begun += 1
                known += follower.poll()
                _say(bench, name, number, killed, life, known)
                # A few steps, so that there is a snapshot of this trainer's, and what stands by for the next one.
                wait_until(lambda: False, 0.5)
                ready = functools.partial(_said, node.log, "standby.ready", begun)
                wait_until(ready, STANDBY)
        finally:
            text = "".join(log.read_text(errors="replace") for log in Path(folder, "nodes").rglob("*.log"))
            known += follower.poll()
            short = sum("out of memory" in str(event.fields).lower() for event in known)
            bench.say("generations", begun, model=name)
            bench.say("out_of_memory", max(short, text.lower().count("out of memory")), model=name)
            print(cluster.tail("node0"), file=sys.stderr)


def _said(log: Path, event: str, times: int) -> bool:
    return log.read_text(errors="replace").count(event) >= times


def _life(marks: Path, since: float, before: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Return the first of each part that a trainer which began after the kill has noted."""
    life: dict[str, dict[str, Any]] = {}
    try:
        lines = [json.loads(line) for line in marks.read_text().splitlines()]
    except (OSError, ValueError):
        return life
    lines = [line for line in lines if line["at"] > since and line["pid"] not in before]
    # A measuring trainer enters too, and steps never.
    steppers = {line["pid"] for line in lines if line["part"] == "stepped"}
    for line in lines:
        if line["pid"] in steppers:
            life.setdefault(line["part"], line)
    return life


def _say(
    bench: Bench, name: str, number: int, killed: float, life: dict[str, dict[str, Any]], events: Sequence[Event]
) -> None:
    """Say one recovery and its parts; number 0 is the first start, which nobody killed."""
    detail = {"model": name, "kill": number}
    figure = "kill_to_step" if number else "first_start"
    bench.say(figure, life["stepped"]["at"] - killed, "s", step=life["stepped"]["step"], **detail)
    last = killed
    exits = [event.at for event in events if event.name == "trainer.exited" and event.at > killed]
    if not number:
        begun = {event.name: event.at for event in reversed(events) if event.at < life["entered"]["at"]}
        for event, at in sorted(begun.items(), key=lambda one: one[1]):
            bench.say("start_part", at - killed, "s since the start", event=event, **detail)
    if number and exits:
        bench.say("kill_part", exits[0] - last, "s", part="reaped and noticed", **detail)
        last = exits[0]
    for part in PARTS:
        if part in life:
            bench.say("kill_part", life[part]["at"] - last, "s", part=part, **detail)
            last = life[part]["at"]


def _played(
    bench: Bench, etcd: EtcdServer, nodes: int, options: tuple[str, ...], faults: Sequence[Fault], steps: int = 0
) -> Outcome:
    base = SMALL if bench.small else MIDDLE
    setting = Setting(
        nodes=nodes,
        steps=steps or base.steps,
        global_batch=base.global_batch,
        blocks=base.blocks,
        width=base.width,
        context=base.context,
        script=SCRIPT,
        options=("--checkpoint-every=0", *options),
        patience=120.0,
    )
    joins = nodes + sum(str(fault).startswith("join") for fault in faults)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[MARKS] = str(Path(folder, "marks"))
        os.environ[DEVICE.name] = bench.shared_kind if joins > 1 else bench.kind
        try:
            outcome = play(setting, faults, etcd=etcd, workdir=Path(folder, "job"), name="gpu")
        finally:
            del os.environ[DEVICE.name], os.environ[MARKS]
    if outcome.failure or outcome.digest is None:
        ends = "\n".join(log[-600:] for log in outcome.logs.values())
        print(ends, file=sys.stderr)
        raise RuntimeError(f"{outcome.failure or 'the job has no result'}: {ends[-300:]}")
    return outcome


def _three_nodes(bench: Bench, etcd: EtcdServer) -> None:
    """Kill one of three nodes, let one join, drain one; compare the end with that of one node left alone."""
    # A node is some seconds on its way, and a step of this model on a device takes a few hundredths of one.
    steps, pause = (60, "--pause=0.35") if bench.cuda else (0, "--pause=0")
    faults: list[Fault] = [parse_kill("1@8"), parse_join("@16"), parse_drain("2@50" if bench.cuda else "2@26")]
    group = "a job of torchrun"
    with bench.attempting("digest", group=group, case="one node, undisturbed"):
        quiet = _played(bench, etcd, 1, (), [], steps=steps)
        bench.say("digest", quiet.digest, group=group, case="one node, undisturbed")
    with bench.attempting("digest", group=group, case="three nodes: kill, join, drain"):
        broken = _played(bench, etcd, 3, (pause,), faults, steps=steps)
        if broken.undone:
            raise RuntimeError(f"the job was over before {', '.join(map(str, broken.undone))}")
        if all(view.cause != "join" for view in broken.picture.generations):
            raise RuntimeError("the job was over before the node that joins was there")
        bench.say("digest", broken.digest, group=group, case="three nodes: kill, join, drain")
        for view in broken.picture.generations[1:]:
            detail = {"cause": view.cause, "layout": dict(view.layout), "steps_repeated": view.steps_repeated}
            bench.say("change_to_step", view.seconds_to_first_step, "s", **detail)
            bench.say("change_pause", view.pause, "s beyond a step", **detail)
        bench.say("generations", len(broken.picture.generations), model="three nodes")
        seconds = [step.seconds for step in broken.picture.steps]
        bench.say("step", statistics.median(seconds), "s", nodes=3, options="with faults")


def _step(bench: Bench, etcd: EtcdServer, nodes: int, options: tuple[str, ...]) -> None:
    outcome = _played(bench, etcd, nodes, options, [], steps=15 if bench.small else 40)
    seconds = [step.seconds for step in outcome.picture.steps[5:]]
    bench.say("step", statistics.median(seconds), "s", nodes=nodes, options=" ".join(options) or "snapshots, ordered")
