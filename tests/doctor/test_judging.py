"""What measured facts mean: pure, without a machine that has them."""

from __future__ import annotations

import io
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from checkpointing.errors import StoreDenied, StoreUnreachable
from elastic3d.cli.doctor import document, picture
from elastic3d.doctor import clock, devices, directory, etcd, host, network, peers, store
from elastic3d.doctor.child import Said
from elastic3d.doctor.clock import ClockReading
from elastic3d.doctor.devices import DriverDevice, HostDevices, SeenDevice, TorchFacts
from elastic3d.doctor.directory import DirectoryFacts
from elastic3d.doctor.etcd import MemberFacts, WriteFacts
from elastic3d.doctor.findings import (
    Examination,
    FindingStatus,
    NodeFinding,
    Subject,
    failure,
    ok,
    ordered,
    warning,
    worst,
)
from elastic3d.doctor.host import HostFacts
from elastic3d.doctor.network import Interface, NetworkFacts
from elastic3d.doctor.peers import PeerAddress, PeerFacts, Versions
from elastic3d.doctor.store import Flow, StoreFacts
from elastic3d.errors import UsageError
from elastic3d.etcd import MemberStatus
from tests.doctor.looks import named, statuses

OK, WARNING, FAILURE = FindingStatus
GIB = 1 << 30
H200 = SeenDevice(name="NVIDIA H200", memory=139 * GIB)
CPU = TorchFacts(torch="2.13.0+cpu")
CUDA = TorchFacts(torch="2.13.0+cu128", cuda="12.8", nccl="2.27.5", devices=(H200,) * 8)


def listed(count: int, *, used: int = 0, mig: bool = False) -> tuple[DriverDevice, ...]:
    return tuple(
        DriverDevice(index=str(index), name="NVIDIA H200", memory=139 * GIB, used=used, mig=mig)
        for index in range(count)
    )


def test_a_machine_without_accelerators_trains_on_its_cpu() -> None:
    """That is ok, and said; more slots than cores are a warning."""
    facts = HostDevices(torch=CPU, cores=16)
    assert "training would run on the CPU" in named(devices.judge(facts, 1), "devices").seen
    assert set(statuses(devices.judge(facts, 16)).values()) == {OK}
    assert statuses(devices.judge(facts, 17))["devices"] is WARNING


def test_eight_devices_are_ok() -> None:
    """With their driver, torch and NCCL."""
    facts = HostDevices(torch=CUDA, driver="570.1", listed=listed(8), nodes=("nvidia0",) * 8)
    findings = devices.judge(facts, 8)
    assert set(statuses(findings).values()) == {OK}
    assert named(findings, "devices").seen == "8 x NVIDIA H200 (139 GiB), driver 570.1"
    assert devices.slots_of(facts, 0) == 8


MIG = (SeenDevice(name="H100 MIG 1g.10gb", memory=10 * GIB), SeenDevice(name="H100 MIG 3g.40gb", memory=40 * GIB))
TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040). Please update"


def test_what_is_wrong_with_devices_is_named() -> None:
    """One line each, with what to do."""
    cases: list[tuple[HostDevices, int, str, FindingStatus | None, str]] = [
        (HostDevices(torch=CPU, nodes=("nvidia0", "nvidia1")), 1, "devices", FAILURE, "built for the CPU alone"),
        (HostDevices(torch=replace(CUDA, devices=(), error=TOO_OLD), nodes=("nvidia0",)), 1, "devices", FAILURE, "old"),
        (
            HostDevices(torch=replace(CUDA, devices=()), listed=listed(8), visible="CUDA_VISIBLE_DEVICES='-1'"),
            *(1, "devices", FAILURE, "CUDA_VISIBLE_DEVICES='-1' hides all of 8"),
        ),
        (HostDevices(torch=replace(CUDA, devices=()), nodes=("nvidia0",)), 1, "devices", FAILURE, "torch sees none"),
        (HostDevices(torch=CPU, pci=("NVIDIA",)), 1, "devices", WARNING, "on the bus"),
        (HostDevices(torch=replace(CPU, other="xpu")), 1, "devices", WARNING, "kind xpu"),
        (HostDevices(torch=CUDA), 9, "devices", FAILURE, "9 slots were asked for"),
        (HostDevices(torch=replace(CUDA, devices=MIG)), 2, "devices", FAILURE, "MIG slices of unlike size"),
        (
            HostDevices(torch=replace(CUDA, devices=(H200, SeenDevice(name="A100", memory=80 * GIB)))),
            *(2, "devices", FAILURE, "unlike devices"),
        ),
        (
            HostDevices(torch=CUDA, listed=listed(16), visible="CUDA_VISIBLE_DEVICES='0,1'"),
            *(8, "hidden", WARNING, "hides 8 of 16"),
        ),
        (HostDevices(torch=CUDA, listed=listed(8, used=3 * GIB)), 8, "in use", WARNING, "device 0: 3 GiB"),
        (HostDevices(torch=replace(CUDA, nccl="")), 8, "NCCL", FAILURE, "without it"),
        (HostDevices(torch=replace(CUDA, broken=("cuda:3 multiplies wrongly",))), 8, "product", FAILURE, "cuda:3"),
        (HostDevices(torch=TorchFacts(missing="ModuleNotFoundError")), 1, "torch", FAILURE, "cannot be imported"),
        (HostDevices(torch=TorchFacts(torch="2.13.0", silent="it did not answer")), 1, "driver", None, ""),
        (HostDevices(torch=CUDA, driver_error="nvidia-smi ends with 9"), 8, "driver", WARNING, "ends with 9"),
    ]
    for facts, slots, name, status, words in cases:
        findings = devices.judge(facts, slots)
        if status is None:
            assert worst(findings) is FAILURE
            continue
        assert named(findings, name).status is status
        assert words in named(findings, name).seen
        assert named(findings, name).remedy


def test_what_torch_said_until_it_hung_is_kept() -> None:
    """Its first line comes before a device is touched; whatever else stands there is not believed."""
    line = '{"torch": "2.13.0", "cuda": "12.8", "hip": "", "gloo": true, "nccl": "2.27", "unsupported": ""}\n'
    facts = devices.parse_torch(Said(output=f"a library's own word\n[1]\n{line}", errors="", code=None))
    assert (facts.torch, facts.nccl, facts.silent) == ("2.13.0", "2.27", "it did not answer in time")
    crashed = devices.parse_torch(Said(output=line, errors="x\nFatal: no\n", code=-11))
    assert crashed.silent == "its process ended with -11 (Fatal: no)"
    whole = f'{line}{{"devices": [{{"name": "A", "memory": 5}}], "error": "", "other": ""}}\n{{"broken": []}}\n'
    facts = devices.parse_torch(Said(output=whole, errors="", code=0))
    assert (facts.devices, facts.silent) == ((SeenDevice(name="A", memory=5),), "")


def test_nvidia_smi_is_read() -> None:
    """What is no list of devices is left out."""
    text = "0, NVIDIA H200, 570.1, 143771, 4, Disabled\n1, NVIDIA H200, 570.1, [N/A], [N/A], Enabled\nFailed: x\n"
    listed, version = devices.parse_driver(text)
    assert version == "570.1"
    assert [(one.memory, one.mig) for one in listed] == [(143771 << 20, False), (0, True)]
    assert devices.parse_driver("No devices were found\n") == ((), "")


WELL = HostFacts(
    total=256 * GIB,
    available=200 * GIB,
    strict=False,
    shm_size=128 * GIB,
    shm_free=128 * GIB,
    memfd="",
    files=65536,
    processes=None,
    file_size=None,
    address_space=None,
    locked=None,
    infiniband=False,
)


def test_room_for_snapshots_is_told() -> None:
    """What is left beside the trainers, for as many snapshots as a host holds of its own and of its buddy."""
    findings = host.judge(WELL, 8)
    assert set(statuses(findings).values()) == {OK}
    assert "room for snapshots of 3.06 GiB of state on each of 8 slot(s)" in named(findings, "host").seen


def test_what_is_short_on_a_host_is_named() -> None:
    """Each by itself, with what to do."""
    cases: list[tuple[dict[str, Any], str, FindingStatus]] = [
        ({"available": GIB}, "host", FAILURE),
        ({"strict": True}, "host", WARNING),
        ({"memfd": "Operation not permitted"}, "shared segments", FAILURE),
        ({"shm_free": 64 << 20}, "/dev/shm", FAILURE),
        ({"shm_free": GIB - 1}, "/dev/shm", WARNING),
        ({"shm_size": None, "shm_free": None}, "/dev/shm", FAILURE),
        ({"files": 1024}, "open files", WARNING),
        ({"files": 200}, "open files", FAILURE),
        ({"processes": 100}, "processes", FAILURE),
        ({"file_size": GIB}, "file size", FAILURE),
        ({"address_space": 64 * GIB}, "address space", WARNING),
        ({"locked": 65536, "infiniband": True}, "locked memory", WARNING),
    ]
    for change, name, status in cases:
        findings = host.judge(replace(WELL, **change), 8)
        assert named(findings, name).status is status
        assert named(findings, name).remedy
        assert [one.name for one in findings if one.status is not OK] == [name]


def test_clocks_are_compared() -> None:
    """Within what a Date in whole seconds, and the time of the answer, leave open."""
    cases: list[tuple[float, float, FindingStatus, str]] = [
        (1000.4, 1000.0, OK, "agrees"),
        (1001.9, 1000.0, OK, "agrees"),
        (1010.0, 1000.0, WARNING, "ahead of"),
        (1000.0, 1010.0, WARNING, "behind"),
        (2000.0, 1000.0, FAILURE, "ahead of"),
    ]
    for ours, theirs, status, words in cases:
        finding = clock.judge(clock.reading("e1", before=ours - 0.1, after=ours + 0.1, theirs=theirs, grain=1.0))
        assert finding.status is status
        assert words in finding.seen


def test_a_clock_nobody_vouches_for_is_a_warning() -> None:
    """Unless it was compared with another's."""
    judged = [
        clock.judge_own(wrong=wrong, synchronised=synchronised, compared=compared).status
        for wrong, synchronised, compared in (
            *(("", True, False), ("", False, True), ("", None, False), ("stands still", True, True)),
        )
    ]
    assert judged == [OK, OK, WARNING, FAILURE]


ETH = Interface(name="eth0", addresses=("10.0.0.5", "fd00::5"), up=True, loopback=False)
LO = Interface(name="lo", addresses=("127.0.0.1",), up=True, loopback=True)
DOCKER = Interface(name="docker0", addresses=("172.17.0.1",), up=True, loopback=False)
DOWN = Interface(name="ib0", addresses=("10.1.0.5",), up=False, loopback=False)
NET = NetworkFacts(
    address="10.0.0.5",
    problem="",
    towards="e1:2379",
    interfaces=(LO, ETH, DOCKER, DOWN),
    host="node-1",
    resolved=("10.0.0.5",),
    gloo="",
    nccl="",
)


def test_the_address_others_use_is_told() -> None:
    """With its interface; and NCCL's choice leaves out docker's."""
    findings = network.judge(NET)
    assert set(statuses(findings).values()) == {OK}
    assert named(findings, "address").seen == "10.0.0.5 on the way to etcd (e1:2379), interface eth0"
    assert named(findings, "NCCL_SOCKET_IFNAME").seen == "not set: NCCL chooses among eth0"


def test_interfaces_that_nobody_can_use_are_named() -> None:
    """Whatever the environment says."""
    cases: list[tuple[dict[str, Any], str, FindingStatus]] = [
        ({"address": "127.0.0.1"}, "address", WARNING),
        ({"address": "", "problem": "Name or service not known"}, "address", FAILURE),
        ({"address": "10.9.9.9"}, "address", WARNING),
        ({"resolved": ("127.0.1.1",)}, "host name", WARNING),
        ({"resolved": ()}, "host name", WARNING),
        ({"gloo": "eth9"}, "GLOO_SOCKET_IFNAME", FAILURE),
        ({"gloo": "ib0"}, "GLOO_SOCKET_IFNAME", FAILURE),
        ({"gloo": "lo"}, "GLOO_SOCKET_IFNAME", WARNING),
        ({"gloo": "docker0"}, "GLOO_SOCKET_IFNAME", WARNING),
        ({"gloo": "eth0"}, "GLOO_SOCKET_IFNAME", OK),
        ({"nccl": "eth"}, "NCCL_SOCKET_IFNAME", OK),
        ({"nccl": "=eth"}, "NCCL_SOCKET_IFNAME", FAILURE),
        ({"nccl": "^eth,docker"}, "NCCL_SOCKET_IFNAME", WARNING),
        ({"nccl": "^docker"}, "NCCL_SOCKET_IFNAME", OK),
        ({"nccl": "ib"}, "NCCL_SOCKET_IFNAME", FAILURE),
    ]
    for change, name, status in cases:
        assert named(network.judge(replace(NET, **change)), name).status is status


SERVES = MemberStatus(
    cluster=1, member=7, version="3.5.1", leads=True, has_leader=True, learner=False, size=GIB // 4, in_use=GIB // 8,
    quota=0, errors=(),
)  # fmt: skip


def test_a_member_of_etcd_is_judged() -> None:
    """By what it says of itself, and how long a read takes."""
    cases: list[tuple[dict[str, Any], float, FindingStatus, str]] = [
        ({}, 0.002, OK, "version 3.5.1, leader, reads in 2 ms, database 256 MiB"),
        ({}, 0.2, WARNING, "slow"),
        ({"has_leader": False, "leads": False}, 0.002, FAILURE, "no leader"),
        ({"learner": True, "leads": False}, 0.002, FAILURE, "serves no reads"),
        ({"errors": ("memberID:7 alarm:NOSPACE ",)}, 0.002, FAILURE, "NOSPACE"),
        ({"errors": ("memberID:7 alarm:CORRUPT ",)}, 0.002, FAILURE, "CORRUPT"),
        ({"size": 3 * GIB // 2}, 0.002, WARNING, "of 2 GiB, etcd's quota where nobody set one"),
        ({"size": 3 * GIB // 2, "quota": 8 * GIB}, 0.002, OK, "database 1.5 GiB"),
    ]
    for change, read, status, words in cases:
        facts = MemberFacts(endpoint="http://e1:2379", status=replace(SERVES, **change), read=read)
        findings = etcd.judge_member(facts, 0.0)
        assert worst(findings) is status
        assert any(words in one.seen for one in findings if one.status is status)


def test_a_certificate_that_ends_soon_is_a_warning() -> None:
    """Two weeks before."""
    facts = MemberFacts(endpoint="https://e1:2379", status=SERVES, certificate_ends=1e9)
    assert worst(etcd.judge_member(facts, 1e9 - 30 * 86400)) is OK
    assert worst(etcd.judge_member(facts, 1e9 - 3 * 86400)) is WARNING


def test_endpoints_of_one_cluster_are_that() -> None:
    """Members of two clusters would split the job; one that is named twice, or is away, is a warning."""

    def judged(*members: tuple[int, int] | None) -> list[FindingStatus]:
        facts = [
            MemberFacts(endpoint=f"e{index}", error="away")
            if one is None
            else MemberFacts(endpoint=f"e{index}", status=replace(SERVES, cluster=one[0], member=one[1]))
            for index, one in enumerate(members)
        ]
        return [finding.status for finding in etcd.judge_cluster(facts)]

    assert judged((1, 1), (1, 2), (1, 3)) == []
    assert judged((1, 1), (2, 2)) == [FAILURE]
    assert judged((1, 1), (1, 1)) == [WARNING]
    assert judged((1, 1), None) == [WARNING]
    assert judged(None, None) == []


def test_the_write_to_etcd_is_judged() -> None:
    """Slow is a warning; refused, or not removed, a failure."""
    judged = [
        etcd.judge_write(facts, "/elastic3d").status
        for facts in (
            WriteFacts(median=0.01),
            WriteFacts(median=0.5),
            WriteFacts(median=0.01, removed=False),
            WriteFacts(error="permission denied", remedy="grant it"),
        )
    ]
    assert judged == [OK, WARNING, FAILURE, FAILURE]


GOOD: dict[str, Any] = {"url": "s3://b/p", "small": 0.03, "creates": True, "swaps": True, "unfit": ""}


def test_a_store_is_judged() -> None:
    """As far as it came; without conditional writes it will do only where etcd decides."""
    cases: list[tuple[StoreFacts, bool, FindingStatus, str]] = [
        (StoreFacts(**GOOD, writes=Flow(rate=2e8, size=1 << 26)), False, OK, "bandwidth, write"),
        (StoreFacts(**GOOD, reads=Flow(rate=2e6, size=1 << 20)), False, WARNING, "bandwidth, read"),
        (StoreFacts(**{**GOOD, "swaps": False}), False, FAILURE, "conditional writes"),
        (StoreFacts(**{**GOOD, "swaps": False}), True, OK, "conditional writes"),
        (StoreFacts(**{**GOOD, "url": "smb://b/p", "swaps": False}), True, WARNING, "whole objects"),
        (StoreFacts(**{**GOOD, "whole": False}), False, FAILURE, "write and read"),
        (StoreFacts(**{**GOOD, "unfit": "no ranges"}), False, FAILURE, "ranges, listings, deletions"),
        (StoreFacts(url="s3://b", stopped=StoreDenied("store s3://b: no")), False, FAILURE, "reach"),
        (StoreFacts(url="s3://b", stopped=StoreUnreachable("store s3://b: no")), False, FAILURE, "reach"),
    ]
    for facts, register, status, name in cases:
        findings = store.judge(facts, register=register)
        assert named(findings, name).status is status
        assert worst(findings) is status


def test_a_directory_is_judged() -> None:
    """Whether all nodes can see it, whether there is room, and whose its folders are."""
    cases: list[tuple[DirectoryFacts, FindingStatus]] = [
        (DirectoryFacts(there=True, inside="/d", kind="nfs4", free=1 << 40), OK),
        (DirectoryFacts(there=True, inside="/d", kind="fuse.s3fs", free=1 << 40), OK),
        (DirectoryFacts(there=True, inside="/d", kind="ext4", free=1 << 40), WARNING),
        (DirectoryFacts(there=True, inside="/d", kind="nfs4", free=1 << 20), WARNING),
        (DirectoryFacts(there=True, inside="/d", kind="nfs4", free=1 << 40, denied=("packs",)), FAILURE),
    ]
    for facts, status in cases:
        assert worst(store.judge(StoreFacts(url="/d", directory=facts), register=False)) is status


def test_the_file_system_of_a_path_is_the_nearest_mount() -> None:
    """As the kernel lists them, names with spaces and all."""
    mounts = (
        "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        "30 22 0:30 / /data rw - nfs4 server:/x rw\n"
        "31 22 0:31 / /data/with\\040space rw shared:1 - lustre x rw\n"
    )
    kinds = [
        directory.file_system_of(Path(path), mounts)
        for path in ("/tmp/x", "/data", "/data/a/b", "/database", "/data/with space/c")
    ]
    assert kinds == ["ext4", "nfs4", "nfs4", "ext4", "lustre"]


@pytest.mark.parametrize("name", ["données", "データ\u3000一", "a\x85b", os.fsdecode(b"donn\xe9es"), "back\\slash"])
def test_mounts_have_names_in_any_language(name: str) -> None:
    """And in none: bytes that are no text come back as the system's calls give them."""
    listed = name.replace("\\", "\\134")
    mounts = f"22 1 254:0 / / rw - ext4 /dev/vda rw\n30 22 0:30 / /mnt/{listed} rw - nfs4 server:/x rw\n"
    assert directory.file_system_of(Path("/mnt") / name / "store", mounts) == "nfs4"


HERE = Versions(elastic3d="0.1.0", torch="2.13.0")
PEER = PeerFacts(
    peer=PeerAddress(host="node-1", port=29400),
    connect=0.0003,
    doctor=True,
    host="node-1",
    versions=HERE,
    forth=(3, 3),
    back=(3, 3),
    seen_as="10.0.0.5",
    ours="10.0.0.5",
)


def test_a_peer_is_judged() -> None:
    """A job needs all ports in both directions, and the same versions."""
    cases: list[tuple[dict[str, Any], FindingStatus, str]] = [
        ({}, OK, "open both ways"),
        ({"doctor": False}, OK, "this one port is all"),
        ({"refused": True}, FAILURE, "nobody listens"),
        ({"error": "no answer within 3 s"}, FAILURE, "no answer"),
        ({"forth": (3, 1)}, FAILURE, "2 of 3 ports that the system gave cannot be reached from here"),
        ({"back": (3, 0)}, FAILURE, "from there to here"),
        ({"versions": replace(HERE, torch="2.12.0")}, FAILURE, "torch 2.12.0, this node 2.13.0"),
        ({"seen_as": "198.51.100.7"}, WARNING, "translated"),
        ({"connect": 0.2}, WARNING, "slow"),
    ]
    for change, status, words in cases:
        findings = peers.judge(replace(PEER, **change), HERE)
        assert worst(findings) is status
        assert any(words in one.seen for one in findings)


def test_addresses_of_peers_are_read() -> None:
    """Several, IPv6 in brackets; what cannot be one is a wrong call."""
    assert [str(one) for one in peers.parse_peers("a:1, [::1]:65535,a:1")] == ["a:1", "[::1]:65535"]
    for text in ("", ",", "a", ":1", "a:", "a:0", "a:65536", "::1:5", "a:x", "[]:1"):
        with pytest.raises(UsageError, match="--peers"):
            peers.parse_peers(text)


def test_the_findings_have_an_order_and_a_worst() -> None:
    """Subjects in the order in which people read them; within one, as they were found."""
    some = (ok(Subject.PEERS, "b", ""), warning(Subject.DEVICE, "z", "", "do"), ok(Subject.DEVICE, "a", ""))
    assert [one.name for one in ordered(some)] == ["z", "a", "b"]
    assert (worst(some), worst(())) == (WARNING, OK)


EXAMINED = Examination(
    host="node-17",
    version="0.1.0",
    status=FAILURE,
    findings=(
        ok(Subject.DEVICE, "devices", "8 x NVIDIA H200 (139 GiB), driver 570.1"),
        warning(Subject.NETWORK, "host name", "node-17 is 127.0.1.1\x1b[2J", "set GLOO_SOCKET_IFNAME"),
        failure(Subject.ETCD, "http://e3:2379", "the host answers, and nobody listens there", "see that etcd runs"),
    ),
    skipped=("the store (--store)",),
    seconds=11.2,
)


def test_display() -> None:
    """A line each with what to do below it, in terminals of any width, and nothing that a terminal would obey."""
    lines = []
    for width in (80, 44):
        console = Console(width=width, file=io.StringIO(), color_system=None, force_terminal=False)
        with console.capture() as capture:
            console.print(picture(EXAMINED, width))
        lines += [line.rstrip() for line in capture.get().splitlines()]
    assert lines == [
        "ok       device   devices  8 x NVIDIA H200 (139 GiB), driver 570.1",
        "warning  network  host name  node-17 is 127.0.1.1 [2J",
        "                  set GLOO_SOCKET_IFNAME",
        "failure  etcd     http://e3:2379  the host answers, and nobody listens there",
        "                  see that etcd runs",
        "",
        "Not looked at: the store (--store).",
        "node-17: 1 ok, 1 warning, 1 failure, in 11 s",
        "ok       devices  8 x NVIDIA H200 (139 GiB),",
        "         driver 570.1",
        "warning  host name  node-17 is 127.0.1.1 [2J",
        "         set GLOO_SOCKET_IFNAME",
        "failure  http://e3:2379  the host answers,",
        "         and nobody listens there",
        "         see that etcd runs",
        "",
        "Not looked at: the store (--store).",
        "node-17: 1 ok, 1 warning, 1 failure, in 11 s",
    ]


def test_the_document_has_every_field() -> None:
    """And a version."""
    written = document(EXAMINED)
    assert list(written) == ["schema", *(field.name for field in fields(Examination))]
    assert list(written["findings"][0]) == [field.name for field in fields(NodeFinding)]
    assert written["status"] == "failure"


def test_a_reading_of_another_clock_has_a_middle() -> None:
    """Half of the answer's time, and half of what the other leaves off."""
    reading = clock.reading("e1", before=100.0, after=101.0, theirs=100.0, grain=1.0)
    assert reading == ClockReading(against="e1", offset=0.0, within=1.0)
