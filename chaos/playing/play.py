"""Play one history: start a cluster, do to it what the scenario says, follow it to its end.

Everything that is done to the job is triggered by its own events, so that the same scenario meets the same
job at the same place whatever the machine's speed.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from chaos.faults.events import OfReader
from chaos.faults.fault import Fault, node_name
from chaos.faults.orders import Announce, Coming, Join
from chaos.faults.process import Continue
from chaos.history.follow import Event, Follower, Injection, Picture, picture
from chaos.machine.clocks import Clocks
from chaos.machine.closing import ClosingStack
from chaos.machine.cluster import Cluster, Launch
from chaos.machine.hung_files import HungFiles
from chaos.machine.leftovers import keys_left, leases_left, ports_left, shared_memory, shared_memory_left
from chaos.machine.network import DEVICE, Network
from chaos.machine.priority import before_others
from chaos.machine.small_disk import SmallDisk
from chaos.machine.spoilt_file import SpoiltFile
from chaos.machine.strangers import Port, sockets
from chaos.playing.events_disks import EventsDisks
from chaos.playing.observer import Observer
from chaos.playing.outcome import Outcome
from chaos.playing.setting import RESIDENT, Etcd, Setting
from chaos.playing.standing import Standing
from chaos.schedules.schedule import bounds
from chaos.scripts import ASKED, mark_of
from chaos.servers.etcd import EtcdCluster, EtcdServer
from chaos.servers.metadata import Cloud, Provider, cloud_of
from chaos.servers.s3 import LOOPBACK
from chaos.servers.s3_proxy import Harm
from checkpointing import Ref, open_store, read_latest, verify
from checkpointing.errors import CheckpointError
from elastic3d import etcd_keys as keys
from elastic3d.clock import SYSTEM, Clock
from elastic3d.errors import EtcdError, UsageError
from elastic3d.membership.orders import order_drain
from elastic3d.values import Layout

TRIES = 3
"""Times that torchrun may start a script's workers anew for each fault: those whose peer died end by themselves."""
_LISTENING = ("generation.sealed", "state.restored")
"""Events by which nodes, and then their trainers, listen on all the ports that they need."""
_TRIED = 2
"""Times that what is undone at the end is tried."""


Watcher = Callable[[Picture], None]


def play(
    setting: Setting,
    faults: Sequence[Fault] = (),
    *,
    etcd: Etcd,
    workdir: Path,
    name: str = "job",
    watch: Watcher | None = None,
    clock: Clock = SYSTEM,
) -> Outcome:
    """Play `faults` on a job of `setting` under `workdir` and return the outcome; `watch` sees each new picture."""
    player = Player(setting, faults, etcd, workdir, name, watch, clock)
    with player.cluster:
        with player.undone():
            failure = player.run()
        return player.outcome(faults, failure)


class Player:
    """A history while it is played. A longer one overrides `run`, and who is let in."""

    def __init__(
        self,
        setting: Setting,
        faults: Sequence[Fault],
        etcd: Etcd,
        workdir: Path,
        name: str,
        watch: Watcher | None,
        clock: Clock,
        among: tuple[int, int] | None = None,
    ) -> None:
        self.setting, self.etcd, self.watch, self.clock = setting, etcd, watch, clock
        self.waiting = list(faults)
        self.picture = Picture()
        self.out, events = workdir / "out", workdir / "events"
        self.out.mkdir(parents=True)
        events.mkdir()
        self._beside = ClosingStack()
        self._observer: Observer | None = None
        self._clouds: dict[str, tuple[Provider, Cloud]] = {}
        self._events_disks = EventsDisks(events)
        self.follower = Follower(events, None if setting.clocks is None else setting.clocks.righted)
        self._events: list[Event] = []
        self.injections: list[Injection] = []
        self.made: list[tuple[Fault, float]] = []
        self.hit: list[str] = []
        self.late: list[Fault] = []
        self._in_time: set[Fault] = set()
        self._over = False
        self._harms: list[tuple[Fault, Harm, int]] = []
        self._later: list[tuple[float, Callable[[], object]]] = []
        self._shared_memory = shared_memory()
        self._ports: dict[str, tuple[str, Port]] = {}
        comers = sorted(
            (fault for fault in faults if isinstance(fault, Coming)), key=lambda one: not isinstance(one, Join)
        )
        self._coming = {node_name(setting.nodes + number): fault for number, fault in enumerate(comers)}
        self._labels = {node_name(number): labels for number, labels in enumerate(setting.labels)}
        run_id = f"{name}-{uuid.uuid4().hex[:8]}"
        self.store = f"{setting.store.rstrip('/')}/{run_id}" if setting.store else (workdir / "store").as_uri()
        low, high = among or bounds(faults, setting.nodes)
        self.cluster = Cluster(
            Launch(
                run_id=run_id,
                endpoint=self._endpoint(),
                script=setting.script,
                script_args=(
                    *setting.arguments(store=self.store, events=events, out=self.out),
                    *dict.fromkeys(argument for fault in faults for argument in fault.arguments()),
                ),
                min_nodes=low,
                max_nodes=high,
                slots=setting.slots,
                # The first generation waits for all nodes, however far apart their agents start on a busy machine.
                conf={
                    "mode": RESIDENT,
                    "last_call": "60" if high == setting.nodes else "8",
                    **setting.conf,
                    **{key: value for fault in faults for key, value in fault.conf().items()},
                },
                max_restarts=0 if setting.resident else TRIES * len(faults),
                # elastic3d.run sees to that itself.
                environment={} if setting.resident or setting.network is None else {"GLOO_SOCKET_IFNAME": DEVICE},
            ),
            workdir / "nodes",
            setting.network,
            setting.clocks,
            readers=any(isinstance(fault, OfReader) for fault in faults),
        )

    def _begin(self) -> None:
        """Start what stands beside the job until `close`."""
        setting, events = self.setting, self.follower.folder
        host = LOOPBACK if setting.network is None else setting.network.address
        for fault in self.waiting:
            if isinstance(fault, Announce):
                cloud = cloud_of(fault.cloud, host)
                self._beside.callback(cloud.stop)
                self._clouds[fault.node] = fault.cloud, cloud
        if not setting.resident:
            self._observer = Observer(
                self.cluster, self.etcd.client, self.root, events, self.clock, setting.step_pattern
            )
            self._beside.callback(self._observer.close)
        nodes = (*map(node_name, range(setting.nodes)), *self._coming)
        self._events_disks.lay(self.waiting, nodes, self._beside)

    def _endpoint(self) -> str:
        """Return where nodes reach etcd."""
        if self.setting.network is None:
            return self.etcd.endpoint
        ports = (one.rpartition(":")[2] for one in self.etcd.endpoint.split(","))
        return ",".join(f"{self.setting.network.address}:{port}" for port in ports)

    def run(self) -> str:
        started_at = self.clock.wall()
        for number in range(self.setting.nodes):
            self.start(node_name(number))
        # Under mode=restart there is no gate: a node is started when it shall come.
        for name in self._coming if self.setting.resident else ():
            self.start(name, held=True)
        standing = Standing.since(self.clock.monotonic(), self.setting.patience)
        while True:
            self._kill_who_sleeps()
            running = set(self.cluster.running())
            if self._observer is not None and self._observer.look():
                standing.heard = self.clock.monotonic()
            new = self.follower.poll()
            standing.hear(new, self.clock.monotonic())
            if new:
                self._events += new
                self.picture = picture(self._events, self.injections, started_at)
                if self.watch is not None:
                    self.watch(self.picture)
                self.see_ports_after(new)
            self.inject()
            if not running and not new:
                return ""
            if running <= set(self._coming) and not new:
                # Those that are still at their gates when all others have ended would wait forever.
                for name in running:
                    self.cluster.kill_node(name)
            if why := standing.why(self.picture, running, self.clock.monotonic()):
                return why
            self.clock.sleep(0.01)

    def see_ports_after(self, new: Sequence[Event]) -> None:
        """Take note of the sockets on which the nodes' processes listen now, if new events say that they do."""
        listening = any(event.name in _LISTENING for event in new)
        for node in self.cluster.nodes if listening else ():
            if node.alive:
                self._ports |= {inode: (node.name, port) for inode, port in sockets(node.processes()).items()}

    def outcome(self, faults: Sequence[Fault], failure: str) -> Outcome:
        """Return what became of the job, before the cluster is closed."""
        nodes = self.cluster.nodes
        # Their moments were seen only when the job was over.
        late = [fault for fault in self.waiting if fault not in self._in_time and fault.when.come(self.picture)]
        return Outcome(
            setting=self.setting,
            faults=tuple(faults),
            picture=self.picture,
            digest=self.digest(),
            exit_codes=self.cluster.exit_codes(),
            killed=tuple(node.name for node in nodes if node.killed),
            dismissed=tuple(node.name for node in nodes if node.dismissed),
            unwanted=tuple(node.name for node in nodes if node.unwanted),
            undone=tuple(fault for fault in self.waiting if fault not in late),
            late=(*self.late, *late),
            unmet=tuple(fault for fault, harm, times in self._harms if harm.times == times),
            # A history that was given up is ended by force later: its leftovers prove nothing.
            leftovers=() if failure else self.leftovers(),
            failure=failure,
            logs={
                node.name: self.cluster.tail(node.name)
                for node in nodes
                if not node.killed and (node.alive or node.process.returncode)
            },
            store=self.store,
            injections=tuple(self.injections),
            made=tuple(self.made),
            hit=tuple(self.hit),
            events=tuple(self._events),
            damage=() if failure else self.damage(),
            asked=self.asked(),
        )

    @property
    def has_saved(self) -> bool:
        """Whether the job has committed any checkpoint."""
        return bool(self.picture.checkpoints)

    def damage(self) -> tuple[str, ...]:
        """Return what is wrong with the checkpoints that the job committed, from every byte of its store.

        Also where `latest` names none, or not that of the last step.
        """
        if not self.has_saved:
            return ()
        if self.setting.proxy is not None:
            self.setting.proxy.harms.clear()
        try:
            store = open_store(self.store, write=False)
            findings = [one for one in verify(store) if one.checkpoints]
            damaged = [f"{finding.object}: {finding.fault}, {finding.detail}" for finding in findings]
            return (*damaged, *_misnamed(read_latest(store), self.picture))
        except CheckpointError as error:
            return (f"{self.store} cannot be read: {error}",)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Start what stands beside the job; at the end of the block, whatever ends it, undo what was done and close.

        The block runs before the job itself, where the machine has more to do than it can.
        What cannot be undone is an error where nothing else ended the block, and otherwise a note on what did.
        """
        try:
            self._begin()
            with before_others():
                yield
        except BaseException as ended:
            try:
                self._finish()
            except Exception as error:  # noqa: BLE001 - what ended the block comes first
                ended.add_note(f"what was done to the job could not be undone: {error}")
            raise
        else:
            self._finish()

    def _finish(self) -> None:
        try:
            self.undo()
        finally:
            self.close()

    def undo(self) -> None:
        """Carry out pending actions at once: no etcd stays stopped, no store away, and no node slow.

        One that is put off, since etcd does not serve yet, is tried once more after the others; one that raises keeps
        none of them from it, and a signal does not either: the first error is raised at the end, a signal before it.
        """
        self._over = True
        tried: list[Callable[[], object]] = []
        errors: list[BaseException] = []
        while self._later:
            _, action = self._later.pop(0)
            if tried.count(action) == _TRIED:
                continue
            tried.append(action)
            try:
                action()
            except BaseException as error:  # noqa: BLE001 - raised once the others are done
                errors.append(error)
        if errors:
            raise min(errors, key=lambda error: isinstance(error, Exception))

    def close(self) -> None:
        """End all that stands beside the job, whatever becomes of one; keep the events of disks that are taken away."""
        self._beside.close()

    def digest(self) -> str | None:
        try:
            digest = json.loads((self.out / "result.json").read_text())["digest"]
        except (FileNotFoundError, ValueError, KeyError):
            return None
        return str(digest)

    def asked(self) -> Layout | None:
        file = self.out / ASKED
        return Layout.parse(file.read_text()) if file.exists() else None

    def leftovers(self) -> tuple[str, ...]:
        """Return what the job left behind, as text; waits a while for what ends by itself."""
        return (
            *map(str, self.cluster.leftovers()),
            *(() if self.setting.network is None else self.setting.network.occupied()),
            *ports_left(self._ports),
            *self.cluster.groups_left(),
            *(f"temporary file {path}" for path in self.cluster.files_left()),
            *shared_memory_left(self._shared_memory),
            *leases_left(self.etcd.client, self.root, alone=isinstance(self.etcd, EtcdCluster)),
            *keys_left(self.etcd.client, self.root),
        )

    def marked(self, step: int) -> str | None:
        try:
            return str(json.loads((self.out / mark_of(step)).read_text()).get("node") or "")
        except (FileNotFoundError, ValueError):
            return None

    def note(self, kind: str, node: str = "") -> None:
        self.injections.append(Injection(kind=kind, node=node, at=self.clock.wall()))

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        self._later.append((self.clock.monotonic() + seconds, action))

    def at_end(self, action: Callable[[], object]) -> None:
        self._later.append((math.inf, action))

    def harm(self, fault: Fault, harm: Harm) -> None:
        assert self.setting.proxy is not None, "no proxy stands before this store"
        self._harms.append((fault, harm, harm.times))
        self.setting.proxy.harms.append(harm)

    def happens(self, fault: Fault) -> bool:
        if self._over:
            self.late.append(fault)
            made = [one for one in zip(self.made, self.hit, strict=True) if one[0][0] is not fault]
            self.made, self.hit = [one for one, _ in made], [node for _, node in made]
        else:
            now = self.clock.wall()
            self.made = [(one, now if one is fault else at) for one, at in self.made]
        return not self._over

    def start(self, name: str, *, held: bool = False) -> None:
        labels = self._labels.get(name, "")
        conf = {}
        if name in self._clouds:
            provider, cloud = self._clouds[name]
            conf = {"notices": str(provider), "notices_url": cloud.url}
        fault = self._coming.get(name)
        self.cluster.start_node(
            name,
            held=held,
            conf=conf | ({"labels": labels} if labels else {}),
            environment=None if fault is None else fault.ENVIRONMENT,
        )

    def held(self, word: str) -> str:
        return next(name for name, fault in self._coming.items() if word == fault.WORD)

    def release(self, word: str) -> None:
        name = self.held(word)
        fault = self._coming.pop(name)
        self.note(word, name)
        if self.setting.resident:
            self.cluster.node(name).unwanted = fault.UNWANTED
            self.cluster.release_node(name)
        else:
            self.start(name)

    def over(self) -> bool:
        # Nobody asks etcd all the time before any node has ended.
        if not self.picture.ended:
            return False
        try:
            with self.etcd.client() as client:
                return client.get(self.root + keys.END) is not None
        except EtcdError:
            return False

    def preempt(self, name: str) -> None:
        self._clouds[name][1].preempt()

    def order_drain(self, name: str, seconds: float) -> bool:
        if isinstance(self.etcd, EtcdCluster) and not self.etcd.serving:
            return False
        # An order is obeyed before it is written down here.
        self.note("drain", name)
        try:
            with self.etcd.client() as client:
                order_drain(client, self.root, name, seconds=seconds, by="chaos")
        except (UsageError, EtcdError):
            # It has come back empty, and the node has not registered again; or it is full.
            self.injections.pop()
            return False
        return True

    def revoke(self, name: str) -> bool:
        with self.own_etcd.client() as client:
            items, _revision = client.range(self.root + keys.MEMBERS)
            leases = [item.lease for item in items if item.lease and f"/{name}@" in item.key]
            if leases:
                self.note("lease revoked", name)
                client.revoke(leases[0])
        return bool(leases)

    def delete_keys(self) -> bool:
        self.note("keys deleted")
        with self.own_etcd.client() as client:
            if client.delete(self.root, prefix=True):
                return True
        self.injections.pop()
        return False

    @property
    def password_file(self) -> Path:
        return Path(self.setting.conf["password_file"])

    @property
    def own_etcd(self) -> EtcdCluster:
        assert isinstance(self.etcd, EtcdCluster), "only an etcd of our own may be broken"
        return self.etcd

    @property
    def own_server(self) -> EtcdServer:
        assert isinstance(self.etcd, EtcdServer), "only the data of an etcd of one member may be replaced"
        return self.etcd

    @property
    def network(self) -> Network:
        assert self.setting.network is not None, "the nodes share one host"
        return self.setting.network

    @property
    def clocks(self) -> Clocks:
        assert self.setting.clocks is not None, "the nodes share one clock"
        return self.setting.clocks

    @property
    def store_folder(self) -> str:
        return self.store.removeprefix("file://")

    @property
    def hung_files(self) -> HungFiles:
        assert self.setting.hung is not None, "the script is told of no file system that does not answer"
        return self.setting.hung

    @property
    def store_disk(self) -> SmallDisk:
        assert self.setting.disk is not None, "the store is on no disk of its own"
        return self.setting.disk

    def events_disk(self, name: str) -> SmallDisk:
        return self._events_disks.disks[name]

    def events_file(self, name: str) -> SpoiltFile:
        return self._events_disks.files[name]

    @property
    def root(self) -> str:
        return f"/elastic3d/{self.cluster.launch.run_id}/"

    def inject(self) -> None:
        now = self.clock.monotonic()
        due = [item for item in self._later if item[0] <= now]
        for item in due:
            self._later.remove(item)
            item[1]()
        over = 0 < self.setting.steps <= self.picture.step
        for fault in list(self.waiting):
            now, before = self.clock.wall(), len(self.injections)
            if not fault.when.come(self.picture):
                continue
            if not over:
                self._in_time.add(fault)
            elif fault not in self._in_time and fault.when.step < self.setting.steps and not fault.when.event:
                # Events come in lumps on a busy machine: nothing may be there any more that it can happen to.
                self.waiting.remove(fault)
                self.late.append(fault)
                continue
            if fault.make(self):
                self.waiting.remove(fault)
                self.made.append((fault, now))
                self.hit.append(next((one.node for one in self.injections[before:]), ""))

    def _kill_who_sleeps(self) -> None:
        """Once all running nodes are stopped for good the job is over: kill them, and wake what is to end with them.

        Nothing but a parent-death signal ends a process that is stopped, and torchrun's workers have none.
        """
        asleep = [node.name for node in self.cluster.nodes if node.alive and node.stopped]
        woken = {fault.node for fault in self.waiting if isinstance(fault, Continue)}
        if asleep and not woken and set(self.cluster.running()) <= {*asleep, *self._coming}:
            for name in asleep:
                self.cluster.kill_node(name)
                self.cluster.wake_node(name)


def _misnamed(latest: Ref | None, picture: Picture) -> Iterator[str]:
    """Yield what `latest` does not name though nodes have said that it was committed."""
    if latest is None or latest.checkpoint is None:
        yield "latest names no checkpoint"
    elif picture.step in picture.checkpoints and latest.step != picture.step:
        yield f"latest names the checkpoint of step {latest.step}, and not that of step {picture.step}"
