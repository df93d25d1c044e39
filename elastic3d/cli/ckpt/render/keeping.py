"""Displays of what keeps checkpoints, and of what a collection would do or has done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from checkpointing.retention.collection import Collected, CollectionPlan
from checkpointing.retention.sweep import SweepProgress
from elastic3d.cli.ckpt.render.words import count, size, table
from elastic3d.cli.durations import spell
from elastic3d.cli.render import clean

LISTED = 20


def pairs(noun: str, there: Mapping[str, str], url: str) -> RenderableType:
    """Return the display of tags and their checkpoints, or of pinned checkpoints and their reasons."""
    if not there:
        none = "No tags" if noun == "tag" else "Nothing is pinned"
        return Text(f"{none} in {clean(url)}.", overflow="fold")
    made = table(noun, "checkpoint" if noun == "tag" else "reason", fold=("reason",))
    for one, other in there.items():
        made.add_row(Text(clean(one), style="yellow"), Text(clean(other)))
    return made


def collection_plan(url: str, plan: CollectionPlan) -> RenderableType:
    """Return the display of what a collection would do."""
    lines = [Text(f"{clean(url)}: {count(len(plan.kept), 'checkpoint')} would stay", style="bold", overflow="fold")]
    lines += [Text(f"  would drop {name}", style="yellow") for name in plan.dropped[:LISTED]]
    if len(plan.dropped) > LISTED:
        lines.append(Text(f"  and {len(plan.dropped) - LISTED} more", style="dim"))
    lines.append(Text(f"would free {size(plan.bytes)} in {count(len(plan.objects), 'object')}; nothing was changed"))
    lines += _over(plan.over)
    return Group(*lines)


def collected(url: str, done: Collected) -> RenderableType:
    """Return the display of what a collection has done."""
    lines = [Text(f"  dropped {name}", style="yellow") for name in done.dropped[:LISTED]]
    if len(done.dropped) > LISTED:
        lines.append(Text(f"  and {len(done.dropped) - LISTED} more", style="dim"))
    lines.append(Text(f"freed {size(done.bytes)} in {count(len(done.objects), 'object')}"))
    if done.spared:
        lines.append(Text(f"spared {count(done.spared, 'object')}: needed after all", style="cyan"))
    lines += _over(done.over or 0)
    if done.waiting:
        lines.append(Text(f"more is condemned: call again in {spell(done.waiting)} to delete it", style="yellow"))
    return Group(Text(clean(url), style="bold", overflow="fold"), *lines)


def stopped(come: SweepProgress) -> str:
    """Return how far a collection came that a signal ended; the batch that it was at is not counted."""
    if not come.total:
        return "stopped before anything was deleted; the same command goes on from there"
    deleted = f"at least {come.done} of {count(come.total, 'object')} are deleted"
    return f"stopped: {deleted}; the same command goes on with the rest"


def _over(nbytes: int) -> list[Text]:
    """Return a line if what must stay takes more space than it may."""
    if not nbytes:
        return []
    why = "latest, verified, vetted, tags, pins or what is being read: untag or unpin some, or allow more"
    return [Text(f"what must stay takes {size(nbytes)} more than --keep-bytes ({why})", style="yellow")]


def repaired(url: str, generation: int, committed: Sequence[str]) -> RenderableType:
    """Return the display of `latest` after a repair."""
    if not committed:
        return Text(f"{clean(url)}: latest points to nothing yet; generation {generation} may commit", overflow="fold")
    return Text(
        f"{clean(url)}: latest is {committed[0]}, with {count(len(committed) - 1, 'checkpoint')} before it; "
        f"generation {generation} may commit",
        overflow="fold",
    )
