"""Real keepers for the tests of slots, forked from one process that has imported torch."""

from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from elastic3d.errors import MembershipError
from elastic3d.port import Assignment
from elastic3d.trust.credentials import Credentials
from elastic3d.worker.processes import packets, process, template
from elastic3d.worker.processes.events import SlotEvent
from elastic3d.worker.processes.remote import RemoteSlot

E = TypeVar("E")
HERE = Path(__file__).parent
READER = Credentials(secret="5e" * 32, id="reader@1")


def assignment(**changes: Any) -> Assignment:
    """An assignment to a world of one."""
    values: dict[str, Any] = {
        "run_id": "run",
        "generation": 1,
        "attempt": 0,
        "measuring": False,
        "rank": 0,
        "world": 1,
        "node": "node",
        "slot": 0,
        "layout": None,
        "store_host": "127.0.0.1",
        "store_port": 1,
        "store_prefix": "1.0",
        "interface": "",
        "store": None,
        "threads": 1,
        "snapshot_every": 1,
        "checkpoint_every": 0,
    }
    return Assignment(**(values | changes))


def gone(pid: int) -> bool:
    """Return whether no process has this pid, not even a zombie."""
    return not Path(f"/proc/{pid}").exists()


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Return whether the condition comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def children(pid: int) -> list[int]:
    """The pids whose parent is `pid`, zombies included."""
    pids = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                pids.append(int(name))
    return pids


def _leads_session_since(pid: int) -> int | None:
    """Return when a process that leads a session was started, in clock ticks; None if it leads none, or is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[19]) if int(fields[3]) == pid and fields[0] != "Z" else None


@dataclass
class Keeper:
    """A keeper process and its slot, as the tests drive it."""

    pid: int
    id: str
    slot: RemoteSlot
    events: queue.SimpleQueue[SlotEvent]
    output: Path
    seen: list[SlotEvent] = field(default_factory=list)

    @property
    def server(self) -> str:
        """The address of its tile server."""
        return f"127.0.0.1:{self.slot.tile_port}"

    @property
    def templates(self) -> list[int]:
        """The pids of its templates, which are its children: first the one that forks trainers, then the reserve."""
        since = {child: _leads_session_since(child) for child in children(self.pid)}
        return [pid for _, pid in sorted((start, child) for child, start in since.items() if start is not None)]

    @property
    def template(self) -> int:
        """The pid of the template that forks trainers: the older one."""
        return self.templates[0]

    def both_templates(self) -> list[int]:
        """Return the pids of both, once the reserve, too, leads a session: it was forked, and may not have run yet."""
        assert eventually(lambda: len(self.templates) == 2)
        return self.templates

    def wait(self, kind: type[E], seconds: float = 20.0, where: Callable[[E], bool] = lambda _: True) -> E:
        """Return the next event of a kind; skipped events are kept in `seen`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                event = self.events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {kind.__name__}; seen {self.seen[-8:]}; {self.output.read_text()}") from None
            self.seen.append(event)
            if isinstance(event, kind) and where(event):
                return event


class Nursery:
    """Forks keepers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count(1)
        self._keepers: list[Keeper] = []
        ours, theirs = packets.socket_pair()
        with theirs:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent.parent)}
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "nursery.py"), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
        self._control = ours
        assert isinstance(self._packet(), template.TemplateReady)

    def _packet(self) -> template.Packet:
        self._control.settimeout(60.0)
        received = template.receive(self._control)
        assert received is not None
        return received[0]

    def keeper(
        self,
        entry: str,
        *,
        index: int = 0,
        threads_before: bool = False,
        broken_again: bool = False,
        watched: bool = False,
        variables: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> Keeper:
        """Fork a keeper whose trainers run an entry of nursery.py.

        threads_before: it has a thread before it has a slot. broken_again: its script fails when it is run again.
        watched: it looks at its trainers' progress records. variables: what is set in its environment besides.
        directory: where it is started.
        """
        number = next(self._numbers)
        name = f"elastic3d-test-{os.getpid()}-{number}"
        output = self._folder / f"keeper-{number}.log"
        spec = {
            "entry": entry,
            "index": index,
            "name": name,
            "output": str(output),
            "threads_before": threads_before,
            "broken_again": broken_again,
            "watched": watched,
            "variables": dict(variables or {}),
            "directory": str(directory or "."),
        }
        template.send(self._control, template.Fork(trainer=number, spec=json.dumps(spec)))
        while not isinstance(packet := self._packet(), template.Forked):
            pass
        events: queue.SimpleQueue[SlotEvent] = queue.SimpleQueue()
        try:
            slot = RemoteSlot(name, events, patience=20.0)
        except MembershipError as error:
            raise AssertionError(output.read_text()) from error
        keeper = Keeper(pid=packet.pid, id=f"keeper-{number}@1", slot=slot, events=events, output=output)
        slot.set_credentials(Credentials(secret=READER.secret, id=keeper.id))
        self._keepers.append(keeper)
        return keeper

    def clear(self) -> None:
        """End all keepers, leaving nothing behind."""
        for keeper in self._keepers:
            keeper.slot.close()
        for keeper in self._keepers:
            if not eventually(lambda pid=keeper.pid: gone(pid)):  # type: ignore[misc]
                os.kill(keeper.pid, signal.SIGKILL)
                raise AssertionError(f"a keeper does not leave: {keeper.output.read_text()}")
        self._keepers.clear()

    def close(self) -> None:
        """End the process."""
        self._control.close()
        self._process.wait(10)
        assert not process.session_members(self._process.pid)
