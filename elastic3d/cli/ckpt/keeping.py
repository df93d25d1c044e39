"""`ckpt tag`, `untag`, `pin`, `unpin`, `gc` and `repair`: which checkpoints stay, and how the rest is deleted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.text import Text

from checkpointing.errors import CheckpointError
from checkpointing.reading import naming
from checkpointing.retention import collection, protection, ref_repair
from checkpointing.retention.policy import Retention
from checkpointing.retention.sweep import SweepProgress
from elastic3d.cli.ckpt.completing import complete_checkpoints, complete_tags
from elastic3d.cli.ckpt.documents import (
    GcDocument,
    GcPlanDocument,
    PinDocument,
    PinsDocument,
    RepairDocument,
    TagDocument,
    TagsDocument,
    UnpinDocument,
    UntagDocument,
)
from elastic3d.cli.ckpt.ending import ended_by_signals
from elastic3d.cli.ckpt.naming import choose
from elastic3d.cli.ckpt.place import StorePlace, Which
from elastic3d.cli.ckpt.render import keeping as shown
from elastic3d.cli.ckpt.telling import bar, tell
from elastic3d.errors import UsageError
from elastic3d.quantities import size, some_seconds

_Tag = Annotated[
    str,
    typer.Argument(metavar="[TAG]", help="The name to give.", autocompletion=complete_tags, show_default=False),
]
_Any = Annotated[
    str,
    typer.Argument(
        metavar="[CHECKPOINT]",
        help="latest, verified, vetted, a tag, a step, or a name or its beginning.",
        autocompletion=complete_checkpoints,
        show_default=False,
    ),
]
_One = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="latest, verified, vetted, a tag, a step, or a name or its beginning.",
        autocompletion=complete_checkpoints,
    ),
]


def tag(
    place: StorePlace,
    name: _Tag = "",
    checkpoint: Which = "latest",
    move: Annotated[bool, typer.Option("--move", help="Take the tag from the checkpoint that has it.")] = False,
    *,
    as_json: bool,
) -> None:
    """Give a checkpoint a name of its own, which keeps it from being collected; without a name, list the tags.

    Examples:

        elastic3d ckpt tag s3://bucket/gpt-1b before-lr-drop 1200

        elastic3d ckpt tag s3://bucket/gpt-1b best latest --move

        elastic3d ckpt tag s3://bucket/gpt-1b
    """
    if not name:
        if checkpoint != naming.LATEST or move:
            what = f"checkpoint {checkpoint!r}" if checkpoint != naming.LATEST else "--move"
            raise UsageError(f"{what} without a tag to give: name one, as in `elastic3d ckpt tag URL best 1200`")
        store = place.open()
        there = protection.tags(store)
        tell(store, TagsDocument(tags=there), lambda width: shown.pairs("tag", there, store.url), as_json=as_json)
        return
    store = place.open(write=True)
    with _usage_errors():
        chosen = protection.tag(store, name, checkpoint, move=move)
    tell(store, TagDocument(tag=name, checkpoint=chosen), lambda _: Text(f"{name} -> {chosen}"), as_json=as_json)


def untag(
    place: StorePlace,
    name: Annotated[str, typer.Argument(metavar="TAG", help="A tag.", autocompletion=complete_tags)],
    *,
    as_json: bool,
) -> None:
    """Remove a tag. Its checkpoint stays until a collection finds nothing else that keeps it.

    Examples:

        elastic3d ckpt untag s3://bucket/gpt-1b before-lr-drop
    """
    store = place.open(write=True)
    if not protection.untag(store, name):
        raise UsageError(f"store {store.url}: there is no tag {name!r}; `elastic3d ckpt tag` lists those there are")
    tell(store, UntagDocument(untagged=name), lambda _: Text(f"{name} points to nothing any more"), as_json=as_json)


def pin(
    place: StorePlace,
    checkpoint: _Any = "",
    reason: Annotated[str, typer.Option("--reason", help="Why it must stay; shown in lists.")] = "",
    *,
    as_json: bool,
) -> None:
    """Keep a checkpoint whatever the retention; without one, list the pinned ones with their reasons.

    Examples:

        elastic3d ckpt pin s3://bucket/gpt-1b 1200 --reason "evaluation is running on it"

        elastic3d ckpt pin s3://bucket/gpt-1b
    """
    if not checkpoint:
        if reason:
            raise UsageError("--reason without a checkpoint to pin: name one, as in `elastic3d ckpt pin URL 1200`")
        store = place.open()
        there = protection.pins(store)
        tell(store, PinsDocument(pins=there), lambda width: shown.pairs("pinned", there, store.url), as_json=as_json)
        return
    store = place.open(write=True)
    with _usage_errors():
        name = protection.pin(store, checkpoint, reason)
    tell(store, PinDocument(pinned=name, reason=reason), lambda _: Text(f"{name} is pinned"), as_json=as_json)


def unpin(place: StorePlace, checkpoint: _One, *, as_json: bool) -> None:
    """Let a pinned checkpoint go again. It stays until a collection finds nothing else that keeps it.

    Examples:

        elastic3d ckpt unpin s3://bucket/gpt-1b 1200
    """
    store = place.open(write=True)
    name = choose(store, checkpoint).name
    if not protection.unpin(store, name):
        raise UsageError(f"store {store.url}: {name} is not pinned; `elastic3d ckpt pin` lists those that are")
    tell(store, UnpinDocument(unpinned=name), lambda _: Text(f"{name} is not pinned any more"), as_json=as_json)


def gc(
    place: StorePlace,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", min=1, help="Keep this many of the newest.", show_default="all")
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option("--keep-every", metavar="STEPS", min=1, help="Also keep one per this many steps."),
    ] = None,
    keep_bytes: Annotated[
        str | None,
        typer.Option("--keep-bytes", metavar="SIZE", help="What all together may take, such as 50GiB: the oldest go."),
    ] = None,
    grace: Annotated[
        str,
        typer.Option("--grace", metavar="DURATION", help="Time for readers that cannot announce themselves."),
    ] = "5m",
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only say what it would do.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait out the grace; else call again later.")] = True,
    *,
    as_json: bool,
) -> None:
    """Drop the checkpoints that nothing keeps, and delete what no other needs.

    `latest`, `verified`, `vetted`, tags, pins and what is being read always stay. Without `--keep-last` or
    `--keep-bytes` no checkpoint is dropped, and only what failed saves left behind is deleted. Safe beside writers,
    readers and other collectors: objects are condemned first, stay for the grace, are checked again, and then deleted.
    Anything that reads or writes for more than half a minute announces itself in the store, and loses nothing. After
    Ctrl-C the same command goes on.

    Examples:

        elastic3d ckpt gc s3://bucket/gpt-1b --keep-last 5 --keep-every 1000 --dry-run

        elastic3d ckpt gc s3://bucket/gpt-1b --keep-last 5 --keep-every 1000 --grace 10m

        elastic3d ckpt gc /data/run-7 --keep-bytes 50GiB

        elastic3d ckpt gc /data/run-7 --no-wait      # condemns; the next call deletes
    """
    seconds = some_seconds(grace, "--grace")
    if keep_every is not None and keep_last is None:
        raise UsageError("--keep-every alone drops nothing; give --keep-last too, such as --keep-last 5")
    limit = size(keep_bytes, "--keep-bytes") if keep_bytes is not None else None
    retention = Retention(keep_last=keep_last, keep_every=keep_every, keep_bytes=limit)
    store = place.open(write=not dry_run)
    if dry_run:
        plan = collection.plan_collection(store, retention, grace=seconds)
        planned = GcPlanDocument(
            kept=plan.kept,
            dropped=plan.dropped,
            objects=len(plan.objects),
            bytes=plan.bytes,
            over=plan.over,
            names=tuple(doomed.name for doomed in plan.objects),
        )
        tell(store, planned, lambda _: shown.collection_plan(store.url, plan), as_json=as_json)
        return
    come = SweepProgress(done=0, total=0)

    def progressed(now: SweepProgress) -> None:
        nonlocal come
        come = now
        advance(now.done, now.total)

    with (
        ended_by_signals(lambda: shown.stopped(come)),
        bar("deleting" if not wait else "collecting", in_bytes=False) as advance,
    ):
        done = collection.collect(store, retention, grace=seconds, wait=wait, progress=progressed)
    data = GcDocument(
        dropped=done.dropped,
        objects=len(done.objects),
        bytes=done.bytes,
        spared=done.spared,
        waiting=done.waiting,
        over=done.over or 0,
    )
    tell(store, data, lambda _: shown.collected(store.url, done), as_json=as_json)


def repair(
    place: StorePlace,
    generation: Annotated[
        int, typer.Option("--generation", min=0, help="The generation of the run that goes on, if known.")
    ] = 0,
    *,
    as_json: bool,
) -> None:
    """Write the ref `latest` anew, from the records in the store, when it is damaged or lost.

    A ref that can be read is left as it is. Damaged tiles are not repaired here: restoring heals them where another
    tier has a good copy, and `elastic3d ckpt verify` says which checkpoints are whole.

    Examples:

        elastic3d ckpt repair s3://bucket/gpt-1b

        elastic3d ckpt repair /data/run-7 --generation 12
    """
    store = place.open(write=True)
    with _usage_errors():
        ref = ref_repair.repair_latest(store, generation=generation)
    listed = naming.committed(store, ref)
    data = RepairDocument(checkpoint=ref.checkpoint, generation=ref.generation, committed=tuple(listed))
    tell(store, data, lambda _: shown.repaired(store.url, ref.generation, listed), as_json=as_json)


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Raise the library's ValueError as a UsageError: the user gave the value."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise UsageError(str(error)) from error
