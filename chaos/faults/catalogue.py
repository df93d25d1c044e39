"""The catalogue: every kind of fault by its word, what a machine lacks for one, and what a schedule says of it."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import typing
from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from chaos.faults import etcd, orders, process, store
from chaos.faults.fault import Fault, Need
from chaos.faults.moment import nearest
from elastic3d.errors import UsageError

KINDS: Mapping[str, type[Fault]] = MappingProxyType(
    {kind.WORD: kind for module in (process, orders, etcd, store) for kind in module.KINDS}
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
        case Need.S3 if importlib.util.find_spec("moto") is None:
            return "there is no S3 server here: pip install 'moto[server]'"
        case _:
            return ""


def feasible(faults: Iterable[Fault], *, slots: int = 1) -> tuple[tuple[Fault, ...], tuple[tuple[Fault, str], ...]]:
    """Return the faults that can be made here, and the others with what is missing for each.

    slots: of each node of the job.
    """
    makes: list[Fault] = []
    skips: list[tuple[Fault, str]] = []
    for fault in faults:
        missing = [lacking(need) for need in sorted(fault.ABOUT.needs)]
        if Need.SLOTS in fault.ABOUT.needs and slots < 2:
            missing.append("the job has one slot a node; give --slots 2")
        why = "; ".join(filter(None, missing))
        if why:
            skips.append((fault, why))
        else:
            makes.append(fault)
    return tuple(makes), tuple(skips)
