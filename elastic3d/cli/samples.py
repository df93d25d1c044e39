"""`elastic3d samples check`: prove, from what a run left behind, that it consumed every sample once."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from checkpointing.errors import CheckpointError
from checkpointing.reading.reader import read_record
from elastic3d.accounting.recorded_events import recorded
from elastic3d.cli.ckpt.naming import choose
from elastic3d.cli.ckpt.place import Json, KeyFile, OneOf, StorePlace, complain
from elastic3d.cli.ckpt.render.words import table
from elastic3d.cli.ckpt.telling import SCHEMA, bar
from elastic3d.cli.events_folder import event_files, event_lines, no_run, others_said
from elastic3d.cli.goodput import RunId
from elastic3d.cli.render import clean
from elastic3d.errors import Elastic3dError, StateError, UsageError
from elastic3d.values import from_json, to_json

if TYPE_CHECKING:
    from elastic3d.cli.samples_documents import CheckpointSamplesDocument, EventSamplesDocument
    from elastic3d.data import Account, Line, Order
    from elastic3d.data.ledger import Ledger

app = typer.Typer(name="samples", help="Account for the samples of a run.", no_args_is_help=True)
app.callback()(lambda: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A step of an event file, its half-open positions, and how many of them it left out. at: when it was written."""

    run: str
    at: float
    step: int
    generation: int
    first: int
    stop: int
    excluded: int = 0


@app.command("check")
def check_samples(
    url: Annotated[
        str,
        typer.Argument(metavar="[URL]", help="A directory, or a URL such as s3://bucket/prefix.", show_default=False),
    ] = "",
    checkpoint: OneOf = "latest",
    events: Annotated[
        Path | None,
        typer.Option("--events", metavar="FOLDER", help="Check a run's event files instead.", show_default=False),
    ] = None,
    run_id: RunId = "",
    as_json: Json = False,
    key_file: KeyFile = "",
) -> None:
    """Prove that every sample up to a checkpoint was consumed once; exit 1 if not.

    Each checkpoint carries the account of all steps before it: how many samples its ranks really loaded, and a keyed
    sum of their numbers, by generation. Both are computed again here from the run's own order, so that a gap, a
    repetition or a wrong sample shows. Samples that were left out are accounted for beside them: consumed and excluded
    together have to be all. A stream is counted by positions. Only the checkpoint's record is read; adding
    up a very long run takes a while. With `--events` the steps in event files are checked instead, by positions only;
    of a folder with several runs, those of the one that wrote last, or that `--id` names.

    Examples:

        elastic3d samples check s3://bucket/gpt-1b

        elastic3d samples check /data/run-7 --of 1200 --json | jq .whole

        elastic3d samples check --events /tmp/events
    """
    try:
        if bool(url) == (events is not None):
            raise UsageError("samples check needs a store's URL, or --events FOLDER: one of the two")
        if run_id and events is None:
            raise UsageError("--id chooses one of the runs of --events FOLDER; a store holds one run")
        whole = _events(events, run_id, as_json) if events is not None else _store(url, key_file, checkpoint, as_json)
    except (CheckpointError, Elastic3dError) as error:
        complain(error)
        raise typer.Exit(error.exit_code) from None
    except OSError as error:
        complain(error)
        raise typer.Exit(1) from None
    if not whole:
        raise typer.Exit(1)


def _store(url: str, key_file: str, checkpoint: str, as_json: bool) -> bool:
    from elastic3d.data import Order, check  # imports torch, for which no other command should wait
    from elastic3d.data.ledger import Line

    store = StorePlace(url=url, key_file=key_file).open()
    chosen = choose(store, checkpoint)
    facts = read_record(store, chosen.name, chosen.expected).facts
    try:
        order = from_json(Order, facts["order"])
        ledger = tuple(from_json(Line, line) for line in facts["ledger"])
        steps = int(facts["step"])
    except KeyError as error:
        raise StateError(
            f"checkpoint {chosen.name} carries no account of samples (no {error.args[0]!r} beside its tensors): no run "
            "has saved it, as if it was imported. Trying again does not help: a run that begins with it has an account "
            "from its first checkpoint on"
        ) from error
    except (TypeError, ValueError) as error:
        raise StateError(
            f"what checkpoint {chosen.name} says of its samples cannot be read: {error}. Trying again does not help: "
            "upgrade if a newer version saved it"
        ) from error
    total = order.positions(0, steps)[1]
    with bar("adding up samples", total=total, in_bytes=False) as advance:
        account = check(ledger, order, stop_step=steps, progress=advance)
    where = f"{url}, checkpoint {chosen.name}"
    if as_json:
        from elastic3d.cli.samples_documents import CheckpointSamplesDocument, SourceSamplesDocument

        document = CheckpointSamplesDocument(
            store=url,
            checkpoint=chosen.name,
            order=order,
            step=steps,
            lines=ledger,
            sources=tuple(
                SourceSamplesDocument(name=source.name, samples=samples, length=source.length)
                for source, samples in order.by_source(steps)
            ),
        )
        _print(document, account)
    else:
        console = Console(highlight=False)
        if order.proportions is not None:
            console.print(_sources(order, steps))
        console.print(_picture(where, ledger, order, account, console.width))
    return account.whole


def _events(folder: Path, run_id: str, as_json: bool) -> bool:
    from elastic3d.data.ledger import count

    runs: dict[str, dict[int, _Step]] = defaultdict(dict)
    restored: dict[str, set[int]] = defaultdict(set)
    newest: dict[str, float] = defaultdict(float)
    if not folder.is_dir():
        raise UsageError(
            f"--events {str(folder)!r}: there is no such folder; give the one that the script names in "
            "elastic3d.run(events=...)"
        )
    files = event_files(folder)
    read = 0
    with bar("reading events", total=sum(file.stat().st_size for file in files)) as advance:
        for path in files:
            with path.open("rb") as file:
                for line in event_lines(file):
                    read += len(line)
                    advance(read)
                    seen = _step(line)
                    if seen is None:
                        if (state := _restored(line)) is not None:
                            restored[state[0]].add(state[1])
                        continue
                    newest[seen.run] = max(newest[seen.run], seen.at)
                    steps = runs[seen.run]
                    if seen.step not in steps or steps[seen.step].generation <= seen.generation:
                        steps[seen.step] = seen  # a step that a later generation made again replaces the earlier one
    if not runs:
        raise UsageError(f"--events {folder}: no step.committed in the {len(files)} event file(s) there")
    chosen = run_id or max(newest, key=lambda name: newest[name])
    if chosen not in runs:
        raise no_run(chosen, folder, runs)
    steps, others = runs[chosen], tuple(sorted(runs.keys() - {chosen}))
    untold = _untold(steps, restored[chosen])
    steps |= untold
    account = count((steps[step].first, steps[step].stop) for step in sorted(steps))
    left_out = sum(step.excluded for step in steps.values())
    account = replace(account, consumed=account.consumed - left_out, excluded=left_out)
    if as_json:
        from elastic3d.cli.samples_documents import EventSamplesDocument

        document = EventSamplesDocument(
            events=str(folder), steps=len(steps), run=chosen, other_runs=others, untold=tuple(sorted(untold))
        )
        _print(document, account)
    else:
        console = Console(highlight=False)
        of_run = f"{clean(chosen)}: " if others else ""
        console.print(_verdict(f"{of_run}{len(steps)} steps in {clean(str(folder))}", account))
        if untold:
            numbers = ", ".join(f"{step:,}" for step in sorted(untold))
            console.print(Text(f"- nobody lived to tell of step {numbers}, from whose state training went on"))
        if others:
            console.print(Text(clean(f"- {others_said(others)}"), style="yellow"))
    return account.whole


def _step(line: bytes) -> _Step | None:
    """Return the step of a line; None for any other line, and for one that was torn."""
    if b"step.committed" not in line:
        return None
    try:
        data = json.loads(line)
        first, stop = data["samples"]
        if data["event"] != "step.committed":
            return None
        left_out = sum(int(end) - int(begin) for begin, end in data.get("excluded") or ())
        run = data.get("run")
        return _Step(
            run=run if isinstance(run, str) else "",
            at=float(data.get("at") or 0),
            step=int(data["step"]),
            generation=int(data["generation"]),
            first=int(first),
            stop=int(stop),
            excluded=left_out,
        )
    except (ValueError, KeyError, TypeError):
        return None


def _restored(line: bytes) -> tuple[str, int] | None:
    """Return the run and the step of a state that steps of it led to, as a line has it; None for any other line."""
    event = recorded(line) if b"state.restored" in line else None
    if event is None or event.name != "state.restored" or not event.text("loss"):
        return None
    step = event.whole("step")
    return None if step is None else (event.run, step)


def _untold(steps: dict[int, _Step], restored: set[int]) -> dict[int, _Step]:
    """Return the steps that no event tells of, between two that are told of, and from whose state the run went on.

    All that made such a step may have ended before they told of it but one, which has a copy of its state.
    """
    return {
        step: replace(steps[step - 1], step=step, first=steps[step - 1].stop, stop=steps[step + 1].first, excluded=0)
        for step in restored
        if step not in steps and step - 1 in steps and step + 1 in steps
    }


def _print(fields: CheckpointSamplesDocument | EventSamplesDocument, account: Account) -> None:
    from elastic3d.cli.samples_documents import SamplesDocument

    proved = SamplesDocument(
        consumed=account.consumed,
        repeated=account.repeated,
        missing=account.missing,
        excluded=account.excluded,
        wrong=account.wrong,
        whole=account.whole,
    )
    print(json.dumps({"schema": SCHEMA, **to_json(fields), **to_json(proved)}, indent=2))


def _picture(where: str, ledger: Ledger, order: Order, account: Account, width: int) -> RenderableType:
    left_out = ["excluded"] if account.excluded else []
    made = table("generation", "steps", "positions", "samples", *left_out, "layout", "", fold=("layout",))
    for line in ledger:
        first, stop = order.positions(line.first_step, line.stop_step)
        made.add_row(
            str(line.generation),
            f"{line.first_step:,} - {line.stop_step - 1:,}",
            f"{first:,} - {stop - 1:,}",
            f"{line.samples:,}",
            *([f"{line.excluded:,}"] if account.excluded else []),
            Text(clean(line.layout)),
            _mark(line, account),
        )
    changed = [
        Text(f"from step {line.first_step:,} on, as the script asked for: {clean(line.changed)}", style="dim")
        for line in ledger
        if line.changed
    ]
    changed += [
        Text(f"the script ended the run with step {line.stop_step - 1:,}: {clean(line.stopped)}", style="dim")
        for line in ledger
        if line.stopped
    ]
    return Group(made, *changed, _verdict(clean(where), account)) if ledger else _verdict(clean(where), account)


def _sources(order: Order, steps: int) -> RenderableType:
    made = table("source", "samples", "share", "epochs", fold=("source",))
    total = max(1, order.positions(0, steps)[1])
    for source, samples in order.by_source(steps):
        made.add_row(
            Text(clean(source.name)), f"{samples:,}", f"{samples / total:.2%}", f"{samples / source.length:,.2f}"
        )
    return made


def _mark(line: Line, account: Account) -> Text:
    return Text("wrong", style="red") if line in account.wrong else Text("ok", style="green")


def _verdict(where: str, account: Account) -> Text:
    if account.whole:
        left_out = f"; {account.excluded:,} were left out" if account.excluded else ""
        return Text.assemble(
            ("ok", "green"), f" {where}: each of {account.consumed:,} samples was consumed once{left_out}."
        )
    counts = [(account.missing, "missing"), (account.repeated, "repeated")]
    broken = [f"{number:,} {what}" for number, what in counts if number]
    if account.wrong:
        broken.append(f"{len(account.wrong)} line(s) whose samples are not those of their steps")
    return Text.assemble(("broken", "bold red"), f" {where}: {', '.join(broken)}; {account.consumed:,} consumed.")
