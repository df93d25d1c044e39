"""Real torchrun agents for tests: start, read, kill, and leave nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

MARK = "ELASTIC3D_TEST_MARK"


class Agent:
    """One torchrun agent; its output and that of its workers go to one file."""

    def __init__(self, name: str, command: list[str], log: Path, environment: dict[str, str]) -> None:
        self.name, self.log = name, log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, start_new_session=True
            )

    @property
    def text(self) -> str:
        """The output so far."""
        return self.log.read_text(errors="replace")

    def begun(self) -> list[dict[str, int]]:
        """Return rank, world, step and pid of each worker that began, in order."""
        lines = re.findall(r"worker: begin rank=(\d+) world=(\d+) step=(\d+) pid=(\d+)", self.text)
        return [dict(zip(("rank", "world", "step", "pid"), map(int, line), strict=True)) for line in lines]

    def kill(self) -> None:
        """Kill the agent alone, as the out-of-memory killer would, and reap it."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=10)

    def wait(self, seconds: float) -> int:
        """Return the exit code; fail with the end of the log if it does not end in time."""
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"agent {self.name} does not end:\n{self.text[-4000:]}") from None


class Agents:
    """All agents of one test: none of them, and no worker, survives the end of the block."""

    def __init__(self, directory: Path, endpoint: str, run_id: str = "foreign") -> None:
        self.directory, self.endpoint, self.run_id = directory, endpoint, run_id
        self.all: list[Agent] = []
        self._mark = uuid.uuid4().hex

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self.processes():
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for agent in self.all:
            agent.process.wait(timeout=10)

    def start(
        self, name: str, *script: str, nodes: str = "1", backend: str = "etcd", restarts: int = 3, conf: str = ""
    ) -> Agent:
        """Start one agent whose worker runs `script`; without a `last_call` in `conf`, late nodes have 3 s."""
        called = "" if "last_call" in conf else "last_call=3"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc-per-node=1"),
            *(f"--rdzv-backend={backend}", f"--rdzv-endpoint={self.endpoint}", f"--rdzv-id={self.run_id}"),
            *(f"--max-restarts={restarts}", "--rdzv-conf=" + ",".join(filter(None, (f"node={name}", called, conf)))),
            *script,
        ]
        environment = {**os.environ, MARK: self._mark, "OMP_NUM_THREADS": "1", "LOGLEVEL": "INFO"}
        agent = Agent(name, command, self.directory / f"{name}-{len(self.all)}.log", environment)
        self.all.append(agent)
        return agent

    def processes(self) -> list[int]:
        """Return every living process that descends from one of the agents."""
        mark = f"{MARK}={self._mark}".encode()
        pids = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        pids.append(int(entry.name))
                except OSError:
                    continue
        return pids

    def wait_for(self, what: str, condition: Callable[[], object], seconds: float = 120.0) -> None:
        """Wait until `condition` holds; fail with the agents' output if it does not."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                said = "\n".join(f"--- {agent.name}\n{agent.text[-3000:]}" for agent in self.all)
                raise AssertionError(f"{what}: not within {seconds:g} s\n{said}")
            time.sleep(0.05)
