"""What `trackers=` of `elastic3d.run` names: text such as "csv:losses.csv", or a Tracker.

Nothing is imported or opened here but the entry points of others: every process of a job calls this.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from checkpointing.stores.address import redacted
from elastic3d.errors import UsageError
from elastic3d.paths import expanded
from elastic3d.trackers.tracker import Tracker

GROUP = "elastic3d.trackers"
"""Entry points of this group are callables that make a Tracker from the text after the colon."""

MOST = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A tracker, and what people call it. place: the file or folder, "" for others: two writers of it would quarrel."""

    name: str
    tracker: Tracker
    place: str = ""


def chosen(given: Any) -> tuple[Named, ...]:
    """Return the trackers that a user asks for; UsageError where they cannot be had."""
    if isinstance(given, str | Tracker) or not isinstance(given, Iterable):
        raise UsageError(f"elastic3d.run(trackers={given!r}): give a list, such as ['csv:losses.csv']")
    items = list(given)
    if len(items) > MOST:
        raise UsageError(f"elastic3d.run(trackers=...): give at most {MOST}, not {len(items)}")
    named = [_one(item) for item in items]
    places = [one.place or one.name for one in named]
    for one, place in zip(named, places, strict=True):
        if places.count(place) > 1:
            raise UsageError(f"elastic3d.run(trackers=...): {one.name} is given twice")
    return tuple(named)


def _one(item: Any) -> Named:
    if isinstance(item, Tracker):
        return Named(name=type(item).__name__, tracker=item)
    kind, colon, rest = item.partition(":") if isinstance(item, str) else ("", "", "")
    if not colon or not rest.strip() or "\0" in rest or not rest.isprintable():
        raise UsageError(
            f"elastic3d.run(trackers=[{item!r}]): give an elastic3d.Tracker, or a kind and a place, such as "
            "'csv:losses.csv', 'jsonl:losses.jsonl', 'tensorboard:runs/gpt', 'mlflow:experiment' or 'wandb:project'"
        )
    if kind in _KINDS:
        place = str(_path(rest)) if kind in ("csv", "jsonl", "tensorboard") and not _is_url(rest) else ""
        return Named(name=_shown(kind, rest), tracker=_KINDS[kind](rest), place=place)
    return Named(name=_shown(kind, rest), tracker=_others(kind, rest))


def _shown(kind: str, rest: str) -> str:
    """Return the text without a password that an address in it may have."""
    before, at, uri = rest.partition("@") if kind == "mlflow" else ("", "", rest)
    return f"{kind}:{before}{at}{redacted(uri)}"


def _csv(place: str) -> Tracker:
    from elastic3d.trackers.lines import Csv

    return Csv(_medium(place))


def _jsonl(place: str) -> Tracker:
    from elastic3d.trackers.lines import JsonLines

    return JsonLines(_medium(place))


def _medium(place: str) -> Any:
    from elastic3d.trackers.media import FileMedium, ObjectMedium

    if not _is_url(place):
        return FileMedium(_path(place))
    scheme = place.partition("://")[0]
    from fsspec.core import get_filesystem_class

    try:
        get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise UsageError(f"elastic3d.run(trackers=...): {place}: {error}") from error
    return ObjectMedium(place)


def _tensorboard(place: str) -> Tracker:
    from elastic3d.trackers.event_files import EventFiles

    _need("tensorboard", "tensorboard")
    if _is_url(place):
        raise UsageError(
            f"elastic3d.run(trackers=['tensorboard:{place}']): give a folder on a disk that all nodes share; event "
            "files grow record by record, which object stores cannot do"
        )
    return EventFiles(_path(place))


def _mlflow(place: str) -> Tracker:
    from elastic3d.trackers.mlflow_runs import MlflowRuns

    _need("mlflow", "mlflow")
    experiment, at, uri = place.partition("@")
    if not experiment or (at and not uri):
        raise UsageError(
            f"elastic3d.run(trackers=['mlflow:{place}']): give an experiment, and, if MLFLOW_TRACKING_URI does not say "
            "it, the server: 'mlflow:experiment@http://host:5000'"
        )
    return MlflowRuns(experiment, uri or None)


def _wandb(place: str) -> Tracker:
    from elastic3d.trackers.wandb_runs import WandbRuns

    _need("wandb", "wandb")
    entity, _, project = place.rpartition("/")
    if not re.fullmatch(r"[\w.-]{1,128}", project) or not re.fullmatch(r"[\w.-]*", entity):
        raise UsageError(
            f"elastic3d.run(trackers=['wandb:{place}']): give a project, or an entity and a project, such as "
            "'wandb:team/project'"
        )
    return WandbRuns(project, entity or None)


_KINDS: Mapping[str, Callable[[str], Tracker]] = MappingProxyType(
    {"csv": _csv, "jsonl": _jsonl, "tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb}
)


def _others(kind: str, rest: str) -> Tracker:
    points = list(importlib.metadata.entry_points(group=GROUP, name=kind))
    if not points:
        known = [*_KINDS, *sorted({point.name for point in importlib.metadata.entry_points(group=GROUP)})]
        raise UsageError(
            f"elastic3d.run(trackers=['{kind}:{rest}']): no tracker is named {kind!r}: give one of {', '.join(known)}"
        )
    try:
        made = points[0].load()(rest)
    except Exception as error:
        raise UsageError(
            f"elastic3d.run(trackers=['{kind}:{rest}']): {points[0].value} failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, Tracker):
        raise UsageError(
            f"elastic3d.run(trackers=['{kind}:{rest}']): {points[0].value} did not return an elastic3d.Tracker"
        )
    return made


def _need(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise UsageError(
            f"elastic3d.run(trackers=['{extra}:...']): {module} is not installed: pip install 'elastic3d[{extra}]'"
        )


def _is_url(place: str) -> bool:
    return re.match(r"^[A-Za-z][A-Za-z0-9+.-]*://", place) is not None


def _path(place: str) -> Path:
    return expanded(place, "elastic3d.run: trackers").absolute()
