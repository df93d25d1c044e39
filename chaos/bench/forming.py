"""How long a world of N agents takes to form, from the last join until every agent has its rank: ours and its peers.

The other agents have joined and wait; the smallest and the largest world allowed are N, so that the last join makes it
complete. Each world is formed by fresh processes, against a fresh etcd where it needs one; systems take turns, so that
other load affects them alike. Peers that are not part of torch are installed into a temporary folder, which only
their own worlds import from; one that cannot be installed is reported, never guessed.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from chaos.bench.spread import spread
from chaos.bench.world import Formed
from chaos.machine.processes import MARK, end_all, free_port, leashed
from chaos.servers.etcd import EtcdServer

AGENTS = (4, 16, 64, 256)
FEWER_REPEATS = 3
"""Repeats of the largest world."""
IDLE = 10.0
START = 60.0
"""Seconds beyond its patience that a world's process may take to start and to report its outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A system to measure. etcd: options of the etcd server it needs, None for none. idle: measure its idle agents.

    packages: what pip is to install for it, into a folder of its own.
    """

    system: str
    title: str
    etcd: tuple[str, ...] | None = None
    idle: bool = False
    packages: tuple[str, ...] = ()


CONTENDERS = (
    Contender(system="elastic3d", title="elastic3d", etcd=(), idle=True),
    Contender(system="c10d", title="torchrun c10d", idle=True),
    Contender(system="etcd-v2", title="torch etcd-v2", etcd=("--enable-v2=true",), packages=("python-etcd",)),
    # Without its dependencies: torch, and packages that only its other parts need.
    Contender(system="lighthouse", title="torchft lighthouse", packages=("--no-deps", "torchft-nightly")),
)

Results = dict[tuple[str, int], list[Formed]]
"""The repeats by contender and number of agents."""


def measure(
    agents: Sequence[int],
    repeats: int,
    contenders: Sequence[Contender] = CONTENDERS,
    *,
    idle: float = IDLE,
    say: Callable[[str], None] = lambda text: None,
) -> Results:
    """Form every world `repeats` times, those of more than 64 agents three times at most."""
    results: Results = {(contender.system, n): [] for n in agents for contender in contenders}
    with tempfile.TemporaryDirectory(prefix="elastic3d-bench-") as folder:
        missing = {c.system: install(c.packages, Path(folder, c.system)) for c in contenders}
        for n in agents:
            for number in range(repeats if n <= 64 else min(repeats, FEWER_REPEATS)):
                for contender in contenders:
                    reason = missing[contender.system]
                    formed = (
                        Formed(failed=f"not available: {reason}")
                        if reason
                        else one_world(contender, n, Path(folder), idle=idle if contender.idle else 0.0)
                    )
                    say(f"forming {n}, round {number + 1}: {contender.title}: {formed.failed or formed.seconds}")
                    results[contender.system, n].append(formed)
    return results


def one_world(contender: Contender, agents: int, folder: Path, *, idle: float) -> Formed:
    """Form a world of `agents` once, in processes that are gone when this returns."""
    patience = 90.0 + agents / 2
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "chaos.bench.world", contender.system, str(agents)]
    command += [f"--idle={idle}", f"--patience={patience}"]
    environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"}
    if contender.packages:
        path = [str(folder / contender.system), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(path)
    log = folder / f"{mark}.log"
    with _server(contender) as options, log.open("wb") as errors:
        try:
            done = subprocess.run(
                leashed([*command, *options]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                timeout=patience + idle + START,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            return Formed(failed=f"failed: not within {error.timeout:g} s")
        finally:
            end_all(mark)
    lines = [line for line in done.stdout.decode().splitlines() if line.startswith("{")]
    if not lines:
        said = log.read_text(errors="replace").strip().splitlines() or ["no word"]
        return Formed(failed=f"failed: exit code {done.returncode}: {said[-1][:200]}")
    formed = Formed(**json.loads(lines[-1]))
    return Formed(failed=f"failed: {formed.failed}") if formed.failed else formed


@contextlib.contextmanager
def _server(contender: Contender) -> Iterator[list[str]]:
    """Start the etcd that a contender needs, and yield what its world must know."""
    if contender.etcd is None:
        yield [f"--endpoint=127.0.0.1:{free_port()}"]
        return
    with EtcdServer(options=contender.etcd) as etcd:
        yield [f"--endpoint={etcd.endpoint}", f"--server={etcd.members[0].pid}"]


def install(packages: Sequence[str], folder: Path) -> str:
    """Install `packages` into `folder`; return why that failed, "" if it did not."""
    if not packages:
        return ""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        done = subprocess.run(
            [*command, "--only-binary=torchft-nightly", "--target", str(folder), *packages],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "pip takes more than 300 s"
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return (errors or [f"pip ends with {done.returncode}"])[-1][:200] if done.returncode else ""


def tables(results: Results, contenders: Sequence[Contender] = CONTENDERS) -> list[Table]:
    """Yield the tables: forming times, the cost of a formed world, and our requests to etcd."""
    sizes = sorted({agents for _, agents in results})
    worlds = Table(
        "agents", "", "last join to all ranks", "CPU of an idle agent", title="forming a world", show_lines=True
    )
    for n in sizes:
        for c in contenders:
            repeats = results[c.system, n]
            idle = _cell(repeats, "cpu", " %", 2, 100) if c.idle else "not measured"
            worlds.add_row(str(n), c.title, _cell(repeats, "seconds", " s", 3), idle)
    etcd = Table("agents", "writes", "per agent", "largest record", "its CPU, idle", title="etcd, under elastic3d")
    for n in sizes:
        ours = results.get(("elastic3d", n), [])
        etcd.add_row(
            str(n),
            _cell(ours, "writes", "", 0),
            _cell(ours, "writes", "", 2, 1 / n),
            _cell(ours, "record", " B", 0),
            _cell(ours, "server_cpu", " %", 1, 100),
        )
    return [worlds, etcd]


def _cell(repeats: Sequence[Formed], name: str, unit: str, digits: int, factor: float = 1.0) -> str:
    """Return a figure of all repeats, or why there is none."""
    values: list[float | None] = [getattr(formed, name) for formed in repeats]
    failed = [formed.failed for formed in repeats if formed.failed]
    if failed and len(failed) == len(repeats):
        return failed[-1]
    return spread([None if value is None else factor * value for value in values], unit, digits)
