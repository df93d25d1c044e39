"""`ckpt ls`, `log` and `du`: what a store holds, from refs, records, manifests and the store's listing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console

from checkpointing import Store, read_latest
from checkpointing.errors import CheckpointError
from checkpointing.inspection.documents import CheckpointDocuments, find, times
from checkpointing.inspection.history import history
from checkpointing.inspection.usage import usage
from checkpointing.reading.reader import read_record
from checkpointing.stores.protocol import Entry
from elastic3d.cli.ckpt.documents import DuDocument, LogDocument, LsDocument
from elastic3d.cli.ckpt.naming import committed, labels
from elastic3d.cli.ckpt.place import StorePlace, complain
from elastic3d.cli.ckpt.render import store as shown
from elastic3d.cli.ckpt.telling import bar, tell


def ls(place: StorePlace, *, as_json: bool) -> None:
    """List the committed checkpoints of a store, newest first.

    Only refs and records are read, however large the checkpoints are. A checkpoint is named by its step, generations
    and attempt; `latest`, `verified`, `vetted`, tags and pins that point to it are shown beside it, and `distrusted` if
    a device that computes wrongly may have spoilt it. Exit code 1 means that a record cannot be read.

    Examples:

        elastic3d ckpt ls /data/run-7

        elastic3d ckpt ls s3://bucket/gpt-1b --json

        elastic3d ckpt ls s3://bucket/gpt-1b --json | jq -r '.checkpoints[0].checkpoint'
    """
    store = place.open()
    ref = read_latest(store)
    generation = ref.generation if ref is not None else None
    pointed, modified = labels(store), times(store)
    rows: list[shown.CheckpointRow] = []
    for name in committed(store):
        marks = pointed.get(name, ())
        try:
            record = read_record(store, name)
        except CheckpointError as error:
            rows.append(shown.CheckpointRow(checkpoint=name, labels=marks, error=str(error)))
            continue
        rows.append(
            shown.CheckpointRow(
                checkpoint=name,
                labels=marks,
                latest="latest" in marks,
                step=record.save.step,
                made_in=record.save.made_in,
                committed_in=record.committed_in,
                ranks=record.world,
                tensors=record.totals.tensors,
                tiles=record.totals.tiles,
                bytes=record.totals.bytes,
                root=record.root,
                modified=modified.get(name, 0.0),
            )
        )
    data = LsDocument(generation=generation, checkpoints=tuple(rows))
    tell(store, data, lambda width: shown.checkpoints(store.url, generation, rows, width), as_json=as_json)
    if any(row.error for row in rows):
        raise typer.Exit(1)


def log(
    place: StorePlace,
    number: Annotated[int, typer.Option("-n", min=1, help="At most this many, the newest.")] = 20,
    *,
    as_json: bool,
) -> None:
    """Show one line per commit, newest first, with what each changed and wrote.

    `changed` is the share of bytes whose digests differ from those of the commit before, or `recut` if another mesh cut
    the tensors at other places and only `diff --values` can tell. `written` is what the commit added to the store,
    `kept` what it refers to in older packs. Only manifests are read. Exit code 1 means that some commit cannot be read.

    Examples:

        elastic3d ckpt log /data/run-7

        elastic3d ckpt log s3://bucket/gpt-1b -n 100

        elastic3d ckpt log /data/run-7 --json | jq '.commits[] | {step, written}'
    """
    store = place.open()
    names = committed(store)
    number = min(number, len(names))
    pointed, commits = labels(store), []
    with bar("reading manifests", total=number, in_bytes=False) as advance:
        for commit in itertools.islice(history(store, names[: number + 1], times(store)), number):
            commits.append(commit)
            advance(len(commits))
    more = len(names) - len(commits)
    data = LogDocument(commits=tuple(commits), more=more, labels=pointed)
    tell(store, data, lambda width: shown.commits(store.url, commits, pointed, more, width), as_json=as_json)
    if any(commit.error for commit in commits):
        raise typer.Exit(1)


def du(place: StorePlace, *, as_json: bool) -> None:
    """Show how much space each checkpoint takes in the store, alone and together with others.

    A tile that did not change is stored once and shared by all checkpoints that have it. `unique` is what no other
    committed checkpoint refers to; `frees` is by how much the store would shrink if only this one were collected: whole
    packs, and its documents. What no committed checkpoint needs is garbage, or belongs to a save under way. Manifests
    and the store's listing are read, no pack.

    Examples:

        elastic3d ckpt du /data/run-7

        elastic3d ckpt du s3://bucket/gpt-1b --json | jq .usage.unreferenced
    """
    store = place.open()
    unreadable: list[str] = []
    total = usage(_readable(store, unreadable), _listed(store))
    data = DuDocument(usage=total, unreadable=tuple(unreadable))
    tell(store, data, lambda width: shown.usage(store.url, total, labels(store), width), as_json=as_json)
    if unreadable:
        raise typer.Exit(1)


def _readable(store: Store, unreadable: list[str]) -> Iterator[CheckpointDocuments]:
    """Yield the committed checkpoints, one in memory at a time; names of those that cannot be read are appended."""
    names = committed(store)
    with bar("reading manifests", total=len(names), in_bytes=False) as advance:
        for done, name in enumerate(names, start=1):
            try:
                documents = find(store, name)
            except CheckpointError as error:
                unreadable.append(name)
                complain(error)
            else:
                yield documents
            advance(done)


def _listed(store: Store) -> Iterator[Entry]:
    with Console(stderr=True).status("listing objects"):
        yield from store.entries("")
