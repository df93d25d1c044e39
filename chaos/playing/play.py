"""Play one history: start a cluster, do to it what the scenario says, follow it to its end.

Everything that is done to the job is triggered by its own events, so that the same scenario meets the same
job at the same place whatever the machine's speed.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from chaos.faults.events import EventsFull, OfReader
from chaos.faults.fault import Fault, node_name
from chaos.faults.orders import Announce, Coming, Join
from chaos.faults.process import Continue
from chaos.history.follow import Event, Follower, Injection, Picture, picture
from chaos.machine.clocks import Clocks
from chaos.machine.cluster import Cluster, Launch
from chaos.machine.hung_files import HungFiles
from chaos.machine.leftovers import keys_left, leases_left, ports_left, shared_memory, shared_memory_left
from chaos.machine.network import DEVICE, Network
from chaos.machine.small_disk import SmallDisk
from chaos.machine.strangers import Port, sockets
from chaos.playing.observer import Observer
from chaos.playing.standing import Standing
from chaos.schedules.schedule import bounds
from chaos.scripts import ASKED, mark_of
from chaos.servers.etcd import EtcdCluster, EtcdServer
from chaos.servers.metadata import cloud_of
from chaos.servers.s3 import LOOPBACK
from chaos.servers.s3_proxy import Harm, S3Proxy
from checkpointing import open_store, verify
from checkpointing.errors import CheckpointError
from elastic3d import etcd_keys as keys
from elastic3d.clock import SYSTEM, Clock
from elastic3d.errors import EtcdError, UsageError
from elastic3d.etcd import EtcdClient
from elastic3d.membership.orders import order_drain
from elastic3d.values import Layout

RESIDENT, RESTART = "resident", "restart"
"""The modes in which a job is played, as `--rdzv-conf=mode=` has them."""
TRIES = 3
"""Times that torchrun may start a script's workers anew for each fault: those whose peer died end by themselves."""
_LISTENING = ("generation.sealed", "state.restored")
"""Events by which nodes, and then their trainers, listen on all the ports that they need."""
_TRIED = 2
"""Times that what is undone at the end is tried."""
TRAIN_GPT = Path(__file__).parents[1] / "scripts" / "train_gpt.py"


class Etcd(Protocol):
    """An etcd server the job uses."""

    @property
    def endpoint(self) -> str:
        """HOST:PORT, several separated by commas."""
        ...

    def client(self) -> EtcdClient:
        """Return a client that may see everything."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A job: how many nodes, for how long, and on what model. store: None for a folder of the history's own.

    labels: where the first nodes stand, in order, "" for nowhere in particular. proxy: what stands before the store.
    network: where each node is a host of its own; etcd has to serve at its address, too. clocks: where each node has a
    wall clock of its own. disk: what `store` is on, where it is a file system of its own. hung: the one of which the
    script is told the folder, where it is told of one that does not answer. step_pattern: of lines that tell a step
    where the script is restarted, as `chaos.playing.step_lines` takes it.
    """

    nodes: int = 4
    slots: int = 1
    steps: int = 60
    seed: int = 17
    layout: Layout | None = None
    store: str | None = None
    global_batch: int = 8
    micro_batch: int = 2
    blocks: int = 8
    width: int = 208
    context: int = 64
    options: tuple[str, ...] = ()
    conf: Mapping[str, str] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    script: Path = TRAIN_GPT
    step_pattern: str = ""
    # How long the job may be silent before the history is given up: see `standing`.
    patience: float = 180.0
    proxy: S3Proxy | None = field(default=None, compare=False, repr=False)
    network: Network | None = field(default=None, compare=False, repr=False)
    clocks: Clocks | None = field(default=None, compare=False, repr=False)
    disk: SmallDisk | None = field(default=None, compare=False, repr=False)
    hung: HungFiles | None = field(default=None, compare=False, repr=False)

    @property
    def resident(self) -> bool:
        """Whether its script calls `elastic3d.run`; otherwise torchrun restarts it at each change of nodes."""
        return self.conf.get("mode", RESIDENT) == RESIDENT

    def arguments(self, *, store: str, events: Path, out: Path) -> tuple[str, ...]:
        """Return the training script's arguments."""
        layout = () if self.layout is None else (f"--layout={self.layout.request()}",)
        return (
            f"--steps={self.steps}",
            f"--seed={self.seed}",
            f"--global-batch={self.global_batch}",
            f"--micro-batch={self.micro_batch}",
            f"--blocks={self.blocks}",
            f"--width={self.width}",
            f"--context={self.context}",
            f"--store={store}",
            f"--events={events}",
            f"--out={out}",
            *layout,
            *self.options,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a history.

    asked: the layout that anybody's script asks for, None for none.
    killed, dismissed: nodes ended by SIGKILL and by SIGTERM. unwanted: nodes that were to be turned away. undone:
    faults whose moment never came. late: those that were begun, and had not happened when it ended. unmet: those
    that no request of the store has met since. failure: that it was left standing, and was given up, or "". logs: by
    node, the end of what an agent printed that ended as it should not have. store: the URL of its checkpoints.
    injections: what was done, and when. made: the faults that were
    made, and when. hit: the node that each of `made` happened to, "" for none. events: of all nodes, by this
    machine's clock. damage: what was found wrong with committed checkpoints when every byte of the store was read
    at the end.
    """

    setting: Setting
    faults: tuple[Fault, ...]
    picture: Picture
    digest: str | None
    exit_codes: Mapping[str, int | None]
    killed: tuple[str, ...]
    undone: tuple[Fault, ...]
    leftovers: tuple[str, ...]
    dismissed: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    failure: str = ""
    logs: Mapping[str, str] = field(default_factory=dict)
    store: str = ""
    injections: tuple[Injection, ...] = ()
    made: tuple[tuple[Fault, float], ...] = ()
    hit: tuple[str, ...] = ()
    events: tuple[Event, ...] = ()
    damage: tuple[str, ...] = ()
    unmet: tuple[Fault, ...] = ()
    late: tuple[Fault, ...] = ()
    asked: Layout | None = None


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
        self._disks = ExitStack()
        self._events_disks: dict[str, SmallDisk] = {}
        self.follower = Follower(events, None if setting.clocks is None else setting.clocks.righted)
        self._events: list[Event] = []
        self.injections: list[Injection] = []
        self.made: list[tuple[Fault, float]] = []
        self.hit: list[str] = []
        self.late: list[Fault] = []
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
        host = LOOPBACK if setting.network is None else setting.network.address
        self._clouds = {
            fault.node: (fault.cloud, cloud_of(fault.cloud, host)) for fault in faults if isinstance(fault, Announce)
        }
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
        self._observer = (
            None
            if setting.resident
            else Observer(self.cluster, etcd.client, self.root, events, clock, setting.step_pattern)
        )
        if any(isinstance(fault, EventsFull) for fault in faults):
            for number in range(setting.nodes):
                self._lay_events(events, node_name(number), workdir / "disks")

    def _lay_events(self, events: Path, name: str, below: Path) -> None:
        """Have a node's events written to a disk of its own, by a link where their file would be."""
        disk = self._disks.enter_context(SmallDisk(below / name))
        file = disk.folder / f"{name}-0.jsonl"
        file.touch()
        (events / file.name).symlink_to(file)
        self._events_disks[name] = disk

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
        return Outcome(
            setting=self.setting,
            faults=tuple(faults),
            picture=self.picture,
            digest=self.digest(),
            exit_codes=self.cluster.exit_codes(),
            killed=tuple(node.name for node in nodes if node.killed),
            dismissed=tuple(node.name for node in nodes if node.dismissed),
            unwanted=tuple(node.name for node in nodes if node.unwanted),
            undone=tuple(self.waiting),
            late=tuple(self.late),
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
        """Return what is wrong with the checkpoints that the job committed, from every byte of its store."""
        if not self.has_saved:
            return ()
        if self.setting.proxy is not None:
            self.setting.proxy.harms.clear()
        try:
            findings = [one for one in verify(open_store(self.store, write=False)) if one.checkpoints]
            return tuple(f"{finding.object}: {finding.fault}, {finding.detail}" for finding in findings)
        except CheckpointError as error:
            return (f"{self.store} cannot be read: {error}",)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo what was done to the job and close, at the end of the block, whatever ends it.

        What cannot be undone is an error where nothing else ended the block, and otherwise a note on what did.
        """
        try:
            yield
        except BaseException as ended:
            try:
                self.undo()
            except Exception as error:  # noqa: BLE001 - what ended the block comes first
                ended.add_note(f"what was done to the job could not be undone: {error}")
            raise
        else:
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
        """End the metadata servers, look at the job no more, and keep the events of disks that are taken away."""
        if self._observer is not None:
            self._observer.close()
        for _, cloud in self._clouds.values():
            cloud.stop()
        for path in self.follower.folder.glob("*.jsonl"):
            if path.is_symlink():
                whole = path.read_bytes()
                path.unlink()
                path.write_bytes(whole)
        self._disks.close()

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
        return self._events_disks[name]

    @property
    def root(self) -> str:
        return f"/elastic3d/{self.cluster.launch.run_id}/"

    def inject(self) -> None:
        now = self.clock.monotonic()
        due = [item for item in self._later if item[0] <= now]
        for item in due:
            self._later.remove(item)
            item[1]()
        for fault in list(self.waiting):
            now, before = self.clock.wall(), len(self.injections)
            if fault.when.come(self.picture) and fault.make(self):
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
