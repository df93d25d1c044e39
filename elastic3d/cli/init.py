"""`elastic3d init`: the files that a new job begins with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from elastic3d.errors import UsageError
from elastic3d.scaffold.files import files
from elastic3d.scaffold.job import checked
from elastic3d.scaffold.places import Place
from elastic3d.scaffold.steps import next_steps
from elastic3d.scaffold.writing import PlannedFile, planned, refuse_overwriting, write
from elastic3d.values import to_json

SCHEMA = 1


class FileState(StrEnum):
    """What becomes of a file."""

    NEW = "new"
    SAME = "same"
    REPLACED = "replaced"
    IN_THE_WAY = "in the way"


@dataclass(frozen=True, slots=True, kw_only=True)
class InitFile:
    """A file of a new job."""

    path: str
    """Below the job's folder."""
    state: FileState
    """`same` is left as it is; `in the way` is replaced with `--force` only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitDocument:
    """What `elastic3d init` wrote, or with `--dry-run` would."""

    place: Place
    """What is to start the nodes."""
    folder: str
    """As given."""
    written: bool
    """False for a dry run."""
    files: tuple[InitFile, ...]
    """All files of the job."""
    next: tuple[str, ...]
    """Commands, and lines that begin with `#`."""


def init(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to; made if it is not there.")] = Path("."),
    place: Annotated[
        Place, typer.Option("--on", help="What starts the nodes.", show_choices=True, show_default=False)
    ] = ...,  # type: ignore[assignment]  # typer's word for an option that has to be given
    name: Annotated[
        str, typer.Option("--name", help="The job, and its --rdzv-id.", show_default="that of the folder")
    ] = "",
    nodes: Annotated[
        str,
        typer.Option("--nodes", metavar="N|MIN:MAX", help="Nodes that train at once.", show_default="2:8; local: 1:2"),
    ] = "",
    slots: Annotated[int | None, typer.Option("--slots", help="Devices of a node.", show_default="8; local: 1")] = None,
    store: Annotated[
        str,
        typer.Option("--store", metavar="URL", help="Where checkpoints go.", show_default="local: ./checkpoints"),
    ] = "",
    endpoint: Annotated[
        str,
        typer.Option("--endpoint", metavar="HOST:PORT,...", help="Your etcd.", show_default="one is written, too"),
    ] = "",
    image: Annotated[str, typer.Option("--image", help="For Kubernetes.", show_default="example.org/NAME:1")] = "",
    namespace: Annotated[str, typer.Option("--namespace", help="For Kubernetes.")] = "training",
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there with other contents.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the files, and write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write what a job begins with: a script to put your model into, and what starts its nodes in your place.

    The manifests are those of deploy/, with your names and numbers. Files that are there are not touched: with other
    contents, nothing is written at all, unless --force is given.

    Examples:

        elastic3d init first --on local

        elastic3d init --on kubernetes --name gpt-1b --nodes 2:8 --store s3://bucket/gpt-1b

        elastic3d init --on slurm --name gpt-1b --store /data/gpt-1b --endpoint e1:2379,e2:2379,e3:2379 --dry-run
    """
    job = checked(
        place,
        name=name or _name(folder),
        nodes=nodes or ("1:2" if place is Place.LOCAL else "2:8"),
        slots=slots if slots is not None else (1 if place is Place.LOCAL else 8),
        store=store,
        endpoint=endpoint,
        image=image,
        namespace=namespace,
    )
    wanted = planned(folder, files(place, job))
    if not dry_run:
        if not force:
            refuse_overwriting(wanted)
        write(wanted)
    document = InitDocument(
        place=place,
        folder=str(folder),
        written=not dry_run,
        files=tuple(InitFile(path=str(file.path.relative_to(folder)), state=_state(file, force)) for file in wanted),
        next=next_steps(place, job, folder),
    )
    if as_json:
        print(json.dumps({"schema": SCHEMA, **to_json(document)}))
    else:
        print(_shown(document))


def _name(folder: Path) -> str:
    name = folder.resolve().name
    if not name:
        raise UsageError("--name is needed: this folder has none")
    return name


def _state(file: PlannedFile, force: bool) -> FileState:
    if not file.there:
        return FileState.NEW
    if file.same:
        return FileState.SAME
    return FileState.REPLACED if force else FileState.IN_THE_WAY


def _shown(document: InitDocument) -> str:
    verb = "written to" if document.written else "would be written to"
    width = max(len(file.path) for file in document.files)
    lines = [f"{verb} {document.folder}:"]
    lines += [f"  {file.path:{width}}  {file.state}".rstrip() for file in document.files]
    return "\n".join([*lines, "", "next:", *(f"  {line}" for line in document.next)])
