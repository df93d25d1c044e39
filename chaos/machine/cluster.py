"""A cluster of torchrun agents on this machine, one per node, as a person would start them on many.

    with Cluster(launch, workdir) as cluster:
        for number in range(4):
            cluster.start_node(f"node{number}")
        cluster.kill_node("node1")
        codes = cluster.wait(60)

Each agent is the interpreter's own torchrun with its literal options, in a session and a temp folder of its own, and
dies with the process that holds the cluster. Leaving the `with` block ends everything by pid.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from chaos.machine.clocks import Clocks
from chaos.machine.closing import put_off
from chaos.machine.groups import NodeGroup, groups_left, parents
from chaos.machine.network import Network, within
from chaos.machine.processes import MARK, Found, Part, children, descendants, end_all, leashed, marked, send, wait_until
from elastic3d.environment import DEVICE
from elastic3d.shortfall import STANDBY

# torch's launcher and compiler never remove these.
_TORCHS_OWN = ("torchelastic_", "torchinductor_")
_PROBE = re.compile(r"tmp[a-z0-9_]{8}")
"""An empty file that torch's loader opens to see whether it has descriptors left, when the process is killed that it is
about to hear: its own handler of SIGCHLD may raise before Python knows that the file is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How the job is started: the torchrun options that all nodes share; `options`: any others."""

    run_id: str
    endpoint: str
    script: Path
    script_args: tuple[str, ...] = ()
    min_nodes: int = 1
    max_nodes: int = 1
    slots: int = 1
    backend: str = "etcd"
    conf: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, conf: Mapping[str, str], log_dir: Path, address: str = "127.0.0.1") -> list[str]:
        """Return the torchrun command line of a node at `address` whose own rendezvous settings are `conf`."""
        settings = {**self.conf, **conf}
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes={self.min_nodes}:{self.max_nodes}",
            f"--nproc-per-node={self.slots}",
            f"--rdzv-backend={self.backend}",
            f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-id={self.run_id}",
            *([f"--rdzv-conf={','.join(f'{key}={value}' for key, value in settings.items())}"] if settings else []),
            f"--local-addr={address}",
            f"--max-restarts={self.max_restarts}",
            f"--log-dir={log_dir}",
            *self.options,
            str(self.script),
            *self.script_args,
        ]


@dataclass(slots=True, kw_only=True)
class AgentNode:
    """One node: its agent's process, its log, the gate it waits at, if any, its group, and what was done to it.

    dismissed: it was sent SIGTERM, after which torchrun exits with 1 whatever its workers did. unwanted: it is to be
    turned away, with an error. life: counts its starts.
    resident: its workers are keepers, and trainers are theirs; otherwise its workers are what trains.
    stopped: its agent never ends by itself. frozen: pids that are stopped for good.
    reader: what copies its output into the log, where it does not write there itself.
    """

    name: str
    process: AgentProcess
    log: Path
    gate: Path | None
    temp: Path
    group: NodeGroup
    life: int = 1
    resident: bool = True
    killed: bool = False
    dismissed: bool = False
    unwanted: bool = False
    stopped: bool = False
    frozen: set[int] = field(default_factory=set)
    reader: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The agent's pid."""
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether the agent runs."""
        return self.process.poll() is None

    @property
    def held(self) -> bool:
        """Whether it waits at its gate."""
        return self.gate is not None and not self.gate.exists()

    def keepers(self) -> list[int]:
        """Return the pids of the processes the agent started, one per slot."""
        return children(self.pid)

    def processes(self, part: Part | None = None) -> list[int]:
        """Return the pids of one kind of the node's processes, or of all, parents first."""
        if not self.resident and part in (Part.KEEPERS, Part.TEMPLATES):
            return []
        if not self.resident and part is Part.TRAINERS:
            return [child for child in children(self.pid) if _is_worker(child)]
        keepers = self.keepers()
        # A keeper's other children are what writes its events, and probes, which live for milliseconds.
        templates = [child for keeper in keepers for child in children(keeper) if _leads_session(child)]
        forked = [child for template in templates for child in children(template)]
        match part:
            case Part.AGENT:
                return [self.pid]
            case Part.KEEPERS:
                return keepers
            case Part.TEMPLATES:
                # Each keeper has a second one in reserve, which has no trainers.
                return [template for template in templates if children(template)] or templates
            case Part.TRAINERS:
                return [pid for pid in forked if not stands_by(pid)]
            case Part.LOADERS:
                return [child for pid in forked if not stands_by(pid) for child in children(pid)]
            case None:
                return [self.pid, *descendants(self.pid)]


class AgentProcess(Protocol):
    """An agent's process: the part of `subprocess.Popen` that is used."""

    @property
    def pid(self) -> int:
        """Its pid; nobody else's until it is reaped."""
        ...

    @property
    def returncode(self) -> int | None:
        """The exit code that `poll` or `wait` found."""
        ...

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once it has ended."""
        ...

    def send_signal(self, number: int, /) -> None:
        """Send a signal."""
        ...

    def kill(self) -> None:
        """Send SIGKILL."""
        ...


class Starter(Protocol):
    """How an agent is started."""

    def __call__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: io.BufferedWriter,
        entries: Sequence[Path],
        space: str,
        /,
    ) -> AgentProcess:
        """Start `command`, a torchrun's, in a session of its own, to die with the calling thread.

        entries: of the control group that it is in before it starts anything. space: the network namespace, "" for that
        of this process.
        """
        ...


def start_fresh(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: io.BufferedWriter,
    entries: Sequence[Path],
    space: str = "",
) -> subprocess.Popen[bytes]:
    """Start an agent as a person would: an interpreter that imports everything."""
    return subprocess.Popen(
        leashed([*within(space), *command] if space else command, entries),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        # A session of its own: Ctrl-C reaches the holder of the cluster, which then ends the agents.
        start_new_session=True,
        env=environment,
    )


_starter: ContextVar[Starter] = ContextVar("starter", default=start_fresh)


@contextlib.contextmanager
def started_by(starter: Starter) -> Iterator[None]:
    """Have every cluster within the block start its agents by `starter`."""
    token = _starter.set(starter)
    try:
        yield
    finally:
        _starter.reset(token)


class Cluster:
    """Agents of one job. Start nodes on the thread that will outlive them: they die with it.

    network: where each node is a host of its own; by default all of them share this machine's loopback.
    clocks: where each node has a wall clock of its own, which may be set. readers: whether a process reads what each
    node prints, through a pipe, as schedulers do it.
    """

    def __init__(
        self,
        launch: Launch,
        workdir: Path,
        network: Network | None = None,
        clocks: Clocks | None = None,
        *,
        readers: bool = False,
    ) -> None:
        self.launch = launch
        self.workdir = workdir
        self.network = network
        self.clocks = clocks
        self.readers = readers
        self.mark = f"{launch.run_id}-{uuid.uuid4().hex}"
        self._temp = Path()
        self._nodes: dict[str, AgentNode] = {}
        self._groups: list[NodeGroup] = []

    @property
    def nodes(self) -> tuple[AgentNode, ...]:
        """Every node ever started, in order."""
        return tuple(self._nodes.values())

    def node(self, name: str) -> AgentNode:
        """Return the node called `name`; KeyError where there is none."""
        return self._nodes[name]

    def start_node(
        self,
        name: str,
        *,
        held: bool = False,
        conf: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> AgentNode:
        """Start a node's agent, with rendezvous settings and an environment of its own beside the launch's.

        A held node warms up, then waits at its gate until `release_node`. One whose agent was killed may be started
        anew.
        """
        before = self._nodes.get(name)
        assert before is None or before.killed, f"{name} was started before"
        if before is not None:
            before.process.wait()
        life = 1 if before is None else before.life + 1
        folder = self.workdir / (name if life == 1 else f"{name}.{life}")
        folder.mkdir(parents=True)
        temp = self._temp / folder.name
        temp.mkdir()
        gate = folder / "gate" if held else None
        conf = {**({"node": name} if self.launch.backend.startswith("etcd") else {}), **(conf or {})}
        if gate is not None:
            conf["gate"] = str(gate)
        log = folder / "agent.log"
        group = NodeGroup.made(parents())
        self._groups.append(group)
        reader = None
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(log.open("wb"))
            if self.readers:
                reader, output = _read(output)
                stack.enter_context(output)
            # All nodes share this machine's devices, if it has any: they train on its CPU, unless told.
            clock = {} if self.clocks is None else self.clocks.environment(name)
            own = {MARK: self.mark, "TMPDIR": str(temp), **clock}
            whole = {DEVICE.name: "cpu", **os.environ, **self.launch.environment, **(environment or {}), **own}
            # A setting that torch reads once does not reach a process that is there.
            start = start_fresh if environment else _starter.get()
            process = self._start(start, name, conf, folder / "torchrun", whole, output, group.entries)
        node = AgentNode(
            name=name, process=process, log=log, gate=gate, temp=temp, group=group, life=life, reader=reader
        )
        node.resident = self.launch.conf.get("mode") != "restart"
        self._nodes[name] = node
        return node

    def _start(
        self,
        start: Starter,
        name: str,
        conf: Mapping[str, str],
        logs: Path,
        environment: Mapping[str, str],
        output: io.BufferedWriter,
        entries: Sequence[Path],
    ) -> AgentProcess:
        address, space = "127.0.0.1", ""
        if self.network is not None:
            if name not in self.network.hosts:
                self.network.add(name)
            address, space = self.network.address_of(name), self.network.space(name)
        return start(self.launch.command(conf, logs, address), environment, output, entries, space)

    def release_node(self, name: str) -> None:
        """Open the gate of a held node."""
        gate = self._nodes[name].gate
        assert gate is not None, f"{name} is not held"
        gate.touch()

    def kill_node(self, name: str) -> None:
        """Send SIGKILL to the node's agent; the parent-death signals must take the rest of the node."""
        node = self._nodes[name]
        node.killed = True
        node.process.kill()

    def terminate_node(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """Send SIGTERM to the node's agent, as schedulers do; torchrun passes it to the node's keepers."""
        node = self._nodes[name]
        node.dismissed = True
        node.process.send_signal(number)

    def stop_node(self, name: str) -> None:
        """Send SIGSTOP to every process of the node, those it starts meanwhile included."""
        node = self._nodes[name]
        node.stopped = True
        while new := [pid for pid in node.processes() if pid not in node.frozen]:
            send(new, signal.SIGSTOP)
            node.frozen.update(new)

    def wake_node(self, name: str) -> None:
        """Send SIGCONT to every process of a stopped node."""
        node = self._nodes[name]
        node.stopped = False
        node.frozen.clear()
        send(node.processes(), signal.SIGCONT)

    def exit_codes(self) -> dict[str, int | None]:
        """Return the agents' exit codes by node: negative for a signal, None while one runs."""
        return {node.name: node.process.poll() for node in self.nodes}

    def running(self) -> list[str]:
        """Return the names of the nodes whose agents run."""
        return [node.name for node in self.nodes if node.alive]

    def wait(self, timeout: float) -> dict[str, int | None]:
        """Wait until every agent has ended, at most `timeout` seconds; return the exit codes."""
        wait_until(lambda: not self.running(), timeout)
        return self.exit_codes()

    def leftovers(self, grace: float = 5.0) -> list[Found]:
        """Return the processes of this cluster that are still alive `grace` seconds after their agents ended.

        Their shared memory and sockets have no names, and end with them.
        """
        agents = {node.pid for node in self.nodes if node.alive}

        def strays() -> list[Found]:
            return [process for process in marked(self.mark) if process.pid not in agents]

        wait_until(lambda: not strays(), grace)
        return strays()

    def groups_left(self, grace: float = 5.0) -> list[str]:
        """Remove the control groups of nodes that have ended; return those that still have processes after `grace`."""
        running = [node.group for node in self.nodes if node.alive]
        return groups_left([group for group in self._groups if group not in running], parents(), grace)

    def files_left(self) -> list[Path]:
        """Return the files that nodes that were not killed left in their temp folders, except torch's own."""
        return [path for node in self.nodes if not node.killed for path in left_in(node.temp)]

    @put_off()
    def close(self) -> None:
        """End every process by pid, agents first, then whatever carries the mark or is in a node's control group.

        Remove these groups, and the temp folders.
        """
        try:
            for node in self.nodes:
                # Who finds the process gone that started an agent has nothing to end: the agent died with it.
                with contextlib.suppress(ChildProcessError):
                    node.process.kill()
            for node in self.nodes:
                with contextlib.suppress(ChildProcessError):
                    node.process.wait()
        finally:
            for node in self.nodes:
                if node.reader is not None:
                    node.reader.kill()
                    node.reader.wait()
            end_all(self.mark)
            for group in self._groups:
                send(group.pids(), signal.SIGKILL)
            self.groups_left()
            shutil.rmtree(self._temp, ignore_errors=True)

    def tail(self, name: str, lines: int = 60) -> str:
        """Return the last `lines` of a node's log, for messages about what went wrong."""
        text = self._nodes[name].log.read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def __enter__(self) -> Self:
        # Apart from the work folder, whose path may be too long for the sockets that Python keeps in temp folders.
        self._temp = Path(tempfile.mkdtemp(prefix="elastic3d-"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def left_in(folder: Path) -> list[Path]:
    """Return what is in a folder for temporary files, except torch's own."""

    def of_torch(path: Path) -> bool:
        probe = _PROBE.fullmatch(path.name) is not None and path.is_file() and not path.stat().st_size
        return probe or path.name.startswith(_TORCHS_OWN)

    return [path for path in sorted(folder.iterdir()) if not of_torch(path)]


def _read(log: io.BufferedWriter) -> tuple[subprocess.Popen[bytes], io.BufferedWriter]:
    """Start a process that copies what is written to a pipe into `log`; return it, and the pipe's other end."""
    end, given = os.pipe()
    reader = subprocess.Popen(leashed(["cat"]), stdin=end, stdout=log, start_new_session=True)
    os.close(end)
    return reader, os.fdopen(given, "wb")


def stands_by(pid: int) -> bool:
    """Return whether a process is a slot's standby, which trains nothing."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == STANDBY
    except OSError:
        return False


def _is_worker(pid: int) -> bool:
    """Return whether torchrun has given a process a rank of its node; the guard beside its agent has none."""
    try:
        return b"\0LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False
