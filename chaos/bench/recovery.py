"""How long a death and a join hold a job up: ours beside torchrun's c10d with DCP, the same model on one machine.

One repeat of ours kills one of four nodes and lets a fresh one join; one repeat of the peer kills one of four agents,
never the one that hosts its store, which it would not survive. The peer's timings are tuned by hand (last call 1 s,
keep-alive 1 s) and its shared-store bug is avoided. Kill to next step is the time from SIGKILL to the first step
committed by the next membership, building, loading and that step included.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from chaos.cluster import Cluster, Launch
from chaos.etcd import EtcdServer
from chaos.play import Setting, play
from chaos.processes import free_port, wait_until
from chaos.scenario import Join, Kill, When
from elastic3d.clock import SYSTEM

STEPS, KILL, JOIN = 30, 10, 20
PEER = Path(__file__).with_name("peer_dcp.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Seconds of one repeat. None: the job did not recover in time."""

    kill_to_step: float | None
    steps_repeated: int | None = None
    join_pause: float | None = None
    step: float | None = None


def ours(steps: int = STEPS) -> Recovery:
    """Play one kill and one join."""
    faults = (Kill(node="node1", when=When(step=KILL)), Join(when=When(step=JOIN)))
    with tempfile.TemporaryDirectory() as folder, EtcdServer() as etcd:
        outcome = play(Setting(steps=steps), faults, etcd=etcd, workdir=Path(folder), name="bench")
    views = {view.cause: view for view in outcome.picture.generations}
    seconds = sorted(step.seconds for step in outcome.picture.steps)
    death, join = views.get("death"), views.get("join")
    return Recovery(
        kill_to_step=death.seconds_to_first_step if death else None,
        steps_repeated=death.steps_repeated if death else None,
        join_pause=join.pause if join else None,
        step=seconds[len(seconds) // 2] if seconds else None,
    )


def peer(steps: int = STEPS, patience: float = 150.0) -> Recovery:
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
            wait_until(lambda: _listens(port), patience)
            for number in (1, 2, 3):
                cluster.start_node(f"node{number}")
            if not wait_until(lambda: _newest(out)[0] >= KILL, patience):
                return Recovery(kill_to_step=None)
            killed_at, before = SYSTEM.wall(), _newest(out)[0]
            # torchrun leaves a killed agent's workers alive; the loss of the whole node is measured.
            workers = cluster.node("node2").keepers()
            cluster.kill_node("node2")
            for pid in workers:
                os.kill(pid, signal.SIGKILL)
            if not wait_until(lambda: _newest(out)[1] > killed_at + 0.2 and _newest(out)[2] == 3, patience):
                return Recovery(kill_to_step=None)
            step, at, _ = _first_after(out, killed_at)
            return Recovery(kill_to_step=at - killed_at, steps_repeated=max(0, before - step + 1))


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _lines(out: Path) -> list[tuple[int, float, int]]:
    """Return (step, wall time, world) of every step rank 0 made, in time's order."""
    lines = []
    for path in out.glob("rank0-*.jsonl"):
        for line in path.read_text().splitlines():
            try:
                data = json.loads(line)
            except ValueError:
                continue
            lines.append((int(data["step"]), float(data["at"]), int(data["world"])))
    return sorted(lines, key=lambda line: line[1])


def _newest(out: Path) -> tuple[int, float, int]:
    return (_lines(out) or [(0, 0.0, 0)])[-1]


def _first_after(out: Path, moment: float) -> tuple[int, float, int]:
    return next(line for line in _lines(out) if line[1] > moment and line[2] == 3)
