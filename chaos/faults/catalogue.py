"""The catalogue: every kind of fault by its word, what a machine lacks for one, and what a schedule says of it."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import shutil
import tempfile
import typing
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from chaos.faults import (
    clock,
    code,
    data,
    device,
    disk,
    etcd,
    events,
    frozen,
    memory,
    network,
    orders,
    process,
    store,
    store_disk,
)
from chaos.faults.fault import Fault, Need
from chaos.machine.clocks import Clocks
from chaos.machine.groups import NodeGroup, parents
from chaos.machine.hung_files import HungFiles
from chaos.machine.network import Network
from chaos.machine.small_disk import SmallDisk
from elastic3d.errors import UsageError
from elastic3d.nearest import nearest

KINDS: Mapping[str, type[Fault]] = MappingProxyType(
    {
        kind.WORD: kind
        for place in (
            *(process, frozen, events, orders, network, etcd, store, store_disk),
            *(disk, memory, device, clock, data, code),
        )
        for kind in place.KINDS
    }
)
"""Every kind of fault, by the word that schedules use, in the order of places."""


def kind_of(word: str) -> type[Fault]:
    """Return the kind that a word names; UsageError where it names none."""
    if word not in KINDS:
        raise UsageError(f"there is no fault {word!r}{nearest(word, KINDS)}; `elastic3d chaos list` shows all")
    return KINDS[word]


def summary(kind: type[Fault]) -> str:
    """Return what happens, in one sentence."""
    return (kind.__doc__ or "").split("\n\n")[0].replace("\n    ", " ").strip()


def form(kind: type[Fault]) -> str:
    """Return a line of TOML in which a schedule has it, with an example of each value."""
    hints = typing.get_type_hints(kind)
    values = [f'do = "{kind.WORD}"']
    for field in dataclasses.fields(kind):
        if field.name == "when":
            values.append("at = {step = 20}")
        elif field.name == "node":
            values.append('node = "node1"')
        elif field.default is not dataclasses.MISSING:
            values.append(f"{field.name} = {_toml(field.default, hints[field.name])}")
    return ", ".join(values)


def _toml(value: Any, hint: Any) -> str:
    return f'"{value}"' if isinstance(value, str | StrEnum) else f"{value:g}" if hint is float else str(value)


@functools.cache
def lacking(need: Need) -> str:
    """Return why this machine cannot meet a need, "" where it can; jobs are asked elsewhere about theirs."""
    match need:
        case Need.S3 if not _installed("moto") or not (_installed("s3fs") or _installed("obstore")):
            return "there is no S3 server or client here: pip install 'moto[server]' 'elastic3d[s3]'"
        case Need.FUSE:
            return _no_fuse()
        case Need.HOSTS:
            return _no_hosts()
        case Need.COMPILER:
            return _no_clocks()
        case Need.GROUP:
            return _no_group()
        case Need.MOUNTS:
            return _no_mounts()
        case Need.VECTORS if " avx2 " not in _read("/proc/cpuinfo"):
            return "this processor has no AVX2, so that torch computes on it as on an older one"
        case Need.CERTIFICATES if shutil.which("openssl") is None:
            return "the openssl program is not on PATH, and makes etcd's certificates: install your system's package"
        case _:
            return ""


def _no_fuse() -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            with HungFiles(Path(folder, "hung")):
                return ""
        except OSError as error:
            return f"no FUSE file system can be mounted here: {error}"


def _no_hosts() -> str:
    try:
        with Network() as network:
            network.add("probe")
    except OSError as error:
        return f"no network namespaces can be made here: {error}"
    return ""


def _no_clocks() -> str:
    try:
        with Clocks():
            return ""
    except OSError as error:
        return f"no node can have a wall clock of its own here: {error}"


def _no_group() -> str:
    group = NodeGroup.made(parents())
    group.remove()
    return "" if group.memory is not None else "no control group can bound memory here"


def _no_mounts() -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            with SmallDisk(Path(folder, "disk")):
                return ""
        except OSError as error:
            return f"no file system in memory can be mounted here: {error}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


Skipped = tuple[Fault, str]
"""A fault that is not made, and why."""


def feasible(
    faults: Iterable[Fault], *, slots: int = 1, faulty: bool = False, loopback: bool = False
) -> tuple[tuple[Fault, ...], tuple[Skipped, ...]]:
    """Return the faults that can be made here, and the others with what is missing for each.

    slots: of each node of the job. faulty: its script is the one that fails when it is asked to. loopback: its nodes
    are to be no hosts of their own.
    """
    makes: list[Fault] = []
    skips: list[Skipped] = []
    for fault in faults:
        missing = [lacking(need) for need in sorted(fault.ABOUT.needs)]
        if Need.SLOTS in fault.ABOUT.needs and slots < 2:
            missing.append("the job has one slot a node; give --slots 2")
        if Need.SCRIPT in fault.ABOUT.needs and not faulty:
            missing.append("the script does not fail when asked to; chaos/scripts/train_faulty.py does")
        if Need.HOSTS in fault.ABOUT.needs and loopback:
            missing.append("--loopback keeps the nodes from being hosts of their own")
        why = "; ".join(filter(None, missing))
        if why:
            skips.append((fault, why))
        else:
            makes.append(fault)
    return tuple(makes), tuple(skips)
