"""How a run id closes and how the others end: handlers of mode=restart over a real etcd, and torch's own launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousParameters,
)

from chaos.servers.etcd import EtcdServer
from elastic3d import output
from elastic3d.errors import UsageError
from elastic3d.etcd import EtcdClient
from elastic3d.rendezvous.errors import RendezvousEnded
from elastic3d.rendezvous.guard import DONE, VARIABLE
from elastic3d.rendezvous.restart import RestartHandler
from elastic3d.rendezvous.settings import from_parameters
from tests.rendezvous.agents import Agent, Agents

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    """One server for all."""
    with EtcdServer() as server:
        yield server


class Handlers:
    """Handlers of one run id, one per node, of which at most `most` train at a time."""

    def __init__(self, endpoint: str, run_id: str) -> None:
        self.endpoint, self.run_id = endpoint, run_id
        self.most, self.last_call = 1, "0.1"
        self.all: list[RestartHandler] = []

    def add(self, node: str) -> RestartHandler:
        parameters = RendezvousParameters(
            "etcd-v3", self.endpoint, self.run_id, 1, self.most, "127.0.0.1", node=node, last_call=self.last_call
        )
        self.all.append(RestartHandler(from_parameters(parameters), "etcd-v3"))
        return self.all[-1]

    def waits(self, node: str) -> threading.Thread:
        """Let another node ask for a rendezvous; return the thread, whose `errors` get its exception."""
        handler = self.add(node)
        thread = _Waiting(handler)
        thread.start()
        with EtcdClient(self.endpoint) as client:
            deadline = threading.Event()
            for _ in range(600):
                if any(f"/{self.run_id}/roll/members/{node}@" in kv.key for kv in client.range("")[0]):
                    return thread
                deadline.wait(0.1)
        raise AssertionError(f"{node} did not register")


class _Waiting(threading.Thread):
    def __init__(self, handler: RestartHandler) -> None:
        super().__init__(daemon=True)
        self.handler = handler
        self.errors: list[BaseException] = []

    def run(self) -> None:
        try:
            self.handler.next_rendezvous()
        except BaseException as error:  # noqa: BLE001  # whatever it is, the test looks at it
            self.errors.append(error)


@pytest.fixture
def handlers(etcd: EtcdServer) -> Iterator[Handlers]:
    """Handlers that have left in the end."""
    made = Handlers(etcd.endpoint, uuid.uuid4().hex)
    yield made
    for handler in made.all:
        handler._leave(clean=True)
    os.environ.pop(VARIABLE, None)
    # Output of this process is flushed again.
    writer, output._said = output._said, None
    if writer is not None:
        writer.close(30)


def test_a_closed_run_id_is_closed_for_everybody(handlers: Handlers) -> None:
    """Training, waiting and new nodes alike, as with torch's handlers; a running one goes on until it asks."""
    first = handlers.add("a")
    info = first.next_rendezvous()
    assert (info.rank, info.world_size, first.is_closed()) == (0, 1, False)
    spare = handlers.waits("b")
    handlers.add("c").set_closed()
    spare.join(timeout=60)
    assert isinstance(spare.errors[0], RendezvousClosedError)
    assert "node c has closed run id" in str(spare.errors[0])
    late = handlers.add("d")
    assert first.is_closed()
    assert first.num_nodes_waiting() == 0, "a running generation goes on"
    for handler in (first, late, handlers.all[2]):
        with pytest.raises(RendezvousClosedError, match="has closed run id"):
            handler.next_rendezvous()
        assert handler.is_closed()


def test_a_spare_ends_well_when_the_job_does(handlers: Handlers) -> None:
    """By torch's own error for that, and not by the end of the process."""
    first = handlers.add("a")
    first.next_rendezvous()
    spare = handlers.waits("b")
    assert first.shutdown()
    spare.join(timeout=60)
    assert [type(error) for error in spare.errors] == [RendezvousGracefulExitError]
    with pytest.raises(RendezvousClosedError):
        first.next_rendezvous()


def test_a_job_ends_well_though_its_agent_was_launched_to_handle_an_error(handlers: Handlers) -> None:
    """One of before, such as another job's, after which a program goes on with this one."""
    try:
        raise ValueError("of the first try")
    except ValueError:
        first = handlers.add("a")
        first.next_rendezvous()
        spare = handlers.waits("b")
        assert first.shutdown()
    spare.join(timeout=60)
    assert [type(error) for error in spare.errors] == [RendezvousGracefulExitError]


def test_a_node_that_was_started_before_the_end_and_comes_after_it_ends_well(handlers: Handlers) -> None:
    """It does not begin the job anew, and wait for the others until its timeout."""
    late = handlers.add("b")
    first = handlers.add("a")
    first.next_rendezvous()
    time.sleep(1.5)  # etcd says in whole seconds what is left of a lease
    assert first.shutdown()
    with pytest.raises(RendezvousGracefulExitError):
        late.next_rendezvous()


@pytest.mark.parametrize("replaced", [False, True], ids=["while it runs", "just replaced"])
def test_an_agent_that_gives_up_ends_the_job(handlers: Handlers, replaced: bool) -> None:
    """Even where the generation whose workers failed was replaced just before, which it has not met for yet."""
    first = handlers.add("a")
    first.next_rendezvous()
    spare = handlers.waits("b")
    guards = [handler._guard for handler in handlers.all]
    if replaced:
        with first._lock:
            assert first._running is not None
            first._running, first._wanted = None, first._running.key
    try:
        raise ValueError("no tries left")
    except ValueError:
        assert first.shutdown()
    spare.join(timeout=60)
    for guard in guards:
        # Each would wait for the end of this process, to look for workers.
        assert guard is not None
        guard.communicate(DONE, timeout=30)
    assert [type(error) for error in spare.errors] == [RendezvousEnded]
    assert "no tries left" in str(spare.errors[0])


class _Interrupted(SimpleElasticAgent):
    """An agent of torch's that gets a signal once it has met the other one, when its workers would be there."""

    def __init__(self, handler: RestartHandler, other: _Waiting) -> None:
        super().__init__(WorkerSpec("default", 1, handler, entrypoint="none"))
        self.handler, self.other, self.world = handler, other, 0
        self.guard: subprocess.Popen[bytes] | None = None

    def _invoke_run(self, role: str = "") -> RunResult:
        self.world = self.handler.next_rendezvous().world_size
        self.guard = self.handler._guard
        self.other.join(timeout=60)
        raise SignalException("interrupted", signal.SIGINT)

    def _shutdown(self, *given: object, **named: object) -> None:
        """Do nothing: there are no workers."""

    _start_workers = _stop_workers = _monitor_workers = _shutdown  # type: ignore[assignment]


def test_an_agent_leaves_with_a_signal_that_its_process_survives(handlers: Handlers) -> None:
    """As in a notebook, where it is an exception like others: nobody waits for that agent's node."""
    handlers.most, handlers.last_call = 2, "20"
    stays = handlers.add("b")
    meets = _Waiting(stays)
    meets.start()
    agent = _Interrupted(handlers.add("a"), meets)
    with pytest.raises(SignalException):
        agent.run()
    assert agent.guard is not None
    agent.guard.communicate(DONE, timeout=30)  # it would wait for the end of this process
    assert (agent.world, meets.errors) == (2, [])
    with EtcdClient(handlers.endpoint) as client:
        assert not any(f"/{handlers.run_id}/roll/members/a@" in kv.key for kv in client.range("")[0])
    until = time.monotonic() + 15
    while not stays.num_nodes_waiting():
        assert time.monotonic() < until, "the other one is waited for"
        time.sleep(0.05)
    assert stays.next_rendezvous().world_size == 1


def test_a_fork_of_an_agent_is_refused(handlers: Handlers) -> None:
    """At once, and its end is not the agent's."""
    first = handlers.add("a")
    first.next_rendezvous()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(60)
            first._leave()
            assert first.num_nodes_waiting() == 0
            first.next_rendezvous()
        except UsageError as error:
            code = 0 if "from which this one was forked" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with EtcdClient(handlers.endpoint) as client:
        assert any("/a@" in kv.key for kv in client.range("")[0] if handlers.run_id in kv.key)


LAUNCHES = """\
import sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
endpoint, run_id, node, worker, *arguments = sys.argv[1:]
config = LaunchConfig(
    min_nodes=1, max_nodes=1, nproc_per_node=1, run_id=run_id, rdzv_backend="etcd-v3", rdzv_endpoint=endpoint,
    rdzv_configs={"node": node, "last_call": "0.1"}, max_restarts=0, local_addr="127.0.0.1",
)
returned = elastic_launch(config, sys.executable)(worker, *arguments)
print("returned", sorted(returned), flush=True)
"""

WORKER = """\
import os, sys, time
os.write(1, b"worker: begin rank=0 world=1 step=0 pid=%d\\n" % os.getpid())
while not os.path.exists(sys.argv[1]): time.sleep(0.05)
"""


@pytest.mark.long
def test_elastic_launch_returns_on_a_spare(etcd: EtcdServer, tmp_path: Path) -> None:
    """Without return values; on nodes that ran workers it returns theirs."""
    (tmp_path / "launches.py").write_text(LAUNCHES)
    (tmp_path / "worker.py").write_text(WORKER)
    with Agents(tmp_path, etcd.endpoint, run_id="launched") as agents, EtcdClient(etcd.endpoint) as client:
        for name in ("a", "b"):
            given = (etcd.endpoint, "launched", name, str(tmp_path / "worker.py"), str(tmp_path / "stop"))
            command = [sys.executable, str(tmp_path / "launches.py"), *given]
            agents.all.append(Agent(name, command, tmp_path / f"{name}.log", {**os.environ, "OMP_NUM_THREADS": "1"}))
        agents.wait_for(
            "both have joined",
            lambda: sum("/launched/roll/members/" in kv.key for kv in client.range("")[0]) == 2,
            90,
        )
        agents.wait_for("one trains", lambda: any(agent.begun() for agent in agents.all), 90)
        first, spare = sorted(agents.all, key=lambda agent: not agent.begun())
        (tmp_path / "stop").touch()
        assert [agent.wait(90) for agent in (first, spare)] == [0, 0], spare.text
    assert "returned [0]" in first.text
    assert "returned []" in spare.text
    assert not spare.begun()
