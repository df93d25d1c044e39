"""Checks and fixtures for every test: nothing that a test started, opened or wrote is left when it ends."""

from __future__ import annotations

import os
import queue
import shutil
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from chaos.faults.catalogue import lacking
from chaos.faults.fault import Need
from chaos.machine.clocks import LIBRARIES, Clocks
from chaos.machine.preloaded import PreloadedServer
from chaos.machine.processes import Found, all_pids, descendants, marked, wait_until
from elastic3d import log, threads
from elastic3d.etcd_server.certificates import Certificates
from elastic3d.threads import ThreadFailure

GRACE = 5.0

# Many ranks of a test share one machine, whatever devices it has.
os.environ.setdefault("ELASTIC3D_DEVICE", "cpu")

# Beside a cluster's own mark, which its processes carry too.
MARK = "ELASTIC3D_TEST"

# Made by torch's launcher and compiler, which never remove them: not counted.
FOREIGN = ("torchelastic_", "torchinductor_", "pymp-")

# The duration of an example means nothing on a busy machine. A commit's examples are the same each time; `make slow`
# draws others.
settings.register_profile("elastic3d", deadline=None, derandomize=True)
settings.register_profile("drawn", deadline=None)
settings.load_profile("elastic3d")


@pytest.fixture
def reported() -> Iterator[queue.SimpleQueue[ThreadFailure]]:
    """Collect the reports of failing threads; none of them ends this process."""
    failures: queue.SimpleQueue[ThreadFailure] = queue.SimpleQueue()
    threads.report_to(failures.put, end=lambda code: None)
    yield failures
    threads.report_to(None)


@pytest.fixture
def refusing_port() -> Iterator[Callable[[], int]]:
    """Return ports of the loopback address that refuse connections, and that nobody else gets meanwhile."""
    with ExitStack() as held:

        def port() -> int:
            bound = held.enter_context(socket.socket())
            bound.bind(("127.0.0.1", 0))
            return int(bound.getsockname()[1])

        yield port


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-displays", action="store_true", help="write what the displays show now")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse names that hold an address: they differ between the processes that share the tests."""
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid}: give its parameters ids that are the same in every process")
    items.sort(key=longest_first(items))


def longest_first(items: Sequence[pytest.Item]) -> Callable[[pytest.Item], tuple[float, int]]:
    """Return a key that has the files whose tests may take longest begin first, so that no process ends long after
    the others; those of a file stay together, as they stand in it."""
    longest: dict[Path, float] = {}
    count: dict[Path, int] = {}
    for item in items:
        mark = item.get_closest_marker("timeout")
        longest[item.path] = max(longest.get(item.path, 0.0), float(mark.args[0]) if mark is not None else 0.0)
        count[item.path] = count.get(item.path, 0) + 1
    return lambda item: (-longest[item.path], -count[item.path])


@pytest.fixture(scope="session")
def preloaded() -> Iterator[PreloadedServer]:
    """Run one process that forks torchrun agents and their workers: otherwise each would import torch.

    And another, of agents with clocks of their own: a test that started it would leave it behind.
    """
    with ExitStack() as stack:
        server = stack.enter_context(PreloadedServer())
        if not lacking(Need.COMPILER):
            server.having(stack.enter_context(Clocks()).environment("node")[LIBRARIES])
        yield server


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates of an authority, a server and a client, which no test changes."""
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(autouse=True)
def same_log() -> Iterator[None]:
    """Undo what a test bound to the log of this process, which later ones would show."""
    before = dict(log._process)
    yield
    log._process.clear()
    log._process.update(before)


@pytest.fixture(autouse=True)
def same_torch() -> Iterator[None]:
    """Undo the settings that a trainer in this process made for all of torch, such as filling new tensors."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail a test that leaves a process, a shared-memory segment, an open port or a temporary file behind."""
    tmp_path_factory.getbasetemp()
    mark = uuid.uuid4().hex
    temp = Path(tempfile.mkdtemp(prefix="e3d-"))
    before, others = _Held.now(), all_pids()
    outer = {name: os.environ.get(name) for name in (MARK, "TMPDIR")}
    outer_temp = tempfile.tempdir
    os.environ |= {MARK: mark, "TMPDIR": str(temp)}
    tempfile.tempdir = str(temp)
    try:
        yield
    finally:
        tempfile.tempdir = outer_temp
        for name, value in outer.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    problems: list[str] = []

    def gone() -> bool:
        files = [f"temporary file {path}" for path in temp.iterdir() if not path.name.startswith(FOREIGN)]
        processes = marked(mark, MARK, besides=others)
        problems[:] = [*map(str, processes), *_Held.now().beyond(before), *files]
        return not problems

    if not wait_until(gone, GRACE):
        for process in marked(mark, MARK, besides=others):
            psutil.Process(process.pid).kill()
    shutil.rmtree(temp, ignore_errors=True)
    assert not problems, "the test left behind:\n" + "\n".join(problems)


class _Held:
    """Resources of this process that another process would notice."""

    def __init__(self, children: set[Found], segments: list[str], ports: set[int]) -> None:
        self.children, self.segments, self.ports = children, segments, ports

    @classmethod
    def now(cls) -> _Held:
        me = psutil.Process()
        children = set()
        for pid in descendants(me.pid):
            try:
                child = psutil.Process(pid)
                children.add(Found(pid=pid, command=" ".join(child.cmdline())[:160] or child.name()))
            except psutil.NoSuchProcess:  # a zombie is one: it holds nothing, and is reaped with its handle
                continue
        segments = []
        for descriptor in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{descriptor}")
            except FileNotFoundError:
                continue
            if target.startswith("/memfd:"):
                segments.append(target)
        ports = {c.laddr.port for c in me.net_connections("inet") if c.status == psutil.CONN_LISTEN}
        return cls(children, segments, ports)

    def beyond(self, before: _Held) -> list[str]:
        pids = {child.pid for child in before.children}
        extra = max(0, len(self.segments) - len(before.segments))
        return [
            *(str(child) for child in self.children if child.pid not in pids),
            *(f"shared memory {name}" for name in self.segments[-extra:] if extra),
            *(f"listening port {port}" for port in self.ports - before.ports),
        ]
