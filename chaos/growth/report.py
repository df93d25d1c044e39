"""What a soak has shown: for a terminal, as a JSON document, and as the folder that is kept.

Samples come into that folder while it goes on, one a line, so that they are there whatever ends it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from chaos.growth.again import job_of, schedule_of
from chaos.growth.facts import SCHEMA as PICTURE_SCHEMA
from chaos.growth.facts import SoakFacts, facts
from chaos.growth.measures import Measure, measures
from chaos.growth.page import soak_page
from chaos.growth.plot import growth_plot
from chaos.growth.sampling import Sample
from chaos.growth.soak import Plan, Soak
from chaos.growth.verdict import SoakVerdict, lacking, verdict, wrong
from chaos.report.folder import PICTURE, REPORT
from chaos.report.junit import Case, promise_cases
from chaos.report.random_documents import replay_command
from chaos.storms.folders import in_words, new_folder, writable_folder
from chaos.storms.storm import VERDICT, copy_logs, write_job
from elastic3d.errors import UsageError
from elastic3d.values import from_json, to_json

SCHEMA = 1
GROWTH, PLOT, SAMPLES = "growth.json", "growth.svg", "samples.jsonl"


_STYLES = {SoakVerdict.PASSED: "bold green", SoakVerdict.FAILED: "bold red", SoakVerdict.SHORT: "bold yellow"}


def shown(soak: Soak, series: Sequence[Measure]) -> RenderableType:
    """Return the table of slopes, and the verdict."""
    table = Table(title="Growth", title_justify="left", title_style="bold", box=None)
    for name in ("", "start", "an hour", "a gen.", "this run", "grows"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    previous = None
    for measure in series:
        line, group = measure.line, measure.group
        if group != previous:
            table.add_row(Text(f"{group.name}, {group.unit}" if group.unit else group.name, style="bold"))
            previous = group
        values = [measure.group.shown(number) for number in _numbers(measure)] if line else ["-"] * 4
        grew = "-" if measure.bar is None else "yes" if measure.grows else "no" if line else "too short"
        style = "bold red" if measure.grows else "dim" if measure.bar is None else ""
        table.add_row(f"  {measure.name}", *values, grew, style=style)
    repeated = sum(known.repeated for known in soak.generations.values())
    faults = Counter(fault.WORD for fault, _ in soak.made)
    counts = ", ".join(f"{count} {word}" for word, count in sorted(faults.items())) or "none"
    lines: list[RenderableType] = [
        table,
        Text.assemble(("Job      ", "bold"), f"{soak.steps} steps in {soak.seconds:.0f} s, {repeated} of them again"),
        Text.assemble(("Faults   ", "bold"), f"{counts}; {len(soak.generations)} generations"),
    ]
    if soak.stopped:
        lines.append(Text.assemble(("Ended    ", "bold"), soak.stopped))
    became = verdict(soak, series)
    words = {
        SoakVerdict.PASSED: "nothing grows, and every promise held",
        SoakVerdict.SHORT: f"too short to say that nothing grows: {'; '.join(lacking(soak, series))}",
        SoakVerdict.FAILED: "\n         ".join(wrong(soak, series)),
    }
    lines.append(Text.assemble(("Verdict  ", "bold"), (words[became], _STYLES[became])))
    return Group(*lines)


def cases(soak: Soak, series: Sequence[Measure], folder: Path | None) -> Iterator[Case]:
    """Yield a case per promise and per series with a bar, and one of the whole. folder: what is kept of it."""
    replay = (f"replay: {again(folder)}",) if folder is not None and soak.made else ()
    yield from promise_cases(soak.promises, replay)
    for measure in series:
        if measure.bar is not None:
            name = f"{measure.group.name}: {measure.name}"
            broken = (f"{name} grows",) if measure.grows else ()
            skipped = "" if measure.line else "it has too few points for a line"
            yield Case(name=f"{name} does not grow", broken=broken, skipped=skipped)
    early = soak.error or ("it was interrupted" if soak.interrupted else "")
    lacks = "" if early else "; ".join(lacking(soak, series))
    yield Case(name="it is long enough to tell", seconds=soak.seconds, error=early, skipped=lacks)


def again(folder: Path) -> str:
    """Return the command that plays a soak again; not beside one that nothing happens to, which takes as long."""
    return replay_command(folder, "--no-compare")


def document(soak: Soak, series: Sequence[Measure]) -> dict[str, Any]:
    """Return a soak as `--json` prints it."""
    return {
        "schema": SCHEMA,
        "passed": verdict(soak, series) is SoakVerdict.PASSED,
        "verdict": verdict(soak, series).value,
        "lacking": list(lacking(soak, series)),
        "grows": [f"{measure.group.name}: {measure.name}" for measure in series if measure.grows],
        "broken": list(soak.broken),
        "promises": [{**to_json(promise), "held": promise.held} for promise in soak.promises],
        "stopped": soak.stopped,
        "interrupted": soak.interrupted,
        "error": soak.error,
        "seed": soak.plan.seed,
        "seconds": round(soak.seconds, 1),
        "steps": soak.steps,
        "steps_repeated": sum(known.repeated for known in soak.generations.values()),
        "generations": dict(Counter(known.cause for known in soak.generations.values())),
        "made": [str(fault) for fault, _ in soak.made],
        "digest": soak.digest,
        "measures": [
            {
                "group": measure.group.name,
                "name": measure.name,
                "line": to_json(measure.line) if measure.line else None,
                "bar": to_json(measure.bar) if measure.bar else None,
                "grows": measure.grows,
            }
            for measure in series
        ],
    }


def begin(plan: Plan, out: Path) -> Path:
    """Make the folder of a soak below `out`, for its samples, and return it; UsageError where that fails."""
    writable_folder(out)
    return new_folder(out, f"soak-{plan.seed}")


def append(folder: Path, sample: Sample) -> None:
    """Write a sample into the folder of a soak that goes on."""
    with (folder / SAMPLES).open("a") as file:
        file.write(json.dumps(to_json(sample)) + "\n")


def keep(soak: Soak, folder: Path, workdir: Path) -> None:
    """Write what a soak has shown into its folder, beside its samples; UsageError where that fails.

    Once a fault was made, also what plays it again; logs and events where a promise was broken or an error ended it.
    """
    series = measures(soak.samples)
    title = f"{soak.steps} steps, {len(soak.generations)} generations, {len(soak.made)} faults, seed {soak.plan.seed}"
    shows = document(soak, series)
    picture = facts(soak, series)
    with in_words(folder):
        (folder / PICTURE).write_text(json.dumps(to_json(picture)) + "\n")
        (folder / REPORT).write_text(soak_page(picture, series, str(folder)), encoding="utf-8")
        (folder / GROWTH).write_text(json.dumps(shows) + "\n")
        (folder / PLOT).write_text(growth_plot(title, series))
        if soak.made:
            write_job(folder, schedule_of(soak), job_of(soak))
            kept = {"schema": SCHEMA, "kept": not soak.broken, "promises": shows["promises"]}
            (folder / VERDICT).write_text(json.dumps(kept, indent=2) + "\n")
        if soak.broken or soak.error:
            copy_logs(workdir, folder)


def write_soak_report(folder: Path) -> Path:
    """Make the page of a soak anew from what is kept in its folder; UsageError where that is none of a soak."""
    path = folder / PICTURE
    try:
        kept = from_json(SoakFacts, json.loads(path.read_text(encoding="utf-8")))
        lines = (folder / SAMPLES).read_text().splitlines() if kept.samples else []
        samples = tuple(from_json(Sample, json.loads(line)) for line in lines)
    except OSError as error:
        raise UsageError(f"{folder}: no report can be made of it: {error.filename}: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path}: it is no picture of a soak: {error}") from None
    if kept.schema != PICTURE_SCHEMA:
        raise UsageError(f"{path}: its schema is {kept.schema}, and {PICTURE_SCHEMA} is known here")
    with in_words(folder):
        (folder / REPORT).write_text(soak_page(kept, measures(samples), str(folder)), encoding="utf-8")
    return folder / REPORT


def _numbers(measure: Measure) -> tuple[float, ...]:
    line = measure.line
    assert line is not None
    return (line.start, line.per_hour, line.per_generation, line.growth)
