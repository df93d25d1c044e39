"""What the keepers of a node say to each other, and the names they meet under; `trust.local` has the frames."""

from __future__ import annotations

from typing import get_args

from blake3 import blake3

from elastic3d.tagged import Tagged
from elastic3d.worker.processes.events import SlotEvent

EVENTS: Tagged[SlotEvent] = Tagged(get_args(SlotEvent))
"""What a companion keeper's slot reports, by the names of the events."""


def private_name(token: str, *parts: object) -> str:
    """Return the abstract name of `parts`, which only processes that know the token can tell.

    Every user can list the names in use: one that showed the token would let another user take the next one first.
    """
    said = "\0".join(map(str, (token, *parts)))
    return f"elastic3d-{blake3(said.encode(), derive_key_context='elastic3d slot names').hexdigest(16)}"
