"""A job's status and its generations, as a person reads them in a terminal of any width."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from elastic3d.accounting.spans import Category
from elastic3d.cli.durations import spell
from elastic3d.membership.inspection.status import (
    GenerationStatus,
    GoodputStatus,
    JobState,
    NodeRole,
    NodeState,
    NodeStatus,
    StateAge,
    Status,
)
from elastic3d.membership.records import GenerationHistory
from elastic3d.values import DeviceFacts

# Beyond this many nodes, those that train without trouble are counted, not listed.
MANY = 48
STAGES = 16
MOST = 4
DOMAINS = ("zone", "rack", "switch", "host")
# Below these widths less important columns make room for others.
NARROW = 72
TINY = 48

JOB_STYLES = {
    JobState.TRAINING: "bold green",
    JobState.ENDED: "bold green",
    JobState.FAILED: "bold red",
}
NODE_STYLES = {
    NodeState.ACTIVE: "green",
    NodeState.FINISHED: "green",
    NodeState.SPARE: "cyan",
    NodeState.SILENT: "bold red",
    NodeState.APART: "bold red",
    NodeState.LOST_LEASE: "red",
    NodeState.OUT: "red",
    NodeState.REFUSED: "red",
    NodeState.UNREADABLE: "red",
    NodeState.GONE: "dim",
}


def picture(status: Status, width: int) -> RenderableType:
    """Return the display of a status for a terminal of `width` columns."""
    parts: list[RenderableType] = [_head(status)]
    for sealed, prepared in ((status.generation, False), (status.preparing, True)):
        if sealed is not None:
            parts.append(_generation(sealed, prepared=prepared))
    parts.append(_figures(status))
    parts += _open(status)
    parts += _standstill(status)
    parts += _watched(status)
    if status.generation is not None and status.generation.mesh:
        parts += [Text(), _mesh(status.generation.mesh, width)]
    if status.nodes:
        parts += [Text(), *_nodes(status, width)]
    if status.problems:
        parts += [Text(), Text("Keys that cannot be read:", style="bold red")]
        parts += [Text(clean(f"  {problem}"), style="red") for problem in status.problems]
    return Group(*parts)


def _head(status: Status) -> Text:
    style = JOB_STYLES.get(status.state, "yellow")
    text = Text.assemble((clean(status.run_id), "bold"), "  ", (str(status.state), style))
    if status.detail:
        text.append(f": {clean(status.detail)}")
    return text


def _generation(sealed: GenerationStatus, *, prepared: bool) -> Text:
    age = "" if sealed.age is None else f", sealed {spell(sealed.age)} ago"
    title = f"generation {sealed.number}{age}"
    if prepared:
        title = f"generation {sealed.number} is being prepared" + (
            ", trainers are switching" if sealed.switching else ""
        )
    why = f"{sealed.cause}: {clean(sealed.detail)}" if sealed.detail else str(sealed.cause)
    text = Text.assemble((title, "bold" if not prepared else "yellow"), f" ({why})\n  ")
    if sealed.layout is not None:
        text.append(f"{sealed.layout}, ")
    if sealed.memory is not None:
        again = "" if sealed.memory.recompute == "none" else f"recompute {sealed.memory.recompute}, "
        most = sealed.memory.most
        within = f"{most / 2**30:.1f} GiB" if most >= 2**30 else f"{most / 2**20:.0f} MiB"
        text.append(f"{again}at most {within} a rank since memory ran out, ")
    ranks = f"{_count(sealed.world, 'rank')} on " if sealed.world else ""
    text.append(ranks + _count(len(sealed.nodes), "node"))
    if sealed.spares:
        text.append(f", {_count(len(sealed.spares), 'spare')}")
    return text


def _figures(status: Status) -> Text:
    text = Text(f"  leader {clean(status.leader) or 'none'}")
    if status.minimum:
        text.append(f", wants {status.minimum} to {status.maximum} nodes")
    devices = [node.device for node in status.nodes if node.device is not None and node.role is NodeRole.ACTIVE]
    if devices:
        text.append(f"\n  {_device(devices[0])}")
    if status.step >= 0:
        of = f" of {status.until}" if status.until else ""
        text.append(f"\n  step {status.step}{of}{_loss(status.loss)}, {spell(status.step_seconds)} a step")
        seldom = f", one every {status.snapshot_every} steps" if status.snapshot_every > 1 else ""
        text.append(f"\n  snapshot {_kept(status.snapshot)}{seldom}\n  checkpoint {_kept(status.checkpoint)}")
        if status.checkpoint is not None:
            text.append(f"\n  verified {_kept(status.verified)}")
            if status.vetted is not None:
                text.append(f"\n  vetted {_kept(status.vetted)}")
            elif status.unvetted:
                text.append(f"\n  vetted: none, since {clean(status.unvetted)}")
    if status.goodput is not None:
        text.append(f"\n  {goodput(status.goodput)}")
    return text


def goodput(account: GoodputStatus) -> str:
    """Return where the time of a job's nodes went, what most of it was lost to first."""
    lost = {name: spent for name, spent in account.by_category.items() if spent and name != Category.USEFUL}
    parts = [f"{name} {100 * lost[name] / account.held:.2g} %" for name in sorted(lost, key=lambda name: -lost[name])]
    few = f" ({', '.join(parts[:MOST])})" if parts and account.held else ""
    return f"goodput {100 * account.share:.3g} % of {spell(account.held)} that nodes were held{few}"


def _open(status: Status) -> list[Text]:
    """Say that faults may be injected into the job, if they may: nobody shall overlook that."""
    names = status.injectable
    if not names:
        return []
    few = ", ".join(map(clean, names[:STAGES])) + (f" and {len(names) - STAGES} more" if len(names) > STAGES else "")
    which = f"{_count(len(names), 'node')}: {few}" if len(names) < len(status.nodes) else "any node"
    return [Text(f"  faults may be injected into {which} (chaos=allow)", style="bold yellow")]


def _standstill(status: Status) -> list[Text]:
    """Say which ranks hold the others up, as far as that is known, and what was last found out when nothing moved."""
    parts = []
    for suspect in status.suspects[:STAGES]:
        text = f"  rank {suspect.rank} ({clean(suspect.node)}) makes no progress in {suspect.phase}, {suspect.state}"
        text += f", for {spell(suspect.seconds)} or more" + (f": {clean(suspect.detail)}" if suspect.detail else "")
        parts.append(Text(text, style="bold red"))
    if len(status.suspects) > STAGES:
        parts.append(Text(f"  and {_count(len(status.suspects) - STAGES, 'more rank')}", style="bold red"))
    verdict = status.verdict
    if verdict is not None:
        ended = "ended for it" if verdict.acted else "nothing was done about it"
        said = f"  last standstill: in generation {verdict.number}, {clean(verdict.fault)}: {clean(verdict.detail)}"
        parts.append(Text(f"{said} ({ended})", style="dim"))
    return parts


def _watched(status: Status) -> list[Text]:
    """Say how ranks are watched, what audits see, and what nobody looks for."""
    health = status.health
    if health is None:
        return []
    parts = []
    if health.idle:
        only = "" if health.acts else "; what is found is only reported"
        parts.append(Text(f"  ranks may be silent for {spell(health.idle)}, computing for {spell(health.busy)}{only}"))
    coverage = health.coverage
    if coverage is not None and coverage.every:
        which = "every step" if coverage.every == 1 else f"one step in {coverage.every}"
        parts.append(
            Text(f"  audits repeat {100 * coverage.pieces:.3g} % of {which}, {_clean(status, coverage.every)}")
        )
    numbers = []
    if health.left_out:
        numbers.append(f"{health.left_out} micro-batch{'es' * (health.left_out > 1)} left out")
    if health.skipped:
        numbers.append(f"{_count(health.skipped, 'update')} skipped")
    if health.spike >= 0:
        numbers.append(f"the loss last jumped up in step {health.spike}")
    if numbers:
        parts.append(Text(f"  {', '.join(numbers)}", style="yellow"))
    for slow in health.slow:
        said = f"node {clean(slow.node)} is slow since step {slow.since}: {slow.kind}, {slow.rho:.2f} times as long"
        parts.append(Text(f"  {said}, {slow.cost:.3g} s of each step", style="yellow"))
    if health.slow_from and not health.slow:
        parts.append(Text(f"  no node takes {health.slow_from:g} times as long as others for the same work"))
    if health.uncovered:
        lines = [clean(f"    - {line}") for line in health.uncovered]
        parts.append(Text("\n".join(["  not covered:", *lines]), style="dim"))
    return parts


def _clean(status: Status, every: int) -> str:
    """Say up to which step audits vouch for each node: one audit is of all, so that few are named if any."""
    steps = {node.name: node.clean for node in status.nodes if node.role is NodeRole.ACTIVE}
    newest = max(steps.values(), default=-1)
    if newest < 0:
        return "none was clean yet"
    behind = [f"{clean(name)} {step}" for name, step in steps.items() if newest - step >= 2 * every]
    few = ", ".join(behind[:STAGES]) + (" and more" if len(behind) > STAGES else "")
    return f"last clean at step {newest}" + (f" ({few})" if few else "")


def _loss(loss: float | None) -> str:
    return "" if loss is None else f", loss {loss:.5g}"


def _device(device: DeviceFacts) -> str:
    """Return in words what the job computes on: its nodes are alike, or they would not be in it."""
    versions = ", ".join(filter(None, (f"torch {device.torch}", device.runtime)))
    return f"computes on {clean(device.name)} ({device.kind}; {versions}), {device.memory / 2**30:.3g} GiB a slot"


def _kept(kept: StateAge | None) -> str:
    return "none" if kept is None else f"of step {kept.step}, {spell(kept.age)} to {spell(kept.age + kept.within)} old"


def _mesh(mesh: tuple[tuple[str, ...], ...], width: int) -> RenderableType:
    """Draw the place of each node: a row for each stage, a column for each replica or run of equal ones."""
    starts = [0, *(c for c in range(1, len(mesh[0])) if any(row[c] != row[c - 1] for row in mesh))]
    spans = list(zip(starts, [*starts[1:], len(mesh[0])], strict=True))
    heads = [f"dp {first}" if end - first == 1 else f"dp {first}-{end - 1}" for first, end in spans]
    cell = max(len(clean(name)) for row in mesh for name in row)
    fit = max(1, (width - 8) // (max([cell, *map(len, heads)]) + 2))
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", style="dim", no_wrap=True)
    for head in heads[:fit]:
        table.add_column(head, no_wrap=True)
    for stage, row in enumerate(mesh[:STAGES]):
        table.add_row(f"  pp {stage}", *(Text(clean(row[first])) for first, _ in spans[:fit]))
    left_out = []
    if len(spans) > fit:
        left_out.append(_count(len(mesh[0]) - spans[fit][0], "more replica"))
    if len(mesh) > STAGES:
        left_out.append(_count(len(mesh) - STAGES, "more stage"))
    return Group(table, *([Text(f"  and {', '.join(left_out)}", style="dim")] if left_out else []))


def _nodes(status: Status, width: int) -> list[RenderableType]:
    listed = list(status.nodes)
    note: list[RenderableType] = []
    if len(listed) > MANY:
        listed = [node for node in listed if not _ordinary(node)]
        counts = Counter(str(node.state) for node in status.nodes if _ordinary(node))
        said = ", ".join(f"{count} {state}" for state, count in counts.items())
        note = [Text(f"Nodes without trouble: {said or 'none'} (--json lists them all).", style="dim")]
        if len(listed) > MANY:
            note.append(Text(f"{_count(len(listed) - MANY, 'node')} more with something to report.", style="dim"))
            listed = listed[:MANY]
    if not listed:
        return note
    labelled = width >= NARROW and any(node.labels for node in listed)
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("node", overflow="fold")
    table.add_column("state", no_wrap=width >= TINY, overflow="fold")
    if width >= TINY:
        table.add_column("ranks", justify="right", no_wrap=True)
        table.add_column("slots", justify="right", no_wrap=True)
    if labelled:
        table.add_column("topology", overflow="fold")
    table.add_column("health", overflow="fold", ratio=1)
    for node in listed:
        cells: list[RenderableType] = [called(node), state_of(node)]
        if width >= TINY:
            cells += [ranks_of(node), str(node.slots) if node.slots else "-"]
        if labelled:
            cells.append(Text(clean(_labels(node.labels))))
        table.add_row(*cells, health_of(node))
    return [table, *note]


def _ordinary(node: NodeStatus) -> bool:
    return node.state in (NodeState.ACTIVE, NodeState.SPARE) and not node.health and not node.leads


def called(node: NodeStatus) -> Text:
    """Return a node's name, and whether it leads."""
    return Text.assemble(clean(node.name), (" leads" if node.leads else "", "dim"))


def state_of(node: NodeStatus) -> Text:
    """Return what a node is doing, and for how long still."""
    left = "" if node.seconds_left is None else f", {spell(node.seconds_left)}"
    return Text(f"{node.state}{left}", style=NODE_STYLES.get(node.state, "yellow"))


def ranks_of(node: NodeStatus) -> str:
    """Return the numbers of a node's ranks."""
    if node.role is NodeRole.SPARE:
        return "spare"
    if node.first_rank is None:
        return "-"
    last = node.first_rank + node.slots - 1
    return str(node.first_rank) if last == node.first_rank else f"{node.first_rank}-{last}"


def _labels(labels: dict[str, str]) -> str:
    """Return labels from the widest domain to the narrowest, then the others by name."""
    order = sorted(labels, key=lambda key: (DOMAINS.index(key) if key in DOMAINS else len(DOMAINS), key))
    return " ".join(f"{key}={labels[key]}" for key in order)


def health_of(node: NodeStatus) -> Text:
    """Return what is wrong with a node, on one line."""
    wrong = [*([node.detail] if node.detail else []), *node.health]
    if not wrong:
        return Text("ok" if node.pulse is not None else "", style="green")
    return Text(clean("; ".join(wrong)))


def generations(histories: Sequence[GenerationHistory], now: float, width: int) -> RenderableType:
    """Return the table of generations, oldest first."""
    if width < NARROW:
        return Group(*(line(history, now) for history in histories))
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("when", no_wrap=True)
    table.add_column("cause", no_wrap=True)
    table.add_column("nodes", no_wrap=True)
    table.add_column("in and out", overflow="fold", max_width=24)
    table.add_column("layout", overflow="fold", max_width=26 if width >= 110 else 13)
    table.add_column("leader", overflow="fold", max_width=16)
    table.add_column("why", overflow="fold", ratio=1)
    for history in histories:
        table.add_row(
            str(history.number),
            when(history.at, now),
            Text(str(history.cause)),
            f"{history.active}" + (f" + {history.spares}" if history.spares else ""),
            _changes(history),
            Text(clean(history.layout) or "-"),
            Text(clean(history.leader)),
            Text(clean(history.detail)),
        )
    return table


def line(history: GenerationHistory, now: float) -> Text:
    """Return one generation as a line of text."""
    text = Text.assemble(f"{when(history.at, now)}  ", (f"generation {history.number}", "bold"), f" ({history.cause}")
    text.append(f": {clean(history.detail)})" if history.detail else ")")
    changes = _changes(history)
    if changes.plain:
        text.append("; ").append_text(changes)
    text.append(f"; {_count(history.active, 'node')}")
    if history.spares:
        text.append(f" and {_count(history.spares, 'spare')}")
    if history.layout:
        text.append(f", {clean(history.layout)}")
    return text.append(f"; leader {clean(history.leader)}")


def _changes(history: GenerationHistory) -> Text:
    signed = [(f"+{name}", "green") for name in history.joined] + [(f"-{name}", "red") for name in history.left]
    shown = signed[:MANY]
    text = Text(" ").join([Text(clean(name), style=style) for name, style in shown])
    return text.append(f" and {len(signed) - MANY} more") if len(signed) > MANY else text


def when(at: float, now: float) -> str:
    """Return a wall clock's time in this machine's zone, with the date if it is 12 hours or more away."""
    if not at:
        return "?"
    try:
        local = time.localtime(at)
        form = "%H:%M:%S" if abs(now - at) < 43_200 else "%Y-%m-%d %H:%M"
        return time.strftime(form, local)
    except (OverflowError, ValueError, OSError):
        return "?"


def clean(text: str) -> str:
    """Return text from others on one line, without control characters that a terminal would obey."""
    if text.isprintable():  # nearly all is, and looking at each character took half the time of a large page
        return text
    return "".join(character if character.isprintable() else " " for character in text)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
