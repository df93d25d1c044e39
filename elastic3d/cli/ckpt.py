"""`elastic3d ckpt`: look at checkpoints and check them, without loading them."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from checkpointing import open_store, read_latest, verify
from checkpointing.errors import CheckpointError
from checkpointing.reading.reader import read_record
from checkpointing.reading.verify import Finding

app = typer.Typer(
    name="ckpt",
    help="Look at checkpoints and check them, without loading them.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

_Url = Annotated[str, typer.Argument(metavar="URL", help="A directory, or s3://bucket/prefix.", show_default=False)]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@contextmanager
def _errors() -> Iterator[None]:
    """Say what went wrong in one line: exit 2 for what the user must change, 1 for the rest."""
    try:
        yield
    except CheckpointError as error:
        _say(error)
        raise typer.Exit(error.exit_code) from error


def _say(error: CheckpointError) -> None:
    Console(stderr=True, soft_wrap=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False)


@app.command(
    "ls",
    epilog="Examples:\n\n  elastic3d ckpt ls /data/run-7\n\n  elastic3d ckpt ls s3://bucket/gpt-1b --json",
)
def list_checkpoints(url: _Url, as_json: _Json = False) -> None:
    """List the committed checkpoints of a store, newest first."""
    with _errors():
        store = open_store(url, write=False)
        ref = read_latest(store)
        rows: list[dict[str, Any]] = []
        for name in ref.committed if ref is not None else ():
            row: dict[str, Any] = {"checkpoint": name, "latest": name == ref.checkpoint if ref else False}
            try:
                record = read_record(store, name)
            except CheckpointError as error:
                rows.append({**row, "error": str(error)})
                continue
            rows.append(
                {
                    **row,
                    "step": record.save.step,
                    "made_in": record.save.made_in,
                    "committed_in": record.committed_in,
                    "ranks": record.world,
                    **dataclasses.asdict(record.totals),
                    "root": record.root,
                }
            )
        generation = ref.generation if ref is not None else None
    if as_json:
        print(json.dumps({"store": store.url, "generation": generation, "checkpoints": rows}, indent=2))
    else:
        _print_checkpoints(store.url, generation, rows)
    if any("error" in row for row in rows):
        raise typer.Exit(1)


def _print_checkpoints(url: str, generation: int | None, rows: list[dict[str, Any]]) -> None:
    console = Console()
    if not rows:
        fence = "" if generation is None else f"; generation {generation} may commit"
        console.print(f"No checkpoints in {escape(url)}{fence}.", highlight=False, soft_wrap=True)
        return
    table = Table(title=escape(url), caption=f"generation {generation} may commit", box=None, header_style="bold")
    table.add_column("step", justify="right")
    for column in ("made in", "committed in", "ranks", "tensors", "tiles", "size"):
        table.add_column(column, justify="right")
    table.add_column("checkpoint", overflow="fold")
    for row in rows:
        mark = " [green]latest[/]" if row["latest"] else ""
        if "error" in row:
            table.add_row(*["?"] * 7, f"{row['checkpoint']}{mark} [red]{escape(row['error'])}[/]")
            continue
        fields = ("step", "made_in", "committed_in", "ranks", "tensors", "tiles")
        table.add_row(*(str(row[field]) for field in fields), _size(row["bytes"]), f"{row['checkpoint']}{mark}")
    console.print(table)


@app.command(
    "verify",
    epilog="Examples:\n\n  elastic3d ckpt verify /data/run-7\n\n  elastic3d ckpt verify s3://bucket/gpt-1b --json",
)
def verify_store(url: _Url, as_json: _Json = False) -> None:
    """Read every byte of a store and check it against its digest; exit 1 when something is wrong.

    Names the tensor, rank and pack of every damaged byte, and the checkpoints that it spoils.
    """
    with _errors():
        store = open_store(url, write=False)
        console = Console(stderr=True)
        columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task("verify", total=None)
            size = 0

            def show(progress: Any) -> None:
                nonlocal size
                size = progress.total
                bar.update(task, completed=progress.done, total=progress.total)

            findings = list(verify(store, show))
    if as_json:
        found = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"store": store.url, "bytes": size, "findings": found}, indent=2))
    else:
        _print_findings(store.url, size, findings)
    if findings:
        raise typer.Exit(1)


def _print_findings(url: str, size: int, findings: list[Finding]) -> None:
    console = Console()
    if not findings:
        what = f"every one of {size:,} bytes is as it was written" if size else "there is nothing in it"
        console.print(f"[green]ok[/] {escape(url)}: {what}.", highlight=False, soft_wrap=True)
        return
    table = Table(
        title=f"{len(findings)} finding{'s' if len(findings) > 1 else ''} in {escape(url)}",
        box=None,
        header_style="bold",
    )
    for column in ("fault", "rank", "tensor", "object", "detail", "spoils"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(
            f"[red]{finding.fault}[/]",
            "" if finding.rank is None else str(finding.rank),
            escape(f"{finding.tensor or ''} {finding.box or ''}".strip()),
            escape(finding.object),
            escape(finding.detail),
            escape(", ".join(finding.checkpoints)) or "no checkpoint",
        )
    console.print(table)


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
