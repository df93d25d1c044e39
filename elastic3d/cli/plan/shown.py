"""The display of a ranking of layouts: which is best and why, and why others are left out."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from elastic3d.admission.host_memory import HostMemory
from elastic3d.cli.plan import mesh, steps
from elastic3d.cli.plan.question import Question
from elastic3d.planner.results import Candidate, Ranking, RejectedLayout
from elastic3d.planner.schedules import schedule_of
from elastic3d.planner.timeline import timeline

NARROW = 72
GROUPS = 6
_NUMBER = re.compile(r"\d[\d,./]*")
_AMOUNT = re.compile(r"([0-9.]+) ([KMG]iB)")
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def picture(question: Question, ranking: Ranking, *, top: int, every_reason: bool, width: int) -> RenderableType:
    """Return the display of a ranking for a terminal of `width` columns."""
    parts: list[RenderableType] = [_head(question)]
    if ranking.ranking:
        best = ranking.ranking[0]
        parts += [Text(), _table(question, ranking.ranking[:top], width)]
        if len(ranking.ranking) > top:
            parts.append(Text(f"  and {len(ranking.ranking) - top} more that work (--top)", style="dim"))
        parts += [Text(), *_why(ranking.ranking), Text(), *_made_of(question, best)]
        parts += [Text(), Text("Places", style="bold"), mesh.mesh(best.layout, question.slots, best.spares, width)]
        if best.layout.pp > 1:
            step = timeline(best.layout, best.micro_batches, backward=2.0 + question.again)
            parts += [Text(), Text("One step", style="bold"), steps.picture(step, width)]
    else:
        parts += [Text(), Text("No layout works.", style="bold red")]
    if ranking.rejected:
        parts += [Text(), *(_all_reasons(ranking.rejected) if every_reason else _reasons(ranking.rejected))]
    return Group(*parts)


def host_memory(needed: HostMemory) -> RenderableType:
    """Return the display of a node's host memory."""
    nodes = "1 node trains" if needed.nodes == 1 else f"{needed.nodes} nodes train"
    parts = {
        "snapshots": needed.snapshots,
        "replicas for buddies": needed.replicas,
        "restoring": needed.restoring,
        "training": needed.training,
        "processes": needed.processes,
    }
    table = Table.grid(padding=(0, 2))
    table.add_row("", Text("needed", "dim"), _shares(parts, needed.total, spell_bytes))
    limit = Text.assemble((needed.quantity, "bold green"), ", beside the script's data and its loaders' workers")
    table.add_row("", Text("limit", "dim"), limit)
    return Group(Text(), Text.assemble(("Host memory", "bold"), f" of a node, while {nodes}; with fewer, more"), table)


def spell_time(seconds: float) -> str:
    """Return a step's time with three significant digits: 1.42 s, 318 ms, 12.4 ms, 87 us."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size or unit == "us":
            value = seconds / size
            digits = f"{value:#.3g}".rstrip(".") if abs(value) < 1000 else f"{value:,.0f}"
            return f"{digits} {unit}"
    raise AssertionError("unreachable")


def spell_bytes(count: float) -> str:
    """Return an amount of memory: 61.2 GiB."""
    for unit, size in _UNITS:
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def named(candidate: Candidate | RejectedLayout) -> str:
    """Return a layout in few words: pp 2 x dp 4 x tp 8, ZeRO-2, interleaved x2, 2 replicas."""
    layout = candidate.layout
    return str(replace(layout, schedule=schedule_of(layout)))


def _head(question: Question) -> Text:
    profile = question.profile
    text = Text.assemble((question.model, "bold"), f": {_many(profile.parameters)} parameters, {profile.blocks} blocks")
    text.append(f"\n{question.nodes} nodes x {question.slots} slots, {question.device}")
    text.append(f" of {spell_bytes(question.costs.device.memory)}")
    text.append(f"\na step is {profile.micro_batches} micro-batches of {profile.micro_batch} samples")
    if profile.leaf > 1:
        text.append(f", in leaves of {profile.leaf}")
    if profile.chunks > 1:
        text.append(f", in {profile.chunks} chunks of a sequence")
    if profile.recompute != "none":
        text.append(f", recompute {profile.recompute}")
    for node, times in sorted(question.slow.items())[:GROUPS]:
        text.append(f"\nnode {node} takes {times:g} times as long", style="yellow")
    return text


def _table(question: Question, shown: Sequence[Candidate], width: int) -> RenderableType:
    replicated = any(candidate.layout.replicas > 1 for candidate in shown)
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    cut = any(candidate.layout.cp > 1 for candidate in shown)
    heads = [
        "",
        "pp",
        "dp",
        *(["cp"] if cut else []),
        "tp",
        "ZeRO",
        *(["copies"] if replicated else []),
        "schedule",
        "micro",
        "step",
        "memory",
    ]
    heads += ["nodes", "spare"] if width >= NARROW else []
    for head in heads:
        table.add_column(head, justify="left" if head == "schedule" else "right", no_wrap=True)
    for number, one in enumerate(shown, 1):
        layout, schedule = one.layout, schedule_of(one.layout)
        words = "-" if schedule is None else f"{schedule}" + (f" x{layout.virtual}" if layout.virtual > 1 else "")
        row: list[object] = [
            number,
            layout.pp,
            layout.dp,
            *([layout.cp] if cut else []),
            layout.tp,
            layout.zero,
            *([layout.replicas] if replicated else []),
        ]
        row += [words, one.micro_batches, spell_time(one.seconds), spell_bytes(one.memory_bytes)]
        row += [one.nodes, one.spares] if width >= NARROW else []
        table.add_row(*map(str, row), style="bold green" if number == 1 else "")
    return table


def _why(ranked: Sequence[Candidate]) -> list[RenderableType]:
    """Show what makes the first faster than the second: the contributors that differ most."""
    best = ranked[0]
    text = Text.assemble(("Best: ", "bold"), (named(best), "bold green"))
    if len(ranked) == 1:
        return [text.append(": no other layout works")]
    other = ranked[1]
    text.append(f"\n  {_than(best, other)} the runner-up, {named(other)}")
    changes = _differences(best.time, other.time)
    if changes:
        text.append("\n  " + ", ".join(f"{name} {_signed(change)}" for name, change in changes))
    return [text]


def _than(best: Candidate, other: Candidate) -> str:
    gain = other.seconds - best.seconds
    if gain <= 0.001 * best.seconds:
        return "as fast as"
    return f"{spell_time(gain)} a step ({gain / other.seconds:.1%}) faster than"


def _differences(own: Mapping[str, float], others: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return what the first has more or less of, largest first, without negligible ones."""
    changes = [(name, own.get(name, 0.0) - others.get(name, 0.0)) for name in {**own, **others}]
    changes.sort(key=lambda change: -abs(change[1]))
    most = abs(changes[0][1]) if changes else 0.0
    return [change for change in changes[:4] if abs(change[1]) > 0.05 * most]


def _signed(change: float) -> str:
    return ("+" if change > 0 else "-") + spell_time(abs(change))


def _made_of(question: Question, best: Candidate) -> list[RenderableType]:
    room = question.costs.device.memory
    table = Table.grid(padding=(0, 2))
    table.add_row("", Text("step", "dim"), _shares(best.time, best.seconds, spell_time))
    memory = _shares(best.memory, best.memory_bytes, spell_bytes)
    if best.memory_bytes and room > 0:
        memory.append(f"; {best.memory_bytes / room:.0%} of what there is")
    table.add_row("", Text("memory", "dim"), memory)
    if best.layout.cuts:
        bounds = (0, *best.layout.cuts, question.profile.blocks)
        sizes = " ".join(str(stop - start) for start, stop in pairwise(bounds))
        table.add_row("", Text("blocks", "dim"), Text(f"{sizes} in each stage"))
    return [table]


def _shares(parts: Mapping[str, float], whole: float, spell: Callable[[float], str]) -> Text:
    text = Text(spell(whole))
    largest = sorted(parts.items(), key=lambda part: -part[1])
    said = [f"{name} {spell(amount)}" for name, amount in largest if whole and amount >= 0.005 * whole]
    return text.append(f" = {' + '.join(said)}") if len(said) > 1 else text


def _reasons(rejected: Sequence[RejectedLayout]) -> list[RenderableType]:
    """Show one example for reasons of one kind: of too little memory, the nearest miss."""
    kinds: dict[str, list[RejectedLayout]] = defaultdict(list)
    for one in rejected:
        kinds[_kind(one)].append(one)
    largest = sorted(kinds.values(), key=len, reverse=True)
    parts: list[RenderableType] = [Text(f"{len(rejected)} layouts do not work, such as", style="bold")]
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for alike in largest[:GROUPS]:
        example = min(alike, key=lambda one: _amount(one.reason)) if alike[0].out_of_memory else alike[0]
        table.add_row(f"  {len(alike)}", Text.assemble((named(example), "bold"), f": {_without_name(example)}"))
    parts.append(table)
    if len(largest) > GROUPS:
        parts.append(Text(f"  and {sum(map(len, largest[GROUPS:]))} for other reasons"))
    parts.append(Text("  each stands for that many of its kind; --rejected shows all", style="dim"))
    return parts


def _amount(reason: str) -> float:
    """Return the first amount of bytes in a reason of too little memory."""
    match = _AMOUNT.search(reason)
    return float(match[1]) * dict(_UNITS)[match[2]] if match else 0.0


def _all_reasons(rejected: Sequence[RejectedLayout]) -> list[RenderableType]:
    return [Text(f"{named(one)} on {one.nodes} nodes: {_without_name(one)}") for one in rejected]


def _kind(one: RejectedLayout) -> str:
    """Return what reasons that differ only in numbers have in common; of memory, what takes most of it."""
    reason = _NUMBER.sub("#", _without_name(one))
    return reason.partition(",")[0] if one.out_of_memory else reason


def _without_name(one: RejectedLayout) -> str:
    return one.reason.removeprefix(str(one.layout)).lstrip(": ")


def _many(count: int) -> str:
    for unit, size in (("billion", 10**9), ("million", 10**6), ("thousand", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
