"""Sizes, numbers and times in few letters, and the form of all tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from rich.table import Table
from rich.text import Text

from checkpointing.format.names import parse_checkpoint
from elastic3d.cli.render import clean

NARROW = 72
WIDE = 110


def size(nbytes: int) -> str:
    """Return bytes with three digits or so: 17 B, 1.21 GiB."""
    if nbytes < 1024:
        return f"{nbytes} B"
    amount = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        amount /= 1024
        if amount < 999.5:
            return f"{amount:.3g} {unit}" if amount < 99.5 else f"{amount:.0f} {unit}"
    return f"{amount / 1024:.3g} PiB"


def percent(part: float, whole: float) -> str:
    """Return a share, with a digit after the point where it matters; 0 and 100 only for nothing and all."""
    if not whole:
        return "-"
    share = 100 * part / whole
    if 0 < share < 0.1:
        return "<0.1 %"
    if 99.9 < share < 100:
        return ">99.9 %"
    return f"{share:.0f} %" if share in (0, 100) or share >= 10 else f"{share:.1f} %"


def number(value: float | None) -> str:
    """Return a number with four digits, - for none."""
    if value is None:
        return "-"
    return f"{value:.4g}" if math.isfinite(value) else ("inf" if value > 0 else "-inf" if value < 0 else "nan")


def signed(share: float | None) -> str:
    """Return a relative move: +1.2 %, -0.03 %, 0, - where it is unknown."""
    if share is None:
        return "-"
    if not share:
        return "0"
    return f"{share * 100:+.2g} %" if math.isfinite(share) and abs(share) < 10 else f"{share:+.2g} x"


def count(amount: int, noun: str) -> str:
    """Return an amount with its noun, in the plural unless it is 1."""
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"


def when(seconds: float) -> str:
    """Return a time by a store's clock, in UTC, as stores give it; - for none."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ") if seconds else "-"
    except (OverflowError, ValueError, OSError):
        return "?"


def called(checkpoint: str) -> str:
    """Return a checkpoint's name in words: `step 1200 (made in 3, attempt 0, committed in 4)`."""
    parsed = parse_checkpoint(checkpoint)
    if parsed is None:
        return clean(checkpoint)
    save, committed_in = parsed
    return f"step {save.step} (made in {save.made_in}, attempt {save.attempt}, committed in {committed_in})"


def step(checkpoint: str) -> str:
    """Return the step of a checkpoint's name."""
    parsed = parse_checkpoint(checkpoint)
    return str(parsed[0].step) if parsed else "?"


def marks(labels: Sequence[str]) -> Text:
    """Return the labels that point to a checkpoint, such as latest."""
    styles = {"latest": "bold green", "verified": "cyan", "vetted": "bold cyan", "distrusted": "bold red"}
    shown = [Text(clean(label), style=styles.get(label, "yellow")) for label in labels]
    return Text(", ").join(shown)


def shape(dims: Iterable[int]) -> str:
    """Return a shape as torch writes it."""
    return f"[{', '.join(map(str, dims))}]"


def table(*columns: str, right: Sequence[str] = (), fold: Sequence[str] = ()) -> Table:
    """Return a table without lines; columns in `right` are for numbers, those in `fold` wrap where space is short."""
    made = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        made.add_column(
            column,
            justify="right" if column in right else "left",
            no_wrap=column not in fold,
            overflow="fold",
        )
    return made
