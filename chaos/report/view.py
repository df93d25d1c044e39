"""A job as a person watches it in the terminal, and the tables of how it went."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from chaos.history.follow import GenerationView, Picture
from chaos.judging.oracle import Verdict
from chaos.playing.outcome import Outcome
from chaos.playing.setting import Setting

_NEWS = 8


def progress(picture: Picture, setting: Setting, title: str) -> RenderableType:
    """Return the live display of a running job."""
    head = Table.grid(padding=(0, 2))
    head.add_column(width=34)
    head.add_column()
    # How many steps somebody's script makes is not known before it has made them.
    bar = ProgressBar(total=setting.steps or None, completed=picture.step, width=32)
    head.add_row(bar, _numbers(picture, setting))
    parts: list[RenderableType] = [head]
    if picture.generation is not None:
        parts += [Text(), mesh(picture.generation, setting.slots)]
    else:
        parts += [Text(), Text("agents are starting; each imports torch", style="dim")]
    parts += [Text(), _news(picture)]
    return Panel(Group(*parts), title=title, title_align="left", width=96)


def mesh(view: GenerationView, slots: int) -> RenderableType:
    """Return a map of a generation's mesh: one row per pipeline stage, one column per replica, nodes by name."""
    pp, dp = max(1, view.layout.get("pp", 1)), max(1, view.layout.get("dp", 1))
    ranks = [node if slots == 1 else f"{node}.{slot}" for node in view.nodes for slot in range(slots)]
    title = Text(f"generation {view.number}: {layout(view)}", style="bold")
    table = Table()
    table.add_column("")
    for replica in range(dp):
        table.add_column(f"dp {replica}")
    for stage in range(pp):
        row = ranks[stage * dp : (stage + 1) * dp]
        table.add_row(f"pp {stage}", *(f"[green]{name}[/]" for name in row))
    spares = [Text(f"spare: {', '.join(view.spares)}", style="yellow")] if view.spares else []
    return Group(title, table, *spares)


def layout(view: GenerationView) -> str:
    """Return a generation's layout as text."""
    if not view.layout:
        return "no layout"
    if "pp" not in view.layout:
        return f"{view.world} ranks"
    return f"pp {view.layout.get('pp')} x dp {view.layout.get('dp')}, ZeRO-{view.layout.get('zero')}"


def generations(picture: Picture) -> Table:
    """Return the table of generations: the cause, nodes and cost of each."""
    table = Table(title="Generations", title_justify="left", title_style="bold")
    for name in ("", "cause", "nodes", "layout", "event to next step", "pause", "steps repeated", "state from"):
        table.add_column(name, justify="right" if name in ("event to next step", "pause", "steps repeated") else "left")
    for view in picture.generations:
        spares = f" (spare: {' '.join(view.spares)})" if view.spares else ""
        table.add_row(
            str(view.number),
            view.cause,
            " ".join(view.nodes) + spares,
            layout(view),
            _seconds(view.seconds_to_first_step),
            _seconds(view.pause),
            str(view.steps_repeated),
            view.restored_from or "-",
        )
    return table


def summary(outcome: Outcome, verdict: Verdict) -> RenderableType:
    """Return how a history went: generations, samples, and the verdict."""
    samples = verdict.samples
    account = Text.assemble(
        ("Samples  ", "bold"),
        f"{samples.consumed} consumed once, {samples.repeated} repeated, {samples.missing} missing",
    )
    lines: list[RenderableType] = [generations(outcome.picture), Text()]
    if outcome.setting.resident:
        lines.append(account)
    if outcome.picture.steps:
        last = outcome.picture.steps[-1]
        lines.append(Text.assemble(("Loss     ", "bold"), f"{_loss(outcome.picture)} after step {last.number}"))
    lines.append(Text.assemble(("Digest   ", "bold"), outcome.digest or "none"))
    lines.append(_verdict(verdict))
    lines += [Text(f"  {line}", style="red") for line in verdict.told]
    return Group(*lines)


def _verdict(verdict: Verdict) -> Text:
    words = {
        True: ("same bits as the undisturbed run of the same seed", "bold green"),
        False: ("NOT the bits of the undisturbed run", "bold red"),
        None: ("not compared with an undisturbed run", "yellow"),
    }
    if verdict.same_bits is not False and not verdict.kept:
        return Text.assemble(("Verdict  ", "bold"), ("a promise was broken", "bold red"))
    if verdict.same_losses:
        near = f"losses within {verdict.tolerance:g} of those of the undisturbed run of the same seed"
        return Text.assemble(("Verdict  ", "bold"), (near, "bold green"))
    return Text.assemble(("Verdict  ", "bold"), words[verdict.same_bits])


def _numbers(picture: Picture, setting: Setting) -> Text:
    of = f" of {setting.steps}" if setting.steps else ""
    if not picture.steps:
        return Text(f"step 0{of}")
    last = picture.steps[-1]
    return Text(f"step {last.number}{of}   loss {_loss(picture)}   {last.seconds:.2f} s a step")


def loss_text(loss: str) -> str:
    """Return a loss, given as hex text, for people; a script that torchrun restarts may tell its steps alone."""
    value = float.fromhex(loss)
    return "unknown" if isnan(value) else f"{value:.4f}"


def _loss(picture: Picture) -> str:
    return loss_text(picture.steps[-1].loss)


def _news(picture: Picture) -> RenderableType:
    start = min((view.sealed_at for view in picture.generations), default=0.0)
    lines: list[tuple[float, str, str]] = [(at, text, _style(text)) for at, text in picture.news]
    for view in picture.generations:
        first = next((step.at for step in picture.steps if step.generation == view.number), None)
        if first is not None and view.seconds_to_first_step is not None and view.cause != "start":
            text = f"going on at step {view.first_step}: {view.seconds_to_first_step:.2f} s after the {view.cause}"
            lines.append((first, text, "bold green"))
    return Text("\n").join([Text(f"{at - start:+7.2f} s  {text}", style=style) for at, text, style in _last(lines)])


def _last(lines: Sequence[tuple[float, str, str]]) -> list[tuple[float, str, str]]:
    return sorted(lines)[-_NEWS:]


def _style(text: str) -> str:
    return "bold red" if text.startswith("chaos:") else "dim"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
