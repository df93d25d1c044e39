"""How soon a rank that hangs is found, and who is named: ours beside two peers, one model, one machine.

A rank is stopped, leaves out a collective, or spins. Of each peer the settings as shipped and those tuned by hand are
tried, `PATIENCE` seconds long: most are shipped to wait for far longer. A peer that cannot be installed, or cannot do
it, is reported with its own error.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from chaos.bench.forming import install
from chaos.bench.peer_hangs import WORLD
from chaos.machine.cluster import started_by
from chaos.machine.preloaded import PreloadedServer
from chaos.machine.processes import MARK, end_all, leashed, wait_until
from chaos.playing.play import play
from chaos.score.series import APART, FIRST, Series, job, read_series, steps_of
from chaos.score.trials import Trial
from chaos.servers.etcd import EtcdServer
from elastic3d.clock import SYSTEM
from elastic3d.values import Layout

PATIENCE = 60.0
"""Seconds for which a verdict is waited for."""

START = 180.0
TOGETHER = 2.0
"""Seconds after the first within which ranks that are named are named together."""

CULPRIT, AT = 2, 8
FAULTS = ("stop", "skip", "spin")
PACKAGES = (
    ("--no-deps", "nvidia-resiliency-ext"),
    ("defusedxml", "nvidia-ml-py", "pynvml", "packaging", "psutil", "pyyaml"),
)
"""What pip is to install for NVIDIA's, each by a command: torch is there already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a system made of a fault. seconds: from the fault to it, None for none. named: the ranks.

    said: in its own words; or why there is none.
    """

    system: str
    fault: str
    seconds: float | None
    named: tuple[int, ...]
    said: str = ""

    def __str__(self) -> str:
        if self.seconds is None:
            return self.said or f"nothing within {PATIENCE:.0f} s"
        who = "nobody"
        if self.named == (CULPRIT,):
            who = "the culprit"
        elif self.named:
            who = "all ranks" if len(self.named) == WORLD else f"ranks {', '.join(map(str, self.named))}"
        return f"{self.seconds:.1f} s, {who}"


def measure(say: Callable[[str], None] = lambda text: None, faults: Sequence[str] = FAULTS) -> list[Verdict]:
    """Try every fault on every system, and return what each of them made of it."""
    made = ours(faults)
    for one in made:
        say(f"hang {one.fault}: {one.system}: {one}")
    with tempfile.TemporaryDirectory(prefix="elastic3d-bench-") as folder:
        packages = Path(folder, "packages")
        missing = next(filter(None, (install(wanted, packages) for wanted in PACKAGES)), "")
        for system, tuned in (("nvidia", False), ("nvidia", True), ("recorder", False), ("recorder", True)):
            title = f"{TITLES[system]}, {'tuned' if tuned else 'as shipped'}"
            for fault in faults:
                if system == "nvidia" and missing:
                    made.append(Verdict(system=title, fault=fault, seconds=None, named=(), said=missing))
                else:
                    made.append(peer(system, fault, tuned=tuned, packages=packages, title=title))
                say(f"hang {fault}: {made[-1].system}: {made[-1]}")
    return made


TITLES = {"nvidia": "NVIDIA Resiliency Extension", "recorder": "torch's flight recorder and analyzer"}


def ours(faults: Sequence[str] = FAULTS) -> list[Verdict]:
    """Play all faults in one job."""
    layout = Layout(pp=1, dp=WORLD)
    trials = [
        Trial(kind=kind, rank=CULPRIT, step=FIRST + number * APART[1], micro_batch=0, layout=layout)
        for number, kind in enumerate(faults)
    ]
    series, steps = Series(trials=tuple(trials)), steps_of(len(trials))
    with tempfile.TemporaryDirectory() as folder, EtcdServer() as etcd, PreloadedServer() as agents, started_by(agents):
        outcome = play(job(series, steps), etcd=etcd, workdir=Path(folder), name="hangs")
        results, missed = read_series(series, outcome, outcome, Path(folder))
    return [
        Verdict(
            system="elastic3d, as shipped",
            fault=result.trial.kind,
            seconds=None if result.first is None else result.first.after,
            # Its rank, if the right node is named: a node has one here.
            named=() if result.first is None else result.first.ranks,
            said="" if result.first is None else result.first.detail,
        )
        for result in results
    ] + [
        Verdict(system="elastic3d, as shipped", fault=trial.kind, seconds=None, named=(), said="the job ended before")
        for trial in missed
    ]


def peer(system: str, fault: str, *, tuned: bool, packages: Path, title: str) -> Verdict:
    """Have a peer meet a fault."""
    with tempfile.TemporaryDirectory(prefix="e3d-") as folder, _launched(system, fault, tuned, packages, folder) as end:
        out = Path(folder)
        mark, log = out / "fault.json", out / "launcher.log"
        if not wait_until(lambda: mark.exists() or end(), START) or not mark.exists():
            return Verdict(system=title, fault=fault, seconds=None, named=(), said=f"did not train: {_last(out)}")
        at = float(json.loads(mark.read_text())["at"])
        if system == "recorder":
            verdict = out / "verdict.json"
            if not wait_until(verdict.exists, PATIENCE):
                return Verdict(system=title, fault=fault, seconds=None, named=())
            made = json.loads(verdict.read_text())
            said = " | ".join(dict.fromkeys(made["said"]))
            return Verdict(
                system=title, fault=fault, seconds=made["at"] - at, named=blamed(made["said"]), said=said[:500]
            )
        if not wait_until(lambda: bool(timed_out(log)), PATIENCE):
            return Verdict(system=title, fault=fault, seconds=None, named=())
        seconds = SYSTEM.wall() - at
        SYSTEM.sleep(TOGETHER)
        named = timed_out(log)
        return Verdict(
            system=title, fault=fault, seconds=seconds, named=tuple(sorted(named)), said="FT timeout elapsed"
        )


def timed_out(log: Path) -> set[int]:
    """Return the ranks whose monitors have said that their time is over."""
    text = log.read_text(errors="replace")
    return {int(rank) for rank in re.findall(r"RankMonServer\d+@[^\]]*:(\d+)\] FT timeout elapsed", text)}


def blamed(lines: Sequence[str]) -> tuple[int, ...]:
    """Return the ranks that torch's analyzer says are missing first: from a collective, or with their records."""
    for line in lines:
        match = re.search(r"(?:missing ranks: |dumps from ranks \()\{([\d, ]+)\}", line)
        if match is not None:
            return tuple(sorted(int(number) for number in match[1].split(",")))
    return ()


def _last(out: Path) -> str:
    """Return the last line that a launcher, or one of its ranks, has said."""
    for log in (out / "launcher.log", out / "rank-0.log"):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
        if lines:
            return lines[-1][:200]
    return "no word"


@contextmanager
def _launched(system: str, fault: str, tuned: bool, packages: Path, folder: str) -> Iterator[Callable[[], bool]]:
    """Run a launcher and its ranks; yield what says whether it has ended. All end with the block."""
    mark = uuid.uuid4().hex
    path = [str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, MARK: mark, "PYTHONPATH": os.pathsep.join(path), "TMPDIR": folder}
    command = [sys.executable, "-m", "chaos.bench.peer_hangs", system, f"--out={folder}"]
    command += [f"--fault={fault}:{CULPRIT}@{AT}", *(["--tuned"] if tuned else [])]
    with Path(folder, "launcher.log").open("wb") as log:
        process = subprocess.Popen(
            leashed(command), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log, env=environment
        )
    try:
        yield lambda: process.poll() is not None
    finally:
        end_all(mark)
        process.wait()


def table(verdicts: Sequence[Verdict]) -> Table:
    """Return who named whom, and when."""
    faults = list(dict.fromkeys(one.fault for one in verdicts))
    shown = Table("", *faults, title=f"a rank of {WORLD} hangs: time to a verdict, and who is named", show_lines=True)
    for system in dict.fromkeys(one.system for one in verdicts):
        own = {one.fault: str(one) for one in verdicts if one.system == system}
        shown.add_row(system, *(own.get(fault, "") for fault in faults))
    return shown


def as_json(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Return all verdicts."""
    return [asdict(one) for one in verdicts]
