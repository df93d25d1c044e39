"""Every check passes on a healthy machine, and fails on the fault it is there to find."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointing.format.tiles import TensorSpec
from elastic3d.admission.check import Check, CheckResult, Unfit, run_checks
from elastic3d.admission.devices import ROWS, check_devices, present, product
from elastic3d.admission.host import AWAY, BUILT, available_memory, clock_goes, disk, room, store_folder
from elastic3d.admission.reach import ReachTarget, neighbours, reach
from elastic3d.clock import SYSTEM
from elastic3d.devices.cpu import host_memory
from elastic3d.snapshots.arena import Arena
from elastic3d.snapshots.holdings import Mark, most_copies
from elastic3d.snapshots.memory import SnapshotMemory
from elastic3d.snapshots.table import SnapshotTable, lay_out
from elastic3d.values import Cause, Generation, ModelProfile, Node
from tests.clocks import HandClock
from tests.paths import ROOT

GIB = 2**30


def one(run: Callable[[], str], limit: float = 30.0) -> CheckResult:
    (check,) = run_checks([Check(name="it", run=run, limit=limit)])
    return check


# How checks run.


def test_checks_run_concurrently_and_return_in_order() -> None:
    """Each waits until the other has begun: run one after the other they would never end."""
    both = threading.Barrier(2, timeout=20.0)
    works = [Check(name=name, run=lambda: f"{both.wait() * 0}", limit=30.0) for name in ("a", "b")]
    assert [(check.name, check.ok) for check in run_checks(works)] == [("a", True), ("b", True)]


def test_a_check_that_times_out_has_failed() -> None:
    """It is abandoned; the results of the others are kept."""
    never = threading.Event()
    checks = run_checks(
        [
            Check(name="hangs", run=lambda: str(never.wait(60.0)), limit=0.1),
            Check(name="answers", run=lambda: "by the way", limit=30.0),
        ]
    )
    never.set()
    assert [(check.ok, check.detail) for check in checks] == [
        (False, "no answer within 0.1 s (`elastic3d doctor` on this node looks closer)"),
        (True, "by the way"),
    ]


def test_an_exception_in_a_check_is_its_failure() -> None:
    """Drivers raise errors of their own."""

    def breaks() -> str:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    assert one(breaks).detail == "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    assert not one(breaks).ok


# Devices.


def test_this_machine_computes_the_expected_product() -> None:
    """The known digest comes out, in torch's own order of summing."""
    assert all(check.ok for check in check_devices("cpu", 1))


def test_the_digest_does_not_depend_on_the_order_of_summing() -> None:
    """Summed in eight parts, last first, the bytes are the same: all values are whole numbers."""

    def backwards(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(ROWS, ROWS)
        for columns, rows in reversed(list(zip(a.chunk(8, dim=1), b.chunk(8, dim=0), strict=True))):
            total += columns @ rows
        return total

    assert product("cpu", backwards) == ""


def test_the_digest_is_the_same_with_factors_of_eight_bits() -> None:
    """As in TF32 and bfloat16 passes. Nothing is lost, so no precision setting looks like a broken device."""
    assert product("cpu", lambda a, b: a.bfloat16().float() @ b.bfloat16().float()) == ""


def test_a_device_with_one_wrong_result_is_detected() -> None:
    """One result of four million is off by one."""

    def lies(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result = a @ b
        result[1234, 567] += 1
        return result

    with pytest.raises(Unfit, match=r"cpu multiplies wrongly: .* take this device out of service"):
        product("cpu", lies)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA device")
def test_every_gpu_computes_the_expected_product() -> None:
    """Every GPU of this machine gives the same digest as the CPU."""
    count = torch.cuda.device_count()
    assert [check.ok for check in check_devices("cuda", count)] == [True] * (count + 1)


def test_missing_devices_fail_the_check() -> None:
    """Both numbers are reported; the product is not computed."""
    (check,) = check_devices("cuda", 1000)
    assert not check.ok
    assert f"{torch.cuda.device_count()} cuda device(s) for 1000 slot(s)" in check.detail


def test_too_few_cores_are_only_a_remark() -> None:
    """CPUs can be shared."""
    assert f"{len(os.sched_getaffinity(0))} core(s) for 100000 slot(s)" in present("cpu", 100_000)
    assert present("cpu", 1) == ""


# Memory.


def profile(parameters: int) -> ModelProfile:
    return ModelProfile(blocks=8, parameters=parameters, micro_batches=8, micro_batch=1, digest="d")


def test_the_memory_check_reports_its_figures() -> None:
    """1 GiB of parameters is 12 GiB of state, spread over the nodes; eight copies on each, four without a buddy."""
    assert room(profile(GIB), least=2, most=8, available=48 * GIB) == ""
    said = room(profile(GIB), least=2, most=8, available=47 * GIB)
    assert "take 48 GiB of memory on each of 2 node(s); this one has 47 GiB" in said
    with pytest.raises(Unfit, match=r"take 12 GiB of memory on each of 8 node\(s\); this one has 11 GiB: use more"):
        room(profile(GIB), least=2, most=8, available=11 * GIB)
    assert room(profile(GIB), least=1, most=1, available=48 * GIB) == ""


def test_the_memory_check_counts_what_devices_take_of_the_host() -> None:
    """One more state on its way to the devices, and 128 MiB of pinned buffers for each."""
    assert room(profile(GIB), least=2, most=2, available=55 * GIB, devices=8) == ""
    with pytest.raises(Unfit, match=r"one on its way to the devices, 1 GiB of pinned buffers\) take 55 GiB"):
        room(profile(GIB), least=2, most=2, available=55 * GIB - 1, devices=8)


def exchange(slots: Sequence[SnapshotMemory], table: SnapshotTable) -> None:
    """Have slots that are each other's buddy take, copy and let go of snapshots, one pinned by an upload meanwhile."""
    free: list[list[int]] = []
    for slot in slots:
        slot.learn(table)
        slot.restored(1, None)
        free.append(slot.grant())
    for step in range(1, 13):
        for rank, (slot, buddy) in enumerate(zip(slots, reversed(slots), strict=True)):
            if not free[rank]:
                continue
            about: dict[str, Any] = {"rank": rank, "world": 2, "facts": {}, "table": table.identity}
            buffer = free[rank].pop(0)
            arena = Arena(os.dup(slot.descriptors()[buffer]))
            arena.reserve(table.nbytes)
            arena.close()
            slot.written(buffer, Mark(1, step), **about, checkpoint=step == 2)
            work = slot.wait_for_work(0.0)
            assert work is not None
            arriving = buddy.arriving(work.stored.mark, **about, keep=work.keep, base=work.base)
            assert arriving is not None
            assert buddy.arrived(arriving)
            slot.replicated(work.stored.mark, held=True)
        for rank, slot in enumerate(slots):
            if step > 3:
                slot.safe(Mark(1, step - 2))
            free[rank] += slot.grant()


def test_the_memory_check_counts_all_that_a_slot_comes_to_hold() -> None:
    """What the memory of two slots takes after a dozen steps is what admission counts, to the byte."""
    parameters = 1 << 20
    spec = TensorSpec(key="model/w", dtype="float32", shape=(parameters * 3 // 2,))
    table = lay_out([(spec, spec.box)])
    slots = (SnapshotMemory(), SnapshotMemory())
    exchange(slots, table)
    held = [slot.nbytes for slot in slots]
    for slot in slots:
        slot.close()
    assert held == [most_copies(buddy=True) * table.nbytes] * 2
    assert room(profile(parameters), least=2, most=2, available=held[0]) == ""
    with pytest.raises(Unfit):
        room(profile(parameters), least=2, most=2, available=held[0] - 1)


def files(content: Mapping[str, str]) -> Callable[[str], str]:
    def read(path: str) -> str:
        if path not in content:
            raise FileNotFoundError(path)
        return content[path]

    return read


MEMINFO = "MemTotal:       16000000 kB\nMemAvailable:    8000000 kB\n"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, 8_000_000 * 1024),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.max": "1000\n"}, 1000),
        ({"/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/a/memory.max": "7\n"}, 7),
        ({"/proc/self/cgroup": "0::/a\n", "/sys/fs/cgroup/a/memory.max": "max\n"}, 8_000_000 * 1024),
        (
            {"/proc/self/cgroup": "5:cpu:/x\n4:memory:/m\n", "/sys/fs/cgroup/memory/m/memory.limit_in_bytes": "9"},
            9,
        ),
    ],
)
def test_available_memory_is_the_tightest_limit(more: dict[str, str], expected: int) -> None:
    """What the kernel has left, or the tightest cgroup limit, v1 and v2; layouts are planned within them, too."""
    assert available_memory(files({"/proc/meminfo": MEMINFO, **more})) == expected
    assert (host_memory(files(more)) == expected) == (expected < 1_000_000)


@pytest.mark.parametrize(
    "group",
    [
        {
            "/proc/self/cgroup": "0::/a\n",
            "/sys/fs/cgroup/a/memory.max": "1000\n",
            "/sys/fs/cgroup/a/memory.current": "700\n",
            "/sys/fs/cgroup/a/memory.stat": "anon 550\nfile 150\ninactive_file 100\n",
        },
        {
            "/proc/self/cgroup": "4:memory:/a\n",
            "/sys/fs/cgroup/memory/a/memory.limit_in_bytes": "1000\n",
            "/sys/fs/cgroup/memory/a/memory.usage_in_bytes": "700\n",
            "/sys/fs/cgroup/memory/a/memory.stat": "inactive_file 5\ntotal_rss 550\ntotal_inactive_file 100\n",
        },
    ],
    ids=["v2", "v1"],
)
def test_what_a_control_group_uses_is_not_available(group: dict[str, str]) -> None:
    """But for what the kernel gives back at once: pages of files that nobody uses."""
    assert available_memory(files({"/proc/meminfo": MEMINFO, **group})) == 400
    assert host_memory(files(group)) == 1000


def test_this_machines_memory_can_be_read() -> None:
    """The real files are parsed."""
    assert available_memory(lambda path: Path(path).read_text()) > 0


# The clock.


class Hands:
    """A clock with given readings, (monotonic, wall) for each moment; reading either moves one further."""

    def __init__(self, moments: Iterator[tuple[float, float]]) -> None:
        self._moments = moments

    def monotonic(self) -> float:
        return next(self._moments)[0]

    def wall(self) -> float:
        return next(self._moments)[1]

    def sleep(self, seconds: float) -> None:
        """Do nothing: the readings are given."""


def moments(wall: Callable[[int], float], monotonic: Callable[[int], float] = float) -> Iterator[tuple[float, float]]:
    return ((monotonic(at), wall(at)) for at in range(1000))


NOW = BUILT.timestamp() + 1e7


def test_this_machines_clock_passes() -> None:
    """It is not stepped during the check and is not in the past."""
    assert clock_goes(SYSTEM) == ""


def test_pauses_between_readings_are_not_clock_steps() -> None:
    """A process that is stopped for seconds between two readings sees both clocks move."""
    assert clock_goes(Hands(moments(lambda at: NOW + at * 3.0, lambda at: at * 3.0))) == ""


@pytest.mark.parametrize(
    ("hands", "message"),
    [
        (moments(lambda _at: 0.0), "the clock shows 1970-01-01 00:00, which is past"),
        (moments(lambda at: NOW + at, lambda _at: 5.0), "the monotonic clock stands still"),
        (moments(lambda at: NOW + at + (3600 if at > 8 else 0)), "the wall clock moved 36"),
        (moments(lambda at: NOW + at - (60 if at > 8 else 0)), "it is being stepped"),
    ],
)
def test_a_faulty_clock_is_refused(hands: Iterator[tuple[float, float]], message: str) -> None:
    """Never set, standing still, stepped forwards and backwards."""
    with pytest.raises(Unfit, match=message):
        clock_goes(Hands(hands))


# Disks.


def test_a_working_disk_passes(tmp_path: Path) -> None:
    """Nothing is left in the folder."""
    assert disk(str(tmp_path)) == ""
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder_is_refused(tmp_path: Path) -> None:
    """Missing, below a file, and one where nobody may create a file, not even root."""
    (tmp_path / "file").touch()
    for folder, why in (("/no/such", "No such file"), (str(tmp_path / "file"), "Not a directory"), ("/proc", "")):
        with pytest.raises(Unfit, match=rf"{folder} cannot be written \({why}"):
            disk(folder)


class _Slept(HandClock):
    """Goes on only by being slept through; after half of `AWAY` something happens."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.then, self.begun = then, self.now

    @property
    def slept(self) -> float:
        return self.now - self.begun

    def sleep(self, seconds: float) -> None:
        before, half = self.slept, AWAY / 2
        self.now += seconds
        if before < half <= self.slept:
            self.then()


def test_a_store_that_is_away_for_a_moment_keeps_no_node_out(tmp_path: Path) -> None:
    """A share that is mounted again within seconds passes; one that stays away, or gives no permission, does not."""
    store = tmp_path / "store"
    assert store_folder(str(store), _Slept(store.mkdir)) == ""
    clock = _Slept()
    with pytest.raises(Unfit, match=r"away cannot be written \(No such file"):
        store_folder(str(tmp_path / "away"), clock)
    assert AWAY <= clock.slept < AWAY + 1


def test_a_store_that_nobody_may_write_is_refused_at_once() -> None:
    """Time does not mend it: a folder of the kernel, where not even root creates files."""
    clock = _Slept()
    with pytest.raises(Unfit, match=r"Permission denied|Operation not permitted|Read-only file system"):
        store_folder("/sys", clock)
    assert clock.slept == 0


WRITE = "import sys; from elastic3d.admission.host import disk; disk(sys.argv[1])"


def write_elsewhere(folder: Path, *before: str, limit: int | None = None) -> str:
    """Check the folder from another process, started through `before`; return its output."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def bounded() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.run(
        [*before, sys.executable, "-B", "-c", WRITE, str(folder)],
        env=environment,
        preexec_fn=bounded,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    ).stderr


def test_a_disk_that_fails_in_the_middle_of_a_write_is_refused(tmp_path: Path) -> None:
    """A file size limit stands for any limit met in the middle of a write; what was written is removed."""
    assert "cannot be written (File too large)" in write_elsewhere(tmp_path, limit=4096)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.netns
def test_a_full_disk_is_refused(tmp_path: Path) -> None:
    """A file system with less free space than the sample."""
    mount = f'mount -t tmpfs -o size=16k none {tmp_path} && exec "$@"'
    assert "cannot be written (No space left on device)" in write_elsewhere(
        tmp_path, "unshare", "--mount", "sh", "-c", mount, "sh"
    )


# The network to other nodes.


@pytest.fixture
def listener() -> Iterator[ReachTarget]:
    """A listening socket."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield ReachTarget(name="up", address="127.0.0.1", port=server.getsockname()[1])


def test_a_listening_neighbour_is_reached(listener: ReachTarget) -> None:
    """Having no neighbour to reach is no fault."""
    assert reach("neighbours", [listener], need=1).ok
    assert reach("neighbours", [], need=0).ok


def test_a_refusing_neighbour_is_named(listener: ReachTarget, refusing_port: Callable[[], int]) -> None:
    """It is a fault where more neighbours are needed, a remark where enough answer."""
    down = ReachTarget(name="down", address="127.0.0.1", port=refusing_port())
    words = f"down: 127.0.0.1:{down.port}: Connection refused"
    check = reach("neighbours", [listener, down], need=1)
    assert (check.ok, check.detail) == (True, words)
    check = reach("neighbours", [listener, down], need=2)
    assert not check.ok
    assert check.detail == f"{words}: look at this node's network, routes and firewall"


def test_a_silent_neighbour_is_named() -> None:
    """A full backlog neither accepts nor refuses a connection, like a host behind a firewall."""
    with socket.socket() as silent, socket.socket() as first:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        first.connect(silent.getsockname())
        check = reach("etcd", [ReachTarget(name="silent", address="127.0.0.1", port=silent.getsockname()[1])], need=1)
    assert not check.ok
    assert "does not answer within 1 s" in check.detail


def generation(count: int) -> Generation:
    nodes = tuple(
        Node(name=f"n{at}", incarnation="i", address="127.0.0.1", slots=(), heartbeat_port=1) for at in range(count)
    )
    return Generation(number=1, cause=Cause.START, nodes=nodes)


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 3), (50, 3)])
def test_up_to_three_neighbours_are_tried(count: int, expected: int) -> None:
    """They are different nodes, never this one, and the same at each call."""
    tried = neighbours(generation(count), "n0")
    assert len({node.name for node in tried}) == len(tried) == expected
    assert all(node.name != "n0" for node in tried)
    assert neighbours(generation(count), "n0") == tried


def test_newcomers_try_different_neighbours() -> None:
    """A thousand nodes that join at once do not all try the same three."""
    tried = {node.name for at in range(1000) for node in neighbours(generation(50), f"new{at}")}
    assert len(tried) == 50
