"""`ckpt show`, `tree` and `stats`: one checkpoint, from its record and manifests alone."""

from __future__ import annotations

import fnmatch
from enum import StrEnum
from typing import Annotated

import typer

from checkpointing import Store
from checkpointing.format.tiles import TensorSpec
from checkpointing.inspection.difference import by_key
from checkpointing.inspection.documents import CheckpointDocuments, find, times
from checkpointing.inspection.statistics import TensorStatistics
from checkpointing.inspection.statistics import summarise as statistics
from checkpointing.inspection.summary import lineage, summarise
from checkpointing.inspection.tree import tree as grouped
from elastic3d.cli.ckpt.documents import ShowDocument, StatsDocument, TreeDocument
from elastic3d.cli.ckpt.naming import choose, labels
from elastic3d.cli.ckpt.place import StorePlace, Which
from elastic3d.cli.ckpt.render import one as shown
from elastic3d.cli.ckpt.telling import tell
from elastic3d.errors import UsageError

Match = Annotated[
    str,
    typer.Option(
        "--match",
        "-m",
        metavar="PATTERN",
        help="Only tensors whose name matches, with * ? [] as in a shell, or contains the text.",
        show_default=False,
    ),
]
Each = Annotated[bool, typer.Option("--all", "-a", help="Show the tensors of repeated blocks one by one.")]

ANCESTORS = 8


class By(StrEnum):
    """The column by which statistics are sorted."""

    NAME = "name"
    MIN = "min"
    MAX = "max"
    RMS = "rms"
    NANS = "nans"
    SIZE = "size"


def show(
    place: StorePlace,
    checkpoint: Which = "latest",
    facts: Annotated[bool, typer.Option("--facts", help="Show all facts, not only those that fit a line.")] = False,
    *,
    as_json: bool,
) -> None:
    """Show what one checkpoint is: its contents, the mesh that wrote it, its lineage and its facts.

    The mesh is inferred from the parts of tensors that each rank saved: rows are pipeline stages. `parents` are the
    checkpoints from which unchanged tiles were taken. Record and manifests are read, no pack.

    Examples:

        elastic3d ckpt show /data/run-7

        elastic3d ckpt show s3://bucket/gpt-1b 1200

        elastic3d ckpt show s3://bucket/gpt-1b verified --json | jq .summary.root
    """
    store = place.open()
    documents = _documents(store, checkpoint)
    summary = summarise(documents, labels(store).get(documents.name, ()), lineage(store, documents, ANCESTORS))
    tell(
        store,
        ShowDocument(summary=summary),
        lambda width: shown.summary(store.url, summary, width, all_facts=facts),
        as_json=as_json,
    )


def tree(
    place: StorePlace,
    checkpoint: Which = "latest",
    match: Match = "",
    depth: Annotated[int, typer.Option("--depth", "-d", min=1, help="Levels to show.")] = 99,
    each: Each = False,
    *,
    as_json: bool,
) -> None:
    """Show a checkpoint's tensors as a tree of names, with sizes.

    Numbered groups that hold the same tensors are shown as one, such as `0..11`.

    Examples:

        elastic3d ckpt tree /data/run-7

        elastic3d ckpt tree s3://bucket/gpt-1b 1200 --depth 2

        elastic3d ckpt tree s3://bucket/gpt-1b --match 'model/*bias' --all
    """
    store = place.open()
    documents = _documents(store, checkpoint)
    specs = matching(documents, match)
    nodes = grouped(specs, fold=not each)
    data = TreeDocument(checkpoint=documents.name, tree=nodes)
    tell(store, data, lambda width: shown.names(documents.name, nodes, width, depth=depth), as_json=as_json)


def stats(
    place: StorePlace,
    checkpoint: Which = "latest",
    match: Match = "",
    dtype: Annotated[str, typer.Option("--dtype", help="Only tensors of this dtype.", show_default=False)] = "",
    bad: Annotated[bool, typer.Option("--bad", help="Only tensors with a NaN or an infinity; exit 1 if any.")] = False,
    sort: Annotated[By, typer.Option("--sort", help="Sort by this, the largest first.")] = By.NAME,
    number: Annotated[int, typer.Option("-n", min=1, help="At most this many lines.", show_default=False)] = 1 << 30,
    each: Each = False,
    *,
    as_json: bool,
) -> None:
    """Show minimum, maximum, root mean square and NaNs of each tensor.

    They were computed when the tiles were written, to six digits, and kept in the manifests: no tensor is read.
    Integers have none. Tensors of repeated blocks are shown as one line, `{0..11}`, unless they are sorted.

    Examples:

        elastic3d ckpt stats /data/run-7 --match 'model/*'

        elastic3d ckpt stats s3://bucket/gpt-1b --sort rms -n 10

        elastic3d ckpt stats s3://bucket/gpt-1b verified --bad && echo sound
    """
    store = place.open()
    documents = _documents(store, checkpoint)
    tiles = by_key(documents.tiles)
    rows = [statistics(spec, tiles.get(spec.key, [])) for spec in matching(documents, match, dtype)]
    if bad:
        rows = [row for row in rows if not row.sound]
    rows = sorted(rows, key=lambda row: _order(row, sort))
    data = StatsDocument(checkpoint=documents.name, tensors=tuple(rows[:number]))
    tell(
        store,
        data,
        lambda width: shown.statistics(
            documents.name, rows, width, bad=bad, number_of=number, each=each or sort != By.NAME
        ),
        as_json=as_json,
    )
    if bad and rows:
        raise typer.Exit(1)


def matching(documents: CheckpointDocuments, match: str, dtype: str = "") -> list[TensorSpec]:
    """Return the tensors that match the filters, by name; UsageError if none does."""
    specs = [spec for key, spec in sorted(documents.specs.items()) if fits(key, match) and dtype in ("", spec.dtype)]
    if not specs and (match or dtype):
        asked = " ".join(filter(None, [f"--match {match!r}" if match else "", f"--dtype {dtype}" if dtype else ""]))
        raise UsageError(f"{asked}: none of the {len(documents.specs)} tensors of {documents.name} matches")
    return specs


def fits(key: str, match: str) -> bool:
    """Return whether `--match` selects a tensor of this name: a pattern as in a shell, or a part of the name."""
    if any(sign in match for sign in "*?["):
        return fnmatch.fnmatchcase(key, match)
    return match in key


def _documents(store: Store, text: str) -> CheckpointDocuments:
    chosen = choose(store, text)
    return find(store, chosen.name, expected=chosen.expected, modified=times(store).get(chosen.name, 0.0))


def _order(row: TensorStatistics, by: By) -> tuple[float, str]:
    amount = {
        By.NAME: 0.0,
        By.MIN: row.min,
        By.MAX: row.max,
        By.RMS: row.rms,
        By.NANS: row.nans,
        By.SIZE: row.spec.box.numel * row.spec.itemsize,
    }[by]
    return (-amount if amount is not None else float("inf")), row.spec.key
