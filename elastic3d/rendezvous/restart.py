"""mode=restart: any torchrun script, unchanged; the agent is the member, and torchrun restarts the workers.

torchrun's agent asks `num_nodes_waiting` ten times a second and restarts its workers when it is above 0, without
spending `--max-restarts`: through this one signal every change, death included, reaches all agents. A worker that fails
by itself, even if because its peer died, is counted by torchrun.

Each generation meets at the table that the agent of its rank 0 serves, under its own prefix. Workers do not share it
(`use_agent_store` is False): torch's prefix for them is the agent's own restart count, which differs between agents
after a change of membership.
"""

from __future__ import annotations

import atexit
import os
import queue
import secrets
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch.distributed.elastic.rendezvous.api import (
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from elastic3d import output
from elastic3d.clock import SYSTEM
from elastic3d.errors import Elastic3dError, EtcdUnavailable, UsageError
from elastic3d.etcd import EtcdClient
from elastic3d.log import bind_process, process_log
from elastic3d.membership import actions as acts
from elastic3d.membership import events as m
from elastic3d.membership.driver.ended import end_seen
from elastic3d.membership.driver.links import Links
from elastic3d.membership.driver.member import Member
from elastic3d.membership.records import MemberRecord, Pulse
from elastic3d.planner import Plan
from elastic3d.rendezvous import agent, closing
from elastic3d.rendezvous.connect import connect, encryption
from elastic3d.rendezvous.errors import RendezvousEnded, as_torchs
from elastic3d.rendezvous.graceful import let_agents_of
from elastic3d.rendezvous.guard import DONE, VARIABLE
from elastic3d.rendezvous.seat import GenerationOver, Seat
from elastic3d.rendezvous.settings import Settings
from elastic3d.rendezvous.store import GenerationStore
from elastic3d.rendezvous.table import KeyTableServer
from elastic3d.shortfall import MemoryBound
from elastic3d.trust.agreement import SecretNews, What
from elastic3d.trust.credentials import Credentials
from elastic3d.trust.listening import Refusal, raise_file_limit
from elastic3d.trust.secret import obtain
from elastic3d.values import Generation, Layout, Node

END_PATIENCE = 30.0
"""Seconds that a finished agent waits to hear that the job is over."""

AGAIN = 0.2
"""Seconds after which an agent that gives up looks whether another generation has begun meanwhile."""


class RestartHandler(RendezvousHandler):
    """One agent's membership. torchrun calls it on its main thread; the member acts on its own."""

    def __init__(self, settings: Settings, backend: str) -> None:
        self._settings, self._backend = settings, backend
        self._begun, self._end_seen = agent.begun(), 0
        let_agents_of(RestartHandler, RestartHandler._leave)
        # What a program is handling as it launches the agent says nothing about the agent.
        self._handled = sys.exc_info()[1]
        self._pid = os.getpid()
        self._store: GenerationStore | None = None
        self._client: EtcdClient | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._member: Member | None = None
        self._links: Links | None = None
        self._table: KeyTableServer | None = None
        self._credentials: Credentials | None = None
        self._node: Node | None = None
        self._lock = threading.Lock()
        self._waiting = self._changed = self._closed = False
        self._wanted = ""
        self._running: Generation | None = None
        self._news: queue.SimpleQueue[Generation | acts.Exit] = queue.SimpleQueue()

    def get_backend(self) -> str:
        """Return the name torchrun asked for."""
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        """Return False: workers meet in a store of their own."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Block until a generation with this node is sealed; return its store, this node's rank and their number.

        Raises RendezvousEnded if the job failed or the run id was closed, EtcdAway or EtcdRefusedUs if etcd cannot be
        used, torch's RendezvousGracefulExitError if the job finished without this node.
        """
        if self._closed:
            raise RendezvousEnded(closing.words(self._settings.run_id, self._settings.node))
        if self._member is None:
            self._pid = os.getpid()
            self._join()
        elif self._foreign():
            raise UsageError(
                f"this rendezvous handler takes part in a job for process {self._pid}, from which this one was forked; "
                "make a new handler in this process"
            )
        else:
            self._leave_if_closed()
        while True:
            try:
                return self._meet(self._await_go())
            except GenerationOver:
                continue

    def _await_go(self) -> Generation:
        assert self._member is not None
        assert self._node is not None
        with self._lock:
            self._waiting, self._changed = True, False
            # Asked again while nothing changed: torchrun's own workers failed.
            if self._running is not None and not self._wanted:
                self._member.tell(m.TrainerFailed(key=self._running.key, detail=f"workers failed on {self._node.name}"))
            elif self._wanted:
                self._member.tell(m.TrainersPrepared(key=self._wanted))
        return self._next()

    def _meet(self, generation: Generation) -> RendezvousInfo:
        """Open the generation's store and agree on rank 0's address; GenerationOver if it ends meanwhile."""
        assert self._node is not None
        rank = generation.first_rank(self._node.name, self._node.incarnation)
        assert rank is not None
        position = [node.name for node in generation.nodes].index(self._node.name)

        def over() -> bool:
            return self._changed or self._running is not generation

        def finished() -> None:
            if self._member is not None:
                self._member.tell(m.MainFinished(key=generation.key))

        first = generation.nodes[0]
        root = f"{self._settings.run_id}/"
        if self._table is not None:
            self._table.forget(root, generation.number)
        prefix = f"{root}{generation.key}/"
        seat = Seat(first.address, first.store_port, prefix, over, self._shown, refused=_say)
        store = GenerationStore(seat, position, len(generation.nodes), finished)
        # torch's C++ code would not keep it alive.
        self._store = store
        info = RendezvousStoreInfo.build(position, store, local_addr=self._node.address)
        store.admit()
        return RendezvousInfo(store, position, len(generation.nodes), info)

    def _shown(self) -> Credentials:
        assert self._credentials is not None
        return self._credentials

    def is_closed(self) -> bool:
        """Return whether this agent is done with the job or, while it takes part, anybody has closed the run id."""
        if self._closed or self._client is None:
            return self._closed
        with as_torchs():
            return closing.closed_by(self._client, self._settings.root) is not None

    def set_closed(self) -> None:
        """Close the run id for everybody: running workers go on, and no node finds another rendezvous under it."""
        with as_torchs(), self._connected() as client:
            closing.close(client, self._settings.root, self._settings.node)
        self._closed = True

    @contextmanager
    def _connected(self) -> Iterator[EtcdClient]:
        """Yield the member's client, or a temporary one."""
        if self._client is not None:
            yield self._client
            return
        with connect(self._settings) as client:
            yield client

    def _foreign(self) -> bool:
        """Return whether this is a fork of the process that takes part."""
        return os.getpid() != self._pid

    def _leave_if_closed(self) -> None:
        """Leave and raise RendezvousEnded once somebody has closed the run id."""
        if self._client is None:
            return
        try:
            by = closing.closed_by(self._client, self._settings.root)
        except EtcdUnavailable:
            return  # the membership knows what to do then
        if by is not None:
            self._closed = True
            self._leave(clean=True)
            raise RendezvousEnded(closing.words(self._settings.run_id, by))

    def num_nodes_waiting(self) -> int:
        """Return 1 when this agent's workers have to be restarted into another generation, else 0."""
        if self._foreign():
            return 0
        with self._lock:
            return int(self._changed and not self._waiting)

    def get_run_id(self) -> str:
        """Return --rdzv-id."""
        return self._settings.run_id

    def shutdown(self) -> bool:
        """Leave. With an error in flight torchrun has given up on its workers, and the job fails everywhere.

        Without one this node has finished: the run id closes for everybody once all have, since nodes that still work
        go on when others are done. Nothing happens in a forked child.
        """
        self._closed = True
        if self._member is None or self._foreign():
            return True
        error = sys.exc_info()[1]
        if error is self._handled:
            error = None
        if error is not None:
            self._give_up(f"{self._settings.node}: torchrun gave up: {error}"[:4000])
        elif self._running is not None:
            self._member.tell(m.MainFinished(key=self._running.key))
            self._await_exit(END_PATIENCE)
        self._leave(clean=error is None)
        return True

    def _give_up(self, why: str) -> None:
        """Have the job fail everywhere, in whichever generation it is by now, and wait until it has.

        The workers whose failure ended it may be of a generation that has just been replaced.
        """
        assert self._member is not None
        until, said = SYSTEM.monotonic() + END_PATIENCE, ""
        while (self._store is not None or self._wanted) and SYSTEM.monotonic() < until:
            with self._lock:
                key = self._running.key if self._running is not None else self._wanted
            if key and key != said:
                self._member.tell(m.TrainerFailed(key=key, detail=why, error=True))
                said = key
            if self._await_exit(AGAIN):
                return

    def _await_exit(self, patience: float) -> bool:
        """Return whether the membership says within these seconds that this node's part is over."""
        try:
            while not isinstance(self._news.get(timeout=patience), acts.Exit):
                pass
        except queue.Empty:
            return False
        return True

    def _join(self) -> None:
        settings = self._settings
        output.unblock()
        bind_process(run=settings.run_id, node=settings.node)
        token = secrets.token_hex(8)
        os.environ[VARIABLE] = token
        self._guard = subprocess.Popen(
            [sys.executable, "-S", "-E", str(Path(__file__).with_name("guard.py")), str(os.getpid())],
            env={k: v for k, v in os.environ.items() if k != VARIABLE},
            stdin=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        self._tell_guard(token.encode() + b"\n")
        raise_file_limit()
        with as_torchs():
            self._client = connect(settings)
            self._leave_if_closed()
            self._end_seen = end_seen(self._client, settings.root, self._begun, SYSTEM)
            secret = obtain(self._client, settings.root)
            encrypted = encryption(settings)
        self._credentials = Credentials(secret=secret, id=settings.node, certificate=settings.cert, key=settings.key)
        self._links = Links(
            settings.address,
            lambda event: self._member.tell(event) if self._member else None,
            secret=secret,
            encryption=encrypted,
            refused=_say,
        )
        self._table = KeyTableServer(settings.address, self._credentials, refused=_say)
        node = Node(
            name=settings.node,
            incarnation=secrets.token_hex(6),
            address=settings.address,
            slots=(),
            heartbeat_port=self._links.port,
            store_port=self._table.port,
            labels=settings.labels,
            home=settings.home,
        )
        atexit.register(self._leave)
        self._take_part(node)

    def _tell_guard(self, word: bytes) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            try:
                self._guard.stdin.write(word)
            except OSError:
                pass  # somebody killed it

    def _take_part(self, node: Node, *, again: bool = False) -> None:
        assert self._client is not None
        assert self._links is not None
        settings, policy = self._settings, self._settings.policy
        record = MemberRecord(node=node, minimum=policy.minimum, maximum=policy.maximum, encrypted=bool(settings.cert))
        self._node = node
        self._member = Member(
            self._client,
            settings.root,
            record,
            policy,
            _no_plan,
            self._act,
            pulse=self._pulse,
            secret=self._shown().secret,
            trusted=self._take_secret,
        )
        self._member.start(self._links, again=again, end_seen=self._end_seen)

    def _rejoin(self) -> None:
        """Come back as a newcomer after the others put this node out; torchrun has stopped its workers."""
        assert self._member is not None
        assert self._node is not None
        self._member.close()
        with self._lock:
            self._running, self._wanted = None, ""
        self._take_part(replace(self._node, incarnation=secrets.token_hex(6)), again=True)

    def _take_secret(self, news: SecretNews) -> None:
        """Report a change of the run's secret, and use the new one; on the member's thread."""
        links, table = self._links, self._table
        if news.what is What.RESTORED:
            process_log().emit("secret.restored", was=news.was)
            return
        process_log().emit("secret.adopted")
        self._credentials = replace(self._shown(), secret=news.secret)
        if table is not None:
            table.set_credentials(self._credentials)
        if links is not None:
            links.set_secret(news.secret)

    def _pulse(self) -> Pulse:
        running = self._running
        if running is None:
            return Pulse(state="spare", generation=0, every=0.0)
        return Pulse(state="active", generation=running.number, every=0.0)

    def _next(self) -> Generation:
        while True:
            try:
                news = self._news.get(timeout=closing.POLL)
            except queue.Empty:
                self._leave_if_closed()
                continue
            if isinstance(news, acts.Exit) and news.rejoin:
                self._rejoin()
                continue
            if isinstance(news, acts.Exit):
                self._leave(clean=not news.failed)
                if not news.failed:
                    detail = news.detail or "this node was a spare to the end"
                    raise RendezvousGracefulExitError(f"job {self._settings.run_id} is done: {detail}")
                raise RendezvousEnded(news.detail)
            with self._lock:
                if self._wanted == news.key:
                    self._waiting, self._changed, self._wanted = False, False, ""
                    self._running = news
                    return news

    def _act(self, action: acts.Local) -> None:
        """Translate the membership's actions for torchrun."""
        with self._lock:
            match action:
                case acts.Prepare():
                    # Sealed already: planned changes are not prepared beside the running workers. Finished or not,
                    # those are over, and there may be no separate Stop for them.
                    self._running = None
                    self._wanted = action.generation.key
                    self._changed = True
                    if self._waiting and self._member is not None:
                        self._member.tell(m.TrainersPrepared(key=self._wanted))
                case acts.StartTrainers():
                    self._news.put(action.generation)
                case acts.Stop():
                    self._changed = True
                    if self._running is not None and action.key == self._running.key:
                        self._running = None
                case acts.Exit():
                    self._changed = True
                    self._news.put(action)
                case _:
                    pass

    def _leave(self, *, clean: bool = False) -> None:
        """Take no part any more. clean: torchrun has ended its workers, and what is left was detached by the user."""
        if self._foreign():
            return
        atexit.unregister(self._leave)
        member, links, client, table = self._member, self._links, self._client, self._table
        self._member = self._links = self._client = self._table = None
        if clean:
            self._tell_guard(DONE)
        self._guard = None
        if member is not None:
            member.tell(m.LeaveAsked())
            member.settle()
            member.close()
        if links is not None:
            links.close()
        if table is not None:
            table.close()
        if client is not None:
            try:
                client.close()
            except Elastic3dError:
                pass


def _say(refusal: Refusal) -> None:
    """Log a connection that was turned away; on threads that must not wait for a reader of the log."""
    process_log().emit(
        "peer.refused", port=refusal.port, peer=refusal.peer, reason=refusal.reason, more=refusal.more or None
    )


def _no_plan(
    nodes: int,
    record: MemberRecord,
    present: Layout | None,
    speeds: Sequence[float] = (),
    bound: MemoryBound | None = None,
    counts: Collection[int] | None = None,
) -> Plan:
    """Take all nodes: what they compute is up to the script."""
    return Plan(layout=Layout(), nodes=nodes)
