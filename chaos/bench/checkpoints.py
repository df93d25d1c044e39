"""Saving, loading and resharding a state of Adam beside torch's DCP, torch_checkpointing and the bare disk.

Every contender runs in fresh processes, on the same bytes; figures of one table are of one run. Saves and loads take
turns, because a disk that has just been written to is slow for the next one. Peers that are not part of torch are
installed into a temporary folder that only their own processes import from.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.table import Table

from chaos.bench.forming import install
from chaos.bench.savers import Figures
from chaos.bench.shards import COLUMNS, STATES, Job
from chaos.bench.spread import spread
from chaos.machine.processes import MARK, end_all, leashed
from chaos.servers import s3

RANKS = 4
FEWER = 2
TENSORS = 20
PATIENCE = 600.0
PEER = "torch_checkpointing"
PACKAGES = ("--no-deps", "torch_checkpointing", "safetensors")
CONTENDERS = ("elastic3d", PEER, "dcp", "raw")
MOVABLE = ("elastic3d", "dcp")
"""Contenders that can load under another world, on a CPU."""
REMOTE_SHARE = 0.25
"""How much of the state goes through the S3 server, which is slower than any disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A contender that failed, and its last message."""

    reason: str


Outcome = Figures | Failed


@dataclass(slots=True)
class Results:
    """The outcome of every contender, by task."""

    local: dict[str, Outcome] = field(default_factory=dict)
    resharded: dict[str, Outcome] = field(default_factory=dict)
    beside: dict[str, Outcome] = field(default_factory=dict)
    frozen: dict[str, Outcome] = field(default_factory=dict)
    integrity: dict[str, Outcome] = field(default_factory=dict)
    remote: dict[str, Outcome] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """Return all results for machines."""
        return {
            task: {name: asdict(outcome) for name, outcome in getattr(self, task).items()} for task in self.__slots__
        }


def measure(
    repeats: int, gigabytes: float = 0.96, *, say: Callable[[str], None] = lambda text: None, folder: Path | None = None
) -> Results:
    """Run every task with every contender; `folder` is on the disk to be measured, a temporary one by default."""
    results = Results()
    rows = max(RANKS, round(gigabytes * 1e9 / (TENSORS * len(STATES) * COLUMNS * 4)))
    with tempfile.TemporaryDirectory(prefix="elastic3d-bench-", dir=folder) as temporary:
        base = Path(temporary)
        packages = base / "packages"
        missing = install(PACKAGES, packages)

        def run(name: str, job: Job) -> Outcome:
            if name == PEER and missing:
                return Failed(reason=f"not available: {missing}")
            outcome = _run(name, job, packages if name == PEER else None, base)
            say(f"{job.task} {job.world} {name}: {outcome.reason if isinstance(outcome, Failed) else 'done'}")
            return outcome

        job = Job(rank=0, world=RANKS, meeting="", place="", task="save", repeats=repeats, tensors=TENSORS, rows=rows)
        once = replace(job, repeats=1)
        for _ in range(repeats):
            for name in CONTENDERS:
                with _place(base) as place:
                    _add(results.local, name, run(name, replace(once, place=place)))
                    if name in MOVABLE:
                        fewer = replace(once, task="load", place=place, world=FEWER, saved_by=RANKS, changes=1)
                        _add(results.resharded, name, run(name, fewer))
        for name in CONTENDERS:
            if name != "raw":
                with _place(base) as place:
                    results.beside[name] = run(name, replace(job, task="beside", place=place))
            if name in MOVABLE:
                with _place(base) as place:
                    results.frozen[name] = run(name, replace(job, task="frozen", place=place))
        with _place(base) as place:
            results.integrity["elastic3d"] = run("elastic3d", replace(job, task="integrity", place=place))
        with _s3() as place:
            small = replace(once, rows=max(RANKS, round(rows * REMOTE_SHARE)))
            for number in range(repeats):
                for name in (*MOVABLE, "raw"):
                    _add(results.remote, name, run(name, replace(small, place=f"{place}/{number}-{name}")))
    return results


def _add(outcomes: dict[str, Outcome], name: str, turn: Outcome) -> None:
    """Add the outcome of one more turn of a contender; once failed, it stays failed."""
    before = outcomes.get(name)
    if not isinstance(before, Figures) or isinstance(turn, Failed):
        outcomes[name] = before if isinstance(before, Failed) else turn
        return
    before.save += turn.save
    before.load += turn.load
    before.memory_save = max(before.memory_save, turn.memory_save)
    before.memory_load = max(before.memory_load, turn.memory_load)


@contextmanager
def _place(base: Path) -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir=base) as place:
        yield place


@contextmanager
def _s3() -> Iterator[str]:
    """A server of moto's and the URL at which all save; what their clients need is in the environment."""
    with s3.s3_server() as server:
        settings = {
            "AWS_ENDPOINT_URL": server.options["endpoint_url"],
            "AWS_ACCESS_KEY_ID": server.options["key"],
            "AWS_SECRET_ACCESS_KEY": server.options["secret"],
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield server.url("bench")
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _run(name: str, job: Job, packages: Path | None, base: Path) -> Outcome:
    """Run all ranks of a job; they are gone when this returns."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"}
    if packages is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))
    meeting = str(base / f"meeting-{mark}")
    processes = []
    logs = []
    try:
        for rank in range(job.world):
            log = base / f"{mark}-{rank}.log"
            logs.append(log)
            own = json.dumps(asdict(replace(job, rank=rank, meeting=meeting)))
            with log.open("wb") as errors:
                processes.append(
                    subprocess.Popen(
                        leashed([sys.executable, "-m", "chaos.bench.savers", name, own]),
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                    )
                )
        said, _ = processes[0].communicate(timeout=PATIENCE)
        for process in processes[1:]:
            process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        return Failed(reason=f"not within {PATIENCE:g} s")
    finally:
        end_all(mark)
        for process in processes:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    lines = [line for line in said.decode().splitlines() if line.startswith("{")]
    if not lines or any(process.returncode for process in processes):
        words = [line for log in logs for line in log.read_text(errors="replace").strip().splitlines()[-1:]]
        return Failed(reason=f"failed: {words[0][:200] if words else 'no word'}")
    return Figures(**json.loads(lines[-1]))


def tables(results: Results) -> Sequence[Table]:
    """Yield the tables for people."""
    size = next((o.total for o in results.local.values() if isinstance(o, Figures)), 0) / 1e9
    saving = Table(
        "",
        "save",
        "load",
        "load, 4 to 2 ranks",
        "peak memory of save",
        "of load",
        title=f"{size:.2f} GB, 4 ranks, a local disk, synced",
    )
    for name, outcome in results.local.items():
        if isinstance(outcome, Failed):
            saving.add_row(name, outcome.reason)
            continue
        fewer = results.resharded.get(name)
        moved = "" if fewer is None else fewer.reason if isinstance(fewer, Failed) else spread(fewer.load)
        saving.add_row(
            name,
            spread(outcome.save),
            spread(outcome.load),
            moved,
            f"{outcome.memory_save:.2f} x shard",
            f"{outcome.memory_load:.2f} x shard",
        )
    beside = Table("", "the call returns", "the next optimizer step waits", title="saving beside the training")
    for name, outcome in results.beside.items():
        if isinstance(outcome, Failed):
            beside.add_row(name, outcome.reason)
        else:
            beside.add_row(name, spread(outcome.call, " s", 4), spread(outcome.hold, " s", 4))
    frozen = Table("", "changed", "written", "ratio", title="nine of ten tensors did not change")
    for name, outcome in results.frozen.items():
        if isinstance(outcome, Failed):
            frozen.add_row(name, outcome.reason)
        else:
            ratio = f"{outcome.written / outcome.changed:.3f}" if outcome.changed else "?"
            frozen.add_row(name, f"{outcome.changed / 1e6:.1f} MB", f"{outcome.written / 1e6:.1f} MB", ratio)
    integrity = Table("", "save", "without", "cost", title="looking at the bytes: digests and statistics, in turns")
    for name, outcome in results.integrity.items():
        if isinstance(outcome, Failed):
            integrity.add_row(name, outcome.reason)
        else:
            shares = [100 * (a / b - 1) for a, b in zip(outcome.save, outcome.blind, strict=True)]
            integrity.add_row(name, spread(outcome.save), spread(outcome.blind), spread(shares, " %", 1))
    remote = Table("", "save", "load", title="a quarter of it, through one S3 server")
    for name, outcome in results.remote.items():
        if isinstance(outcome, Failed):
            remote.add_row(name, outcome.reason)
        else:
            remote.add_row(name, spread(outcome.save), spread(outcome.load))
    return saving, beside, frozen, integrity, remote
