"""The list of events and the code that emits them agree."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from elastic3d.log import BOUND, EVENTS

ROOT = Path(__file__).parent.parent
PASSING_ON = {"elastic3d/log.py", "elastic3d/worker/journal.py"}
"""Files whose `emit` passes on a name given by a caller."""


def emitted() -> tuple[dict[str, set[str]], set[str], list[str]]:
    """Return the fields of each event by its name, the events some of whose fields no syntax shows, and odd calls."""
    fields: dict[str, set[str]] = defaultdict(set)
    hidden: set[str] = set()
    odd: list[str] = []
    for path in sorted(path for folder in ("elastic3d", "chaos") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            at = {"emit": 0, "_emit": 0, "emit_at": 1}.get(node.func.attr)
            if at is None:
                continue
            name = node.args[at]
            if not isinstance(name, ast.Constant):
                if str(path.relative_to(ROOT)) not in PASSING_ON:
                    odd.append(f"{path}:{node.lineno}")
                continue
            own = {keyword.arg for keyword in node.keywords if keyword.arg is not None} - set(BOUND)
            fields[name.value] |= own
            if any(keyword.arg is None for keyword in node.keywords):
                hidden.add(name.value)
    return fields, hidden, odd


def test_the_listed_events_are_the_emitted_ones() -> None:
    """Every name and every field: readers of the log rely on the list."""
    fields, hidden, odd = emitted()
    assert odd == [], "name the event where it is emitted"
    assert set(fields) == set(EVENTS)
    for name, kind in EVENTS.items():
        if name in hidden:
            assert fields[name] <= set(kind.fields), name
        else:
            assert fields[name] == set(kind.fields), name


def test_no_event_field_collides_with_bound_fields() -> None:
    """Such a field would be lost or would mean something else."""
    for name, kind in EVENTS.items():
        assert not {*kind.fields} & {*BOUND, "event", "at", "level"}, name
