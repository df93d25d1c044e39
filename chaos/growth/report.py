"""What a soak has shown: for a terminal, as a JSON document, and as the folder that is kept."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from chaos.growth.measures import Measure, measures
from chaos.growth.plot import growth_plot
from chaos.growth.soak import Soak
from chaos.storms.folders import free_folder
from elastic3d.values import to_json

SCHEMA = 1
GROWTH, PLOT = "growth.json", "growth.svg"


def passed(soak: Soak, series: Sequence[Measure]) -> bool:
    """Return whether no promise was broken and nothing grew."""
    return not soak.broken and not any(measure.grows for measure in series)


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
        values = [_value(number, measure) for number in _numbers(measure)] if line else ["-"] * 4
        verdict = "-" if measure.bar is None else "yes" if measure.grows else "no" if line else "too short"
        style = "bold red" if measure.grows else "dim" if measure.bar is None else ""
        table.add_row(f"  {measure.name}", *values, verdict, style=style)
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
    grown = [f"grows: {measure.group.name}: {measure.name}" for measure in series if measure.grows]
    well = passed(soak, series)
    kept = "what was promised was not judged, since it was interrupted" if soak.interrupted else "every promise held"
    words = f"nothing grows, and {kept}" if well else "; ".join([*grown, *soak.broken])
    lines.append(Text.assemble(("Verdict  ", "bold"), (words, "bold green" if well else "bold red")))
    return Group(*lines)


def document(soak: Soak, series: Sequence[Measure]) -> dict[str, Any]:
    """Return a soak as `--json` prints it."""
    return {
        "schema": SCHEMA,
        "passed": passed(soak, series),
        "grows": [f"{measure.group.name}: {measure.name}" for measure in series if measure.grows],
        "broken": list(soak.broken),
        "stopped": soak.stopped,
        "interrupted": soak.interrupted,
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


def keep(soak: Soak, out: Path, workdir: Path) -> Path:
    """Write the folder of a soak below `out`, and return it. Logs and events are kept where a promise was broken."""
    folder = free_folder(out, f"soak-{soak.plan.seed}")
    folder.mkdir(parents=True)
    series = measures(soak.samples)
    samples = [to_json(sample) for sample in soak.samples]
    (folder / GROWTH).write_text(json.dumps(document(soak, series) | {"samples": samples}) + "\n")
    title = f"{soak.steps} steps, {len(soak.generations)} generations, {len(soak.made)} faults, seed {soak.plan.seed}"
    (folder / PLOT).write_text(growth_plot(title, series))
    if soak.broken:
        shutil.copytree(workdir / "job" / "events", folder / "events", dirs_exist_ok=True)
        for log in sorted((workdir / "job" / "nodes").glob("*/agent.log")):
            shutil.copy(log, folder / f"{log.parent.name}.log")
    return folder


def _numbers(measure: Measure) -> tuple[float, ...]:
    line = measure.line
    assert line is not None
    return (line.start, line.per_hour, line.per_generation, line.growth)


def _value(value: float, measure: Measure) -> str:
    value /= measure.group.scale
    return f"{value:.3f}" if 0.0005 < abs(value) < 0.1 else f"{value:.1f}" if abs(value) < 1000 else f"{value:.0f}"
