"""A document as fragments of HTML, each of which changes only if what it shows did. Pure.

title     of the page, plain text
away      why etcd does not answer, plain text, "" where it does
parts     HTML by the id of the element that holds it
nodes     rows of the table of nodes by key, and their order
mesh      rows of the mesh by stage
series    points of the curves by chunk
"""

from __future__ import annotations

from typing import Any

from elastic3d.cli.durations import spell
from elastic3d.cli.render import clean, when
from elastic3d.dashboard import store_view, tables
from elastic3d.dashboard.document import PageDocument
from elastic3d.log import Level
from elastic3d.membership.inspection.status import JobState, NodeRole, NodeState, StateAge, Status
from elastic3d.pages.findings import cards
from elastic3d.pages.generations import generation_row
from elastic3d.pages.markup import Html, ago, join, tag

SHOWN = 12
EVENTS = 50
NOTHING = "Nothing was found about this job: no rank held others up, as far as etcd knows."

JOB = {JobState.TRAINING: "ok", JobState.ENDED: "ok", JobState.FAILED: "bad"}


def view(document: PageDocument, *, orders: bool = False) -> dict[str, Any]:
    """Return the fragments. Times in them are said as of `read_at`, and counted on by the page's script."""
    status = document.status
    until = {id: document.moments.get(f"left/{id}") for id in (f"{n.name}@{n.incarnation}" for n in status.nodes)}
    rows = {
        tables.key_of(node): tables.node_row(
            node, until[f"{node.name}@{node.incarnation}"], document.read_at, orders=orders
        )
        for node in status.nodes
    }
    return {
        "title": clean(f"{status.run_id}: {status.state}"),
        "away": clean(document.away),
        "parts": {
            "job": _job(status),
            "figures": _figures(document),
            "warnings": _warnings(document),
            "outside": tables.outside(document),
            "layout": _layout(document),
            "counts": _counts(status),
            "checkpoints": _checkpoints(document),
            "generations": join(
                *(
                    generation_row(one, f"{one.number}.{one.attempt}", when(one.at, document.read_at))
                    for one in document.generations
                )
            ),
            "findings": cards(document.findings, NOTHING),
            "events": _events(document),
            "steps": _steps(document),
            **store_view.parts(document.store, document.read_at),
        },
        "nodes": {"order": list(rows), "rows": rows},
        "mesh": tables.mesh(document),
        "series": dict(document.chunks),
    }


def _job(status: Status) -> Html:
    badge = tag("span", str(status.state), class_=f"state {JOB.get(status.state, 'leaving')}")
    return join(tag("h1", status.run_id), badge, tag("p", status.detail) if status.detail else "")


def _figures(document: PageDocument) -> Html:
    status, now = document.status, document.read_at
    newest = document.newest[-1] if document.newest else None
    step, loss, took = status.step, status.loss, status.step_seconds
    if newest is not None and (newest.step >= step or loss is None):
        step, loss, took = newest.step, newest.loss, newest.seconds
    over = status.state in (JobState.ENDED, JobState.FAILED)
    active = (
        0 if over else sum(node.role is NodeRole.ACTIVE and tables.kind(node.state) != "bad" for node in status.nodes)
    )
    wanted = f"wants {status.minimum} to {status.maximum}" if status.minimum else ""
    sealed = document.moments.get("sealed")
    generation = status.generation
    made = document.moments.get("checkpoint")
    rows: list[tuple[str, object, object]] = [
        ("Step", f"{step:,}".replace(",", "\u2009") if step >= 0 else "none yet", ""),
        ("Loss", f"{loss:.5g}" if loss is not None else "not known", ""),
        ("A step takes", spell(took) if took else "not known", ""),
        ("Nodes that train", active, wanted),
        (
            "Generation",
            generation.number if generation is not None else "none yet",
            join("sealed ", ago(sealed, now)) if sealed is not None else "",
        ),
        (
            "Checkpoint",
            _step_of(status.checkpoint, status),
            ago(made, now, about=True) if made is not None else "",
        ),
    ]
    if status.goodput is not None:
        rows.append(("Goodput", f"{100 * status.goodput.share:.3g} %", f"of {spell(status.goodput.held)} held"))
    return join(*(tag("div", tag("dt", name), tag("dd", value, tag("small", more))) for name, value, more in rows))


def _layout(document: PageDocument) -> Html:
    parts = []
    for generation, prepared in ((document.status.generation, False), (document.status.preparing, True)):
        if generation is None:
            continue
        ranks = f"{generation.world} rank{'s' * (generation.world != 1)} on " if generation.world else ""
        nodes = f"{len(generation.nodes)} node{'s' * (len(generation.nodes) != 1)}"
        layout = f"{generation.layout}, " if generation.layout is not None else ""
        why = f"{generation.cause}: {generation.detail}" if generation.detail else str(generation.cause)
        head = f"Generation {generation.number}"
        if prepared:
            head += " is being prepared" + (", and trainers are switching" if generation.switching else "")
        said = f": {layout}{ranks}{nodes} ({why})"
        parts.append(tag("p", tag("strong", head), said, class_="coming" if prepared else None))
    if not parts:
        parts.append(tag("p", "No generation was sealed yet."))
    elif document.status.generation is not None and not document.status.generation.mesh:
        parts.append(tag("p", "This job has no layout: its script decides what its ranks do."))
    return join(*parts)


def _counts(status: Status) -> Html:
    """Return how many nodes there are in each state, and who waits, leaves or is kept out."""
    by_state: dict[NodeState, list[str]] = {}
    for node in status.nodes:
        by_state.setdefault(node.state, []).append(node.name)
    rows = []
    for state, names in by_state.items():
        few = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        detail = few if state not in (NodeState.ACTIVE, NodeState.FINISHED) else ""
        badge = tag("span", str(state), class_=f"state {tables.kind(state)}")
        rows.append(tag("li", badge, f" {len(names)}", tag("small", f" {detail}") if detail else ""))
    return tag("ul", *rows, class_="counts")


def _warnings(document: PageDocument) -> Html:
    status, lines = document.status, []
    for suspect in status.suspects[:SHOWN]:
        who = f"rank {suspect.rank} ({suspect.node}) makes no progress in {suspect.phase}, {suspect.state}"
        lines.append(f"{who}, for {spell(suspect.seconds)} or more" + f": {suspect.detail}" * bool(suspect.detail))
    if len(status.suspects) > SHOWN:
        lines.append(f"and {len(status.suspects) - SHOWN} more ranks")
    health = status.health
    if health is not None:
        for slow in health.slow[:SHOWN]:
            times = f"{slow.kind}, {slow.rho:.2f} times as long, {slow.cost:.3g} s of each step"
            lines.append(f"node {slow.node} is slow since step {slow.since}: {times}")
        if health.left_out:
            lines.append(f"{health.left_out} micro-batches were left out so far")
        if health.skipped:
            lines.append(f"{health.skipped} updates were skipped: they were not finite")
        if health.spike >= 0:
            lines.append(f"the loss last jumped up in step {health.spike}")
    if status.injectable:
        lines.append(f"faults may be injected into {len(status.injectable)} nodes (chaos=allow)")
    lines += [f"key that cannot be read: {problem}" for problem in status.problems[:SHOWN]]
    if len(status.problems) > SHOWN:
        lines.append(f"and {len(status.problems) - SHOWN} more keys that cannot be read")
    lines += [f"event files: {problem}" for problem in document.problems[:SHOWN]]
    return tag("ul", *(tag("li", line) for line in lines), class_="warnings") if lines else Html("")


def _checkpoints(document: PageDocument) -> Html:
    status = document.status
    kept: tuple[tuple[str, str, StateAge | None], ...] = (
        ("snapshot", "Snapshot in memory, twice", status.snapshot),
        ("checkpoint", "Newest checkpoint", status.checkpoint),
        ("verified", "Newest that was read back", status.verified),
        ("vetted", "Newest that audits vouch for", status.vetted),
    )
    rows = []
    for name, words, state in kept:
        at = document.moments.get(name)
        age: object = ago(at, document.read_at, about=True) if at is not None else ""
        if state is None and name == "vetted" and status.unvetted:
            age = status.unvetted
        step = tag("td", _step_of(state, status), class_="number")
        rows.append(tag("tr", tag("th", words, scope="row"), step, tag("td", age)))
    return join(*rows)


def _step_of(state: StateAge | None, status: Status) -> str:
    """Return the step of a state that is kept; when the nodes have gone, what they reported has gone with them."""
    if state is not None:
        return f"step {state.step}"
    return "not known any more" if status.state in (JobState.ENDED, JobState.FAILED) else "none"


def _events(document: PageDocument) -> Html:
    notables = document.notables
    if notables is None:
        return tag("tr", tag("td", "Not read: elastic3d dashboard --events FOLDER shows them.", colspan=4))
    if not notables:
        return tag("tr", tag("td", "None yet.", colspan=4))
    return join(
        *(
            tag(
                "tr",
                tag("td", when(event.at, document.read_at), class_="nowrap"),
                tag("td", event.name, class_="nowrap"),
                tag("td", event.node),
                tag("td", event.said, class_="text"),
                class_={Level.WARNING: "leaving", Level.ERROR: "bad"}.get(event.level),
            )
            for event in notables[:EVENTS]
        )
    )


def _steps(document: PageDocument) -> Html:
    if not document.newest:
        return tag("tr", tag("td", "No step was reported yet.", colspan=4))
    return join(
        *(
            tag(
                "tr",
                tag("th", one.step, scope="row", class_="number"),
                tag("td", "" if one.loss is None else f"{one.loss:.6g}", class_="number"),
                tag("td", spell(one.seconds), class_="number"),
                tag("td", one.generation, class_="number"),
            )
            for one in reversed(document.newest)
        )
    )
