"""When to campaign for a vacant lead, so that not everybody does at once."""

from __future__ import annotations

from zlib import crc32

from elastic3d.membership.machine.view import View

STAGGER = 0.3
"""Seconds between the campaigns of one candidate and the next."""

TURNS = 10
"""Candidates that wait for their turn; all later ones campaign within one second after those."""


def turn(view: View, *, leaving: bool) -> float:
    """Return the seconds that others may campaign before this member: active ones in rank order, then the rest.

    A node that is `leaving` comes last. While nobody is active yet, everybody tries at once.
    """
    current, me = view.generation, view.me.node.id
    if current is None or not current.nodes:
        return 0.0
    ring, before = view.ring, 0
    for id in ring.ids:
        if id == me or before >= TURNS:
            break
        before += id not in view.tombs
    if me not in ring.index or leaving:
        before = max(before, min(TURNS, len(ring.ids)))
    # Spread by something that differs between processes and is the same in every call.
    spread = crc32(me.encode()) / 2**32 if before >= TURNS or me not in ring.index else 0.0
    return STAGGER * before + spread
