"""Schedules as files: TOML or JSON, read strictly, written so that they are read back equal.

    seed = 7                        # what it was drawn from; may be left out

    [[fault]]
    do = "kill"                     # a word of the catalogue
    node = "leader"                 # node1, leader, stage0, newest, rank3; `any` for one that a seed draws
    at = {step = 20}                # a committed step; [10, 40] for one that a seed draws

    [[fault]]
    do = "pause"
    node = "node2"
    part = "keepers"                # values of the fault's own
    seconds = 0.5
    at = {generation = 2, phase = "started"}

    [[fault]]
    do = "join"
    at = {event = "peer.lost"}      # once any node has written it; count = 3: three times

JSON has the same names: {"seed": 7, "fault": [{"do": "kill", "node": "leader", "at": {"step": 20}}]}.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tomllib
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any

from chaos.faults.catalogue import kind_of
from chaos.faults.fault import Fault, node_name
from chaos.faults.moment import When
from chaos.schedules.schedule import Schedule
from elastic3d.errors import UsageError
from elastic3d.nearest import nearest

ANY = "any"
"""A node that is to be drawn."""
SEED = 17
"""From which a schedule is drawn where neither it nor a person says."""
_SEEDS = 1 << 63
"""Of 64 bits, as torch takes them; a folder is named by one."""


def load(path: Path, *, nodes: int, seed: int | None = None) -> Schedule:
    """Return the schedule of a file, TOML, or JSON by its name; UsageError says what is wrong with it, and where.

    seed: from which what it leaves open is drawn, for a job of so many nodes; None for its own, or SEED.
    """
    try:
        # Editors may begin a file with a mark of its encoding.
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path}: it cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: it is no text") from None
    try:
        document = json.loads(text, object_pairs_hook=_once) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise UsageError(f"{path}: it is no {kind}: {error}") from None
    return parse(document, str(path), nodes=nodes, seed=seed)


def parse(document: Any, what: str, *, nodes: int, seed: int | None = None) -> Schedule:
    """Return the schedule of a document; UsageError, which begins with `what`, where it is none."""
    if not isinstance(document, Mapping):
        raise UsageError(f"{what}: a schedule is a table with a list `fault`")
    _check_keys(document, ("seed", "fault"), what)
    given = document.get("seed")
    if given is not None and type(given) is not int:
        raise UsageError(f"{what}: seed must be a whole number, and is {given!r}")
    listed = document.get("fault", [])
    if not isinstance(listed, list) or not all(isinstance(one, Mapping) for one in listed):
        raise UsageError(f"{what}: `fault` must be a list of tables, such as [[fault]]")
    if not listed:
        raise UsageError(f"{what}: there is no [[fault]] in it")
    seed = next(one for one in (seed, given, SEED) if one is not None)
    if not -_SEEDS <= seed < _SEEDS:
        raise UsageError(f"{what}: seed must be a whole number of 64 bits")
    faults, opened = [], False
    for number, one in enumerate(listed, 1):
        closed = _drawn(one, f"{what}, fault {number}", nodes, seed, number)
        opened = opened or closed != one
        faults.append(_fault(closed, f"{what}, fault {number}"))
    return Schedule(faults=tuple(faults), seed=seed if opened else given)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; ValueError where it has a name twice, which JSON alone would let pass."""
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise ValueError(f"`{name}` is there twice")
        made[name] = value
    return made


def to_document(schedule: Schedule) -> dict[str, Any]:
    """Return the schedule as `parse` reads it. What has its default is left out."""
    seed = {} if schedule.seed is None else {"seed": schedule.seed}
    return {**seed, "fault": [_table(fault) for fault in schedule.faults]}


def to_json(schedule: Schedule) -> str:
    """Return the schedule as JSON."""
    return json.dumps(to_document(schedule), indent=2) + "\n"


def to_toml(schedule: Schedule) -> str:
    """Return the schedule as TOML."""
    document = to_document(schedule)
    lines = [f"seed = {document['seed']}", ""] if "seed" in document else []
    for table in document["fault"]:
        lines += ["[[fault]]", *(f"{key} = {_toml(value)}" for key, value in table.items()), ""]
    return "\n".join(lines)


def _fault(given: Mapping[str, Any], what: str) -> Fault:
    """Return the fault of a table."""
    do = given.get("do")
    if not isinstance(do, str):
        raise UsageError(f"{what}: it has no `do`, the fault's word")
    try:
        kind = kind_of(do)
    except UsageError as error:
        raise UsageError(f"{what}: {error}") from None
    what = f"{what} ({do})"
    fields = {field.name: field for field in dataclasses.fields(kind) if field.name != "when"}
    _check_keys(given, ("do", "at", *fields), what)
    at = given.get("at")
    if not isinstance(at, Mapping):
        raise UsageError(f"{what}: it has no moment; give one, such as at = {{step = 20}}")
    hints = typing.get_type_hints(kind)
    values = {name: _value(given[name], hints[name], f"{what}: {name}") for name in fields if name in given}
    missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in given]
    if missing:
        raise UsageError(f"{what}: it needs {' and '.join(f'`{name}`' for name in missing)}")
    made: dict[str, Any] = {**values, "when": _moment(at, what)}
    return kind(**made)


def _moment(given: Mapping[str, Any], what: str) -> When:
    hints = typing.get_type_hints(When)
    _check_keys(given, tuple(hints), f"{what}: at")
    return When(**{name: _value(value, hints[name], f"{what}: at.{name}") for name, value in given.items()})


def _value(value: Any, hint: Any, what: str) -> Any:
    """Return a value of the type that a field has."""
    if isinstance(hint, types.UnionType):
        hint = next(one for one in typing.get_args(hint) if one is not types.NoneType)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        if value not in list(hint):
            raise UsageError(f"{what} is {value!r}; give one of {', '.join(hint)}")
        return hint(value)
    if hint is float and type(value) in (int, float):
        if not abs(value) <= sys.float_info.max:
            raise UsageError(f"{what} must be a finite number")
        return float(value)
    if type(value) is not hint:
        kind = {int: "a whole number", float: "a number", str: "a text"}[hint]
        raise UsageError(f"{what} must be {kind}, and is {value!r}")
    return value


def _drawn(given: Mapping[str, Any], what: str, nodes: int, seed: int, number: int) -> Mapping[str, Any]:
    """Return the table with its open values drawn: the same ones of the same seed, whatever the other tables have."""
    chance = Random(f"{seed} fault {number}")
    at = given.get("at")
    steps = at.get("step") if isinstance(at, Mapping) else None
    closed = dict(given)
    if given.get("node") == ANY:
        closed["node"] = node_name(chance.randrange(nodes))
    if isinstance(steps, list):
        if len(steps) != 2 or any(type(step) is not int for step in steps) or not 1 <= steps[0] <= steps[1]:
            raise UsageError(f"{what}: at.step is {steps!r}; give a step, or the first and the last one of a range")
        assert isinstance(at, Mapping)
        closed["at"] = {**at, "step": chance.randint(*steps)}
    return closed


def _check_keys(given: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    for key in given:
        if key not in known:
            raise UsageError(f"{what}: there is no `{key}`{nearest(key, known)}; it may have {', '.join(known)}")


def _table(fault: Fault) -> dict[str, Any]:
    table: dict[str, Any] = {"do": fault.WORD}
    for field in dataclasses.fields(fault):
        value = getattr(fault, field.name)
        if field.name != "when" and value != field.default:
            table[field.name] = _plain(value)
    return {**table, "at": {name: _plain(value) for name, value in _given(fault.when)}}


def _given(when: When) -> list[tuple[str, Any]]:
    named = [(field, getattr(when, field.name)) for field in dataclasses.fields(when)]
    return [(field.name, value) for field, value in named if value != field.default]


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, StrEnum) else value


def _toml(value: Any) -> str:
    """Return a value as TOML; its texts are words of ours, which JSON escapes as TOML does."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + "}"
    return json.dumps(value) if isinstance(value, str) else repr(value)
