"""`elastic3d islands`: look at the islands that meet in a store, and give up one that will not come back."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from checkpointing.stores.address import redacted
from elastic3d.cli.ckpt.place import StorePlace, about_a_store
from elastic3d.cli.ckpt.render.words import table
from elastic3d.cli.ckpt.telling import SCHEMA
from elastic3d.cli.islands_documents import IslandsDocument
from elastic3d.cli.render import clean
from elastic3d.errors import UsageError
from elastic3d.islands.exchange import Exchange
from elastic3d.islands.record import account, label, newest
from elastic3d.values import to_json

app = typer.Typer(name="islands", help="Look at jobs that train as islands.", no_args_is_help=True)
app.callback()(lambda: None)


def show(place: StorePlace, *, as_json: bool) -> None:
    """Show the outer steps that islands took, who trains now, and that every sample was merged once; exit 1 if not.

    The store is that of `elastic3d.Islands(store=)`. Only records are read.

    Examples:

        elastic3d islands show s3://between/gpt

        elastic3d islands show s3://between/gpt --json | jq '.records[-1].members'
    """
    exchange = Exchange(place.open())
    records, joined, left = tuple(exchange.records()), exchange.joined(), exchange.left()
    known = records[-1].known if records else {}
    asking = sorted(
        label(name, number)
        for name, number in newest(joined).items()
        if number > known.get(name, 0) and label(name, number) not in left
    )
    chunks = account(records)
    document = IslandsDocument(
        store=redacted(place.url),
        setup=exchange.agreed(),
        records=records,
        asking=tuple(asking),
        left=tuple(sorted(left)),
        consumed=chunks.consumed,
        waiting=chunks.waiting,
        under_way=chunks.under_way,
        whole=chunks.whole,
    )
    if as_json:
        print(json.dumps({"schema": SCHEMA, **to_json(document)}, indent=2))
    else:
        _print(document)
    if not chunks.whole:
        raise typer.Exit(1)


def leave(
    place: StorePlace,
    island: Annotated[str, typer.Argument(metavar="ISLAND", help="Such as east.1.")],
    *,
    as_json: bool,
) -> None:
    """Have the others wait for an island no longer, because it will not come back.

    What it has sent is still merged. One that was alive after all joins anew. By itself an island is waited for as long
    as `patience` says, once; this is for the last ones of a run, whose end nobody else could see.

    Examples:

        elastic3d islands leave s3://between/gpt east.1
    """
    exchange = Exchange(place.open(write=True))
    if island not in exchange.joined():
        there = ", ".join(sorted(exchange.joined())) or "none"
        raise UsageError(f"{island!r} is no island of {redacted(place.url)}; there are: {there}")
    exchange.leave(island, "given up by a person")
    said = {"schema": SCHEMA, "store": redacted(place.url), "left": island}
    print(json.dumps(said, indent=2) if as_json else f"{island} is given up.")


def _print(document: IslandsDocument) -> None:
    console = Console(highlight=False)
    setup = document.setup
    if setup is None or not document.records:
        asking = clean(", ".join(document.asking)) or "none"
        console.print(f"{clean(document.store)}: no island has begun here; asking: {asking}")
        return
    made = table("outer step", "step", "merged", "lost", "new", "sealed by", fold=("merged", "lost", "new"))
    for record in document.records:
        made.add_row(
            f"{record.outer:,}",
            f"{record.outer * setup.every // setup.fragments:,}",
            Text(clean(" ".join(one.island for one in record.merged))),
            Text(clean(" ".join(record.lost)), style="red"),
            Text(clean(" ".join(record.admitted)), style="green"),
            Text(clean(record.by)),
        )
    console.print(made)
    last = document.records[-1]
    now = [f"{one}{' (over)' if one in document.left else ''}" for one in sorted(last.members)]
    console.print(f"training: {clean(', '.join(now)) or 'none'}; asking: {clean(', '.join(document.asking)) or 'none'}")
    each = setup.every // setup.fragments * setup.global_batch
    mark = Text("ok", style="green") if document.whole else Text("broken", style="bold red")
    console.print(
        Text.assemble(
            mark,
            f" {document.consumed * each:,} samples merged once, {document.under_way * each:,} under way, "
            f"{document.waiting * each:,} of lost islands to be trained again",
        )
    )


app.command("show")(about_a_store(show, refs=False))
app.command("leave")(about_a_store(leave, refs=False))
