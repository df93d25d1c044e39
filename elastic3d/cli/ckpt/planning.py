"""`ckpt plan`: what each rank of another mesh would read, without reading it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from checkpointing.inspection.documents import CheckpointDocuments, find
from checkpointing.inspection.reads import Reads, TileIndex
from checkpointing.inspection.writers import writers
from elastic3d.cli.ckpt.documents import ReaderDocument, ReshardDocument, TensorHomes
from elastic3d.cli.ckpt.naming import choose
from elastic3d.cli.ckpt.place import StorePlace, Which
from elastic3d.cli.ckpt.render import two as shown
from elastic3d.cli.ckpt.telling import bar, tell
from elastic3d.errors import UsageError
from elastic3d.planner.placement import place_of
from elastic3d.planner.shares import Homes, MeshSizes, boxes_of, check_target, find_homes, parameter_of


def plan(
    place: StorePlace,
    checkpoint: Which = "latest",
    to: Annotated[str, typer.Option("--to", metavar="pp=N,dp=N,tp=N", help="The mesh; an axis left out is 1.")] = "",
    blocks: Annotated[
        str,
        typer.Option("--blocks", metavar="PATH", help="Where the repeated layers are.", show_default="by name"),
    ] = "",
    last: Annotated[
        list[str] | None,
        typer.Option("--last", metavar="PATTERN", help="Tensors after the blocks, such as 'head.*'; repeatable."),
    ] = None,
    slots: Annotated[int, typer.Option("--slots", min=1, help="Ranks of a node, which reads each tile once.")] = 1,
    *,
    as_json: bool,
) -> None:
    """Say what each rank of another mesh would read to restore a checkpoint: a dry run of a reshard.

    Stages are cut as a run cuts them: evenly, between the numbered blocks; dim 0 is cut evenly over tp, then dp.
    Tensors outside the blocks belong to the first stage, unless `--last` or the mesh that wrote the checkpoint says
    that they come after them. Without blocks to cut stages from, every tensor is cut evenly over all ranks. `over-read`
    is bytes read for each byte needed; tiles are read whole, and near neighbours in one request. No pack is read.

    Examples:

        elastic3d ckpt plan /data/run-7 --to dp=2

        elastic3d ckpt plan s3://bucket/gpt-1b --to pp=2,dp=3,tp=2 --last 'head.*'

        elastic3d ckpt plan s3://bucket/gpt-1b 1200 --to pp=4,dp=8 --slots 8 --json
    """
    if not to:
        raise UsageError("plan needs --to, the mesh that would restore the checkpoint, as in --to pp=2,dp=3,tp=2")
    target = MeshSizes.parse(to)
    if target.world % slots:
        raise UsageError(f"--slots {slots}: {target.world} ranks ({target}) are not a whole number of such nodes")
    store = place.open()
    chosen = choose(store, checkpoint)
    documents = find(store, chosen.name, expected=chosen.expected)
    homes = homes_of(documents, blocks or None, last or [])
    check_target(target, homes)
    readers = []
    with bar("planning", total=target.world // slots, in_bytes=False) as advance:
        for reader, reads in enumerate(plan_reads(documents, target, homes, slots)):
            ranks = range(reader * slots, (reader + 1) * slots)
            places = [place_of(rank, target) for rank in ranks]
            readers.append(shown.ReadingRanks(ranks=tuple(ranks), places=tuple(places), reads=reads))
            advance(reader + 1)
    data = ReshardDocument(
        checkpoint=documents.name,
        target=target,
        slots=slots,
        homes=TensorHomes(
            blocks=homes.blocks,
            count=homes.count,
            last=tuple(sorted(homes.last)),
            whole=tuple(sorted(homes.whole)),
            guessed=tuple(sorted(homes.guessed)),
        ),
        readers=tuple(map(_reader, readers)),
    )
    tell(store, data, lambda width: shown.plan(documents, target, homes, readers, width), as_json=as_json)


def homes_of(documents: CheckpointDocuments, blocks: str | None, last: list[str]) -> Homes:
    """Return where a checkpoint's tensors live in a pipeline, from names and from the mesh that wrote it."""
    mesh = writers(documents.ranks)
    held = [
        {key for rank in stage for key in {t.spec.key for t in documents.ranks[rank].tiles}} for stage in mesh.stages
    ]
    return find_homes(
        documents.specs.values(),
        blocks=blocks,
        last=last,
        stages=held if mesh.regular else (),
        whole=mesh.replicated,
    )


def plan_reads(documents: CheckpointDocuments, target: MeshSizes, homes: Homes, slots: int = 1) -> Iterator[Reads]:
    """Yield what each node of `slots` ranks would read, in order of rank."""
    catalogue = TileIndex(documents.tiles)
    shapes = {
        parameter_of(key): spec.shape
        for key, spec in documents.specs.items()
        if not key.startswith(("optimizer/", "extra/"))
    }
    specs = list(documents.specs.values())
    for first in range(0, target.world, slots):
        ranks = range(first, first + slots)
        yield catalogue.reads(wanted for rank in ranks for wanted in boxes_of(specs, rank, target, homes, shapes))


def _reader(one: shown.ReadingRanks) -> ReaderDocument:
    return ReaderDocument(
        ranks=one.ranks,
        places=one.places,
        needed=one.reads.needed,
        read=one.reads.read,
        stored=one.reads.stored,
        tiles=one.reads.tiles,
        requests=one.reads.requests,
        packs=one.reads.packs,
        over_read=one.reads.over_read,
    )
