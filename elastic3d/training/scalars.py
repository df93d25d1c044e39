"""The numbers that a script gives for a step, and its wish to end the run: said on any rank, and known to all.

A number whose name all ranks know has places in the step vote, one for each rank. What they do not know yet, a new name
or the wish to end, is gathered once, after the vote in which some rank says that it has something to tell; all ranks
then know the same names, in the same order. A generation begins with none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch.distributed.tensor import DTensor

from elastic3d.errors import UsageError
from elastic3d.health.record import fingerprint
from elastic3d.parallel.all_reduce import reduced
from elastic3d.parallel.mesh import Mesh
from elastic3d.parallel.vote import Outcome
from elastic3d.trackers.names import OURS

REDUCTIONS = ("mean", "sum", "max", "last")
"""How the numbers of several ranks become one."""

MOST = 32
"""Names in one generation: each takes memory on every node, for every step that a tracker may have to be told of."""

LONGEST = 200
"""Letters of the reason for which a script ends a run."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_./-]{0,63}")

_TELLING = 15
"""Kind of the step in which what is new is gathered, for its fingerprint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all ranks know of a step from their scripts. scalars: by name. stop: why the run is to end, "" to go on."""

    scalars: Mapping[str, float]
    stop: str = ""


class Scalars:
    """What one rank's script says of the step that is being made."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}  # name to reduction, as all ranks have agreed
        self._given: dict[str, tuple[str, torch.Tensor]] = {}
        self._numbers: dict[str, float] = {}  # what was given, as the last vote carried it
        self._stop = ""

    def give(self, scalars: Mapping[str, object], reduce: str) -> None:
        """Take numbers for the coming vote; the last one given of a name counts. UsageError for what is none."""
        if reduce not in REDUCTIONS:
            raise UsageError(f"run.log: reduce= is one of {', '.join(map(repr, REDUCTIONS))}; {reduce!r} is none")
        for name, value in scalars.items():
            _check_name(name)
            before = self._given[name][0] if name in self._given else self._known.get(name, reduce)
            if before != reduce:
                raise UsageError(_unlike(name, before, reduce))
            self._given[name] = reduce, _number(name, value)
        if len(self._known.keys() | self._given.keys()) > MOST:
            raise UsageError(_too_many(self._known.keys() | self._given.keys()))

    def end(self, why: str) -> None:
        """Have the run end after the step of the coming vote."""
        if not isinstance(why, str) or not why.strip():
            raise UsageError(f"run.stop: give a reason in words, for people who ask why the run ended, and not {why!r}")
        self._stop = self._stop or " ".join(why.split())[:LONGEST]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The numbers that were given, one a tensor, to be read together with all else that a step reads."""
        return [value for _, value in self._given.values()]

    @property
    def columns(self) -> int:
        """How many names all ranks know, and the vote has places for."""
        return len(self._known)

    @property
    def tells(self) -> bool:
        """Whether this rank has something to tell that is not known to all."""
        return bool(self._stop) or not self._given.keys() <= self._known.keys()

    def row(self, numbers: Sequence[float]) -> list[float | None]:
        """Return this rank's row of the vote, None for what it did not log. numbers: `tensors` as they were read."""
        self._numbers = dict(zip(self._given, numbers, strict=True))
        return [self._numbers.get(name) for name in self._known]

    def settle(self, outcome: Outcome, mesh: Mesh) -> Agreed:
        """Return what all ranks said with the outcome of their vote, the same on each, and begin anew.

        A collective if some rank has something new to tell. UsageError on every rank where two of them give a name to
        different reductions, or all together have too many names.
        """
        values = {name: list(column) for name, column in zip(self._known, outcome.scalars, strict=True)}
        stop = self._gather(mesh, values) if outcome.tells else ""
        return Agreed(scalars=self._settled(values), stop=stop)

    def last(self, mesh: Mesh) -> Mapping[str, float]:
        """Return what all ranks gave after the vote of the run's last step, the same on each; a collective.

        UsageError as from `settle`.
        """
        self._numbers = {name: float(value) for name, (_, value) in self._given.items()}
        values: dict[str, list[float]] = {}
        self._gather(mesh, values)
        return self._settled(values)

    def _gather(self, mesh: Mesh, values: dict[str, list[float]]) -> str:
        """Add to the numbers by name those of names that are not there; return why the run is to end, "" to go on."""
        stop = ""
        mesh.progress.begin_step(fingerprint(_TELLING))
        new = [[name, how, self._numbers[name]] for name, (how, _) in self._given.items() if name not in values]
        for said in mesh.gather(json.dumps([new, self._stop]).encode()):
            theirs, why = json.loads(said)
            for name, how, number in theirs:
                if self._known.setdefault(name, how) != how:
                    raise UsageError(_unlike(name, self._known[name], how))
                values.setdefault(name, []).append(number)
            stop = stop or why
        if len(self._known) > MOST:
            raise UsageError(_too_many(self._known))
        return stop

    def _settled(self, values: Mapping[str, list[float]]) -> Mapping[str, float]:
        self._given, self._stop = {}, ""
        return {name: _one(self._known[name], column) for name, column in values.items() if column}


def _one(how: str, values: Sequence[float]) -> float:
    return values[-1] if how == "last" else reduced(how, values)


def _check_name(name: str) -> None:
    if name in OURS:
        raise UsageError(
            f"run.log: {name!r} is a number that elastic3d writes of every step itself; give yours another name, such "
            f"as {'my_' + name!r}"
        )
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"run.log: {name!r} is no name for a number: it begins with a letter, has at most 64 of a-z, A-Z, 0-9, _, "
            '., - and /, such as run.log(**{"eval/accuracy": 0.5})'
        )


def _number(name: str, value: object) -> torch.Tensor:
    if isinstance(value, DTensor):
        raise UsageError(f"run.log: {name} is spread over ranks; give {name}.full_tensor(), on every rank alike")
    if isinstance(value, torch.Tensor):
        if value.dim() or value.is_complex() or value.is_meta:
            raise UsageError(
                f"run.log: {name} is a tensor of shape {list(value.shape)} and {value.dtype}, and not one real number: "
                "give its mean(), or one name for each of its numbers"
            )
        return value.detach().clone()
    if not isinstance(value, Real):
        raise UsageError(
            f"run.log: {name} is no number, but {type(value).__name__}: give a float, an int or a tensor of no "
            "dimensions"
        )
    try:
        return torch.tensor(float(value), dtype=torch.float64)
    except OverflowError as error:
        raise UsageError(f"run.log: {name} is too large for a float") from error


def _unlike(name: str, one: str, other: str) -> str:
    return (
        f"run.log: {name!r} was given with reduce={one!r} and with reduce={other!r}; give it one way for the whole run"
    )


def _too_many(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[-3:])
    return (
        f"run.log: there are more than {MOST} names, such as {shown}: each is a curve of its own in every tracker, so "
        "that names are the same in every step, and are not made of its number"
    )
