"""The findings of a check of a whole store."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from checkpointing.reading.verify import Finding
from elastic3d.cli.ckpt.render.words import NARROW, count, table
from elastic3d.cli.render import clean


def findings(url: str, nbytes: int, faults: Sequence[Finding], width: int) -> RenderableType:
    """Return the display of `verify` for a store of `nbytes` bytes."""
    if not faults and not nbytes:
        return Text(f"{clean(url)}: there is nothing in it: is that the address?", style="yellow", overflow="fold")
    if not faults:
        what = f"every one of {nbytes:,} bytes is as it was written"
        return Text.assemble(("ok", "green"), f" {clean(url)}: {what}.", overflow="fold")
    head = Text(f"{count(len(faults), 'finding')} in {clean(url)}", style="bold red", overflow="fold")
    spoilt = sorted({checkpoint for finding in faults for checkpoint in finding.checkpoints})
    foot = Text(f"spoils {', '.join(spoilt)}" if spoilt else "spoils no committed checkpoint", overflow="fold")
    if width < NARROW:
        return Group(head, *(_lines(finding) for finding in faults), foot)
    made = table("fault", "rank", "tensor", "object", "detail", fold=("tensor", "object", "detail"))
    for finding in faults:
        made.add_row(
            Text(str(finding.fault), style="red"),
            "" if finding.rank is None else str(finding.rank),
            Text(clean(f"{finding.tensor or ''} {finding.box or ''}".strip())),
            Text(clean(finding.object)),
            Text(clean(finding.detail)),
        )
    return Group(head, made, foot)


def _lines(finding: Finding) -> Text:
    where = clean(f"{finding.tensor or ''} {finding.box or ''}".strip())
    rank = "" if finding.rank is None else f" (rank {finding.rank})"
    text = Text.assemble((str(finding.fault), "red"), f" {clean(finding.object)}{rank}", overflow="fold")
    return text.append(f"\n  {where}" if where else "").append(f"\n  {clean(finding.detail)}")
