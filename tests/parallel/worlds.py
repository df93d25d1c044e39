"""Worlds of real ranks for the tests: processes forked from one server that has torch imported, talking over gloo.

A rank runs the real `Run` over a real process group. Its port takes the place of a keeper: it writes
snapshots to files, and a later world restores from those files through the real resolver.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import pickle
import traceback
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import distributed_c10d

from checkpointing.errors import SourceError
from checkpointing.format.tiles import digest
from checkpointing.interchange.tensors import buffer_of
from checkpointing.reading.resolver import Offered, TileSource
from elastic3d.coverage import AuditCoverage
from elastic3d.distrust import Distrust
from elastic3d.health.record import SIZE, ProgressWriter
from elastic3d.islands import Islands
from elastic3d.port import AuditReport, Flags, Go, LocalState, NearMemory, StateRestored, StepRecord
from elastic3d.provenance.record import ScriptOrigin
from elastic3d.training import Main, Run, train
from elastic3d.training.restoring import Decision
from elastic3d.training.standalone import StandalonePort
from elastic3d.values import Layout, ModelProfile, ProvenChain, StoreAt

TIMEOUT = 120
PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "elastic3d.parallel.pipeline.handed_on",
    "tests.parallel.models",
    "tests.parallel.worlds",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Orders for the hosts of a world: where to keep snapshots, and when to ask the ranks to leave.

    islands: what it merges with, as the job `run_id`. spoilt: names of snapshots of which other bytes are read.
    """

    layout: Layout
    keep: Path | None = None
    take: Path | None = None
    leave_at: Mapping[int, int] = field(default_factory=dict)
    snapshot_every: int = 0
    checkpoint_every: int = 0
    measuring: bool = False
    expects_state: bool = False
    audit: float = 0.0
    at_rest: float = 0.0
    numerics: str = "off"
    spike: str = "off"
    rollback_steps: int = 10
    newcomers: tuple[int, ...] = ()
    accidents: Mapping[int, float] = field(default_factory=dict)
    proven: ProvenChain | None = None
    origins: Mapping[int, ScriptOrigin] = field(default_factory=dict)
    islands: Islands | None = None
    run_id: str = "alone"
    spoilt: frozenset[str] = frozenset()


class Ended(BaseException):
    """The port ended the trainer, in place of `os._exit` where the test wants the process to live on."""

    def __init__(self, how: str, what: Any = None) -> None:
        super().__init__(how)
        self.how, self.what = how, what


@dataclass
class Report:
    """The observations of one rank's host."""

    rank: int
    ended: str = ""
    error: str = ""
    records: list[StepRecord] = field(default_factory=list)
    restored: tuple[str, int, int] | None = None
    detail: str = ""
    snapshots: list[tuple[int, bool, bool]] = field(default_factory=list)
    profile: ModelProfile | None = None
    audits: list[AuditReport] = field(default_factory=list)
    coverage: AuditCoverage | None = None
    proven: ProvenChain | None = None
    result: Any = None


class Host(StandalonePort):
    """The port of one rank of a test's world."""

    def __init__(self, orders: Orders, rank: int, store: tuple[str, int], prefix: str) -> None:
        super().__init__()
        # It records as a trainer does, so that no bits of these worlds depend on that.
        self.page = mmap.mmap(-1, SIZE)
        self.progress = ProgressWriter(memoryview(self.page))
        self.orders = orders
        self.report = Report(rank=rank)
        self.records = self.report.records
        self.copying = False
        together = orders.layout.cp * orders.layout.tp
        self.assignment = replace(
            self.assignment,
            run_id=orders.run_id,
            # Its snapshots are of generations before it: files are named step.generation.rank.
            generation=1 + max((int(file.name.split(".")[1]) for file in orders.take.iterdir()), default=0)
            if orders.take
            else 1,
            measuring=orders.measuring,
            rank=rank,
            node=f"node{rank // together}",
            audit=orders.audit,
            at_rest=orders.at_rest,
            numerics=orders.numerics,
            spike=orders.spike,
            rollback_steps=orders.rollback_steps,
            sheets=orders.layout.world > 1,
            newcomer=rank in orders.newcomers,
            accident=orders.accidents.get(rank),
            nodes=tuple(f"node{number // together}" for number in range(orders.layout.world)),
            world=orders.layout.world,
            layout=None if orders.measuring else orders.layout,
            store_host=store[0],
            store_port=store[1],
            store_prefix=prefix,
            snapshot_every=orders.snapshot_every,
            checkpoint_every=orders.checkpoint_every,
            expects_state=orders.expects_state or orders.take is not None,
            proven=orders.proven,
        )

    def measured(self, profile: ModelProfile, proven: ProvenChain | None = None) -> NoReturn:
        self.report.profile, self.report.proven = profile, proven
        raise Ended("measured")

    def await_go(self) -> Go:
        return Go(servers=(str(self.orders.take),) if self.orders.take else ())

    def flags(self) -> Flags:
        at = self.orders.leave_at.get(self.assignment.rank)
        return Flags(leave=at is not None and len(self.records) >= at, etcd_away=False)

    def snapshot(self, state: LocalState, *, checkpoint: bool, wait: bool) -> None:
        self.report.snapshots.append((state.step, checkpoint, wait))
        self.copying = True
        if self.orders.keep:
            content = [(spec, box, bytes(buffer_of(tensor.contiguous()))) for spec, box, tensor in state.tiles]
            file = self.orders.keep / f"{state.step}.{self.assignment.generation}.{self.assignment.rank}"
            file.write_bytes(pickle.dumps((state.facts, content)))

    def finish_copy(self) -> None:
        self.copying = False

    def copied(self, step: int, key: str, at: int) -> int | None:
        assert not self.copying, "no copy may be running"
        return None

    def restored(self, state: StateRestored) -> None:
        self.report.restored = (state.source, state.step, state.generation)
        self.report.detail, self.report.coverage = state.detail, state.audits

    def audited(self, report: AuditReport) -> None:
        self.report.audits.append(report)

    def convicted(self, report: AuditReport) -> NoReturn:
        self.report.audits.append(report)
        raise Ended("convicted", report.ranks)

    def leave(self, step: int) -> NoReturn:
        raise Ended("left", step)

    def peer_lost(self, error: BaseException, *, patience: float | None = None) -> NoReturn:
        raise Ended("peer lost", str(error))

    def done(self, digest: str | None, unsaved: int = -1) -> NoReturn:
        raise Ended("done")

    def failed(self, error: BaseException) -> NoReturn:
        raise Ended("raised", "".join(traceback.format_exception(error)))


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A snapshot in a file, with the interface of an inventory."""

    file: Path

    @property
    def step(self) -> int:
        return int(self.file.name.split(".")[0])

    @property
    def generation(self) -> int:
        return int(self.file.name.split(".")[1])

    @property
    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = pickle.loads(self.file.read_bytes())[0]
        return facts

    @property
    def tiles(self) -> list[Offered]:
        _, content = pickle.loads(self.file.read_bytes())
        return [
            Offered(spec=spec, box=box, digest=digest(spec, box, data), source="files", where=[str(self.file), number])
            for number, (spec, box, data) in enumerate(content)
        ]

    def offers(self) -> list[Offered]:
        return self.tiles


class Files:
    """The tiers of a test: a folder of snapshots stands for the keepers' memory. spoilt: files that are damaged."""

    name = "files"

    def __init__(self, spoilt: Collection[str] = ()) -> None:
        self._spoilt = spoilt
        self._read: dict[str, Any] = {}

    def inventories(self, servers: Sequence[str]) -> Sequence[Kept]:
        return [Kept(file=file) for server in servers for file in sorted(Path(server).iterdir())]

    def checkpoint(
        self, at: StoreAt, wanted: str, damaged: Sequence[str], distrusted: Sequence[Distrust] = ()
    ) -> Decision | None:
        return None

    def sources(
        self, decision: Decision, at: StoreAt | None, rank: int, near: Sequence[NearMemory] = ()
    ) -> Mapping[str, TileSource]:
        return {self.name: self}

    def fetch(self, tile: Offered) -> bytes | memoryview:
        file, number = tile.where
        if file not in self._read:
            try:
                self._read[file] = pickle.loads(Path(file).read_bytes())[1]
            except OSError as error:
                raise SourceError(str(error)) from error
        data: bytes = self._read[file][number][2]
        return bytes(len(data)) if Path(file).name in self._spoilt else data


def run_world(main: Callable[[Run], Any], orders: Orders, *, patience: float = TIMEOUT) -> list[Report]:
    """Run `main` on every rank of a world; return the hosts' reports. `main` and what it uses must be importable.

    patience: seconds for which a rank may say nothing.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    world = 1 if orders.measuring else orders.layout.world
    with _store() as store:
        prefix = uuid.uuid4().hex
        ends = [context.Pipe(duplex=False) for _ in range(world)]
        ranks = [
            context.Process(target=_rank, args=(main, orders, rank, store, prefix, ends[rank][1]), daemon=True)
            for rank in range(world)
        ]
        for rank, (_, sender) in zip(ranks, ends, strict=True):
            rank.start()
            sender.close()
        try:
            return [_receive(receiver, patience) for receiver, _ in ends]
        finally:
            for rank in ranks:
                rank.join(timeout=5)
                rank.kill()
                rank.join()


def _receive(receiver: Any, patience: float) -> Report:
    try:
        if not receiver.poll(patience):
            return Report(rank=-1, ended="timed out")
        report: Report = pickle.loads(receiver.recv_bytes())
    except EOFError:
        return Report(rank=-1, ended="died")
    return report


@contextlib.contextmanager
def _store() -> Iterator[tuple[str, int]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield "127.0.0.1", store.port
    del store


def _no_pickle(*given: Any) -> NoReturn:
    raise AssertionError(f"a pickle would be sent: {given!r:.200}")


def _rank(main: Main, orders: Orders, rank: int, store: tuple[str, int], prefix: str, sender: Any) -> None:
    host = Host(orders, rank, store, prefix)
    # No layout sends a pickle, not even through torch's own parts.
    distributed_c10d._object_to_tensor = _no_pickle

    def keep_result(run: Run) -> None:
        host.report.result = main(run)

    try:
        train(keep_result, host, tiers=Files(orders.spoilt), origin=orders.origins.get(rank), islands=orders.islands)
    except Ended as end:
        host.report.ended, host.report.error = end.how, "" if end.what is None else str(end.what)
    except Exception as error:  # noqa: BLE001  # the edge of the process: whatever happened is told to the test
        host.report.ended, host.report.error = "crashed", "".join(traceback.format_exception(error))
    sender.send_bytes(pickle.dumps(host.report))
    sender.close()
    os._exit(0)
