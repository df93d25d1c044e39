"""Members in processes of their own, for tests that stop them, starve them and cut them off."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from chaos.servers.etcd import EtcdServer
from elastic3d.membership.driver.links import SILENCE


class NodeProcess:
    """One member's process, and its output."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.said: list[dict[str, Any]] = []
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(json.loads(line))

    def went(self) -> list[dict[str, Any]]:
        """Return the generations that ran here."""
        return [what for what in list(self.said) if "go" in what]

    @property
    def running(self) -> tuple[int, list[str]] | None:
        """The number and names of the generation that runs here."""
        for what in reversed(list(self.said)):
            if "go" in what:
                return what["go"], what["names"]
            if "stop" in what or "exit" in what:
                return None
        return None

    def exits(self) -> list[dict[str, Any]]:
        return [what for what in list(self.said) if "exit" in what]

    def incarnations(self) -> list[str]:
        return [what["joined"] for what in list(self.said) if "joined" in what]

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(timeout=5)
        for end in (self.process.stdin, self.process.stdout):
            assert end is not None
            end.close()


class Nodes:
    """The members of one job; none survives the end of the block."""

    def __init__(self, etcd: EtcdServer) -> None:
        self.etcd = etcd
        self.root = f"/test/{secrets.token_hex(4)}/"
        self.all: dict[str, NodeProcess] = {}

    def start(
        self,
        *names: str,
        maximum: int = 16,
        address: Callable[[str], str] = lambda name: "127.0.0.1",
        within: Callable[[str], Sequence[str]] = lambda name: (),
        endpoint: str | None = None,
        silence: float = SILENCE,
    ) -> None:
        """Start these; `within` is a command that runs the process, such as one that enters a namespace.

        silence: seconds without a beat of a neighbour after which it is reported.
        """
        for name in names:
            command = (
                *within(name),
                *(sys.executable, "-m", "tests.membership.node", endpoint or self.etcd.endpoint),
                *(self.root, name, address(name), str(maximum), str(silence)),
            )
            self.all[name] = NodeProcess(name, command)

    def trains(self, names: Sequence[str], seconds: float) -> int:
        """Wait until exactly these run one generation of exactly these; return its number."""

        def there() -> bool:
            running = {name: one.running for name, one in self.all.items()}
            mine = {(r[0], tuple(sorted(r[1]))) for name, r in running.items() if r is not None and name in names}
            return len(mine) == 1 and all(running[name] for name in names) and mine.pop()[1] == tuple(sorted(names))

        deadline = time.monotonic() + seconds
        while not there():
            assert time.monotonic() < deadline, (
                f"{names} do not train within {seconds:g} s: { {n: o.said[-4:] for n, o in self.all.items()} }"
            )
            time.sleep(0.02)
        running = self.all[names[0]].running
        assert running is not None
        return running[0]

    def close(self) -> None:
        for one in self.all.values():
            one.close()
