"""`ckpt export --follow`: each new checkpoint of a live run, as it comes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from checkpointing import Store
from checkpointing.errors import CheckpointError, NoCheckpoint, NotExportable, StoreError
from checkpointing.reading.announcing import reading
from checkpointing.reading.following import Follower, is_away, place
from elastic3d.cli.ckpt.documents import ExportDocument
from elastic3d.cli.ckpt.ending import ended_by_signals
from elastic3d.cli.ckpt.exported import ExportFolder
from elastic3d.cli.ckpt.place import complain
from elastic3d.cli.ckpt.telling import bar, document
from elastic3d.clock import SYSTEM

if TYPE_CHECKING:
    from elastic3d.cli.ckpt.exporting import ExportWish

UntilStep = Annotated[
    int | None,
    typer.Option("--until-step", metavar="STEP", min=0, help="With --follow: end after one of this step or later."),
]
LookEvery = Annotated[
    str, typer.Option("--every", metavar="DURATION", help="With --follow: how often to look for new ones.")
]

PATIENCE = 10.0
"""Seconds for which one operation is tried again, before it is said that the store is waited for."""


def follow(
    store: Store,
    wanted: str,
    target: Path,
    wish: ExportWish,
    *,
    every: float,
    once_after: int | None,
    until_step: int | None,
    as_json: bool,
) -> None:
    """Write each new checkpoint into a folder, until the end that was asked for, or Ctrl-C.

    Exit code 1 if a checkpoint was passed over because it is damaged; 130 after Ctrl-C or SIGTERM.
    """
    damaged = False
    with (
        ended_by_signals(lambda: "stopped; nothing half-written is left"),
        ExportFolder(target, store.url, wish.suffix) as folder,
    ):
        follower = Follower(
            store,
            wanted,
            done=folder.done,
            after=-1 if once_after is None else once_after,
            every=every,
            say=complain,
            sleep=SYSTEM.sleep,
        )
        while not _over(folder.done, once_after, until_step):
            name = follower.next()
            try:
                one = _export(store, name, folder, wish)
            except NotExportable:
                raise
            except NoCheckpoint as error:
                complain(f"{name} is passed over, for it is gone: {error}")
            except (CheckpointError, OSError) as error:
                if is_away(error):
                    follower.away(error)
                    continue
                if isinstance(error, StoreError | OSError):
                    raise
                damaged = True
                complain(f"{name} is passed over: {error}")
            else:
                print(_line(store.url, one, as_json=as_json), flush=True)
            follower.passed(name)
            if until_step is not None and place(name)[1] >= until_step:
                break
    if damaged:
        raise typer.Exit(1)


def _over(done: set[str], once_after: int | None, until_step: int | None) -> bool:
    """Return whether what was asked for has been written, by this process or one before it."""
    steps = [place(name)[1] for name in done]
    if until_step is not None and any(step >= until_step for step in steps):
        return True
    return once_after is not None and any(step > once_after for step in steps)


def _export(store: Store, name: str, folder: ExportFolder, wish: ExportWish) -> ExportDocument:
    # Announced before it is read: however short the grace of a collection, it is not deleted meanwhile.
    with reading(store, name, after=0) as opened:
        target = folder.begin(name)
        with bar(f"exporting {target.name}") as advance:
            done = wish.write(opened, target, advance)
        folder.end(name, target)
    return wish.document(opened, target, done)


def _line(url: str, one: ExportDocument, *, as_json: bool) -> str:
    if as_json:
        return json.dumps(document(url, one), allow_nan=False)
    from elastic3d.cli.ckpt.exporting import in_words

    return f"step {one.step}: {in_words(one)}"
