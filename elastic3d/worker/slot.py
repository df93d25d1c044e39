"""One slot of a node, as its keeper sees it: forks trainers, keeps their snapshots, tells what happens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from elastic3d.port import Assignment, Go

if TYPE_CHECKING:
    from checkpointing.tiles import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedSnapshot:
    """A snapshot that stays as it is while the context that gave it is open. facts: of the trainer's snapshot call."""

    generation: int
    step: int
    rank: int
    world: int
    facts: Mapping[str, Any]
    pieces: Sequence[Piece]


class Slot(Protocol):
    """What a keeper may ask of a slot, its own (`LocalSlot`) or a companion keeper's (`RemoteSlot`).

    Every method may be called from any thread and returns at once, `pieces`, `stop_all(wait)` and `close` excepted.
    What comes of a call arrives as events (worker/events.py) in the queue the slot was created with.
    """

    index: int

    @property
    def tile_port(self) -> int:
        """TCP port of the slot's tile server."""
        ...

    def measure(self, assignment: Assignment) -> int:
        """Fork a trainer that reports the model's profile and ends; return its number."""
        ...

    def prepare(self, assignment: Assignment) -> int:
        """Fork a trainer now, beside any that runs; it builds everything and waits. Return its number."""
        ...

    def go(self, trainer: int, go: Go) -> None:
        """Let a prepared trainer restore and train; may be sent before it is prepared."""
        ...

    def ask_leave(self, trainer: int) -> None:
        """Raise the trainer's leave flag: the next step vote makes all ranks leave together."""
        ...

    def set_etcd_away(self, away: bool) -> None:
        """Set the flag every running and future trainer of this slot carries into the step vote."""
        ...

    def stop(self, trainer: int) -> None:
        """SIGKILL the trainer's whole process group; `TrainerExited` follows when it is reaped."""
        ...

    def stop_all(self) -> None:
        """`stop` every trainer."""
        ...

    def set_buddy(self, address: str | None) -> None:
        """Copy snapshots to the tile server at "host:port" from now on; None: home alone counts as held."""
        ...

    def set_generation(self, number: int) -> None:
        """Refuse replicas of any older generation from now on. Never goes back."""
        ...

    def settled(self, generation: int) -> None:
        """Drop what is older than `generation`: it has a safe step of its own.

        A slot with a trainer finds out by itself; for spares, whose memory would stay full.
        """
        ...

    def pieces(self, step: int) -> AbstractContextManager[PinnedSnapshot]:
        """Pin the newest home snapshot of `step` while the context is open; StateError if it is not held.

        Takes the place of the pin that `SnapshotTaken(checkpoint=True)` announced. One pin at a time.
        """
        ...

    def unpin(self, step: int) -> None:
        """Let go of a snapshot taken for a checkpoint without writing it."""
        ...

    def close(self) -> None:
        """Kill trainers and template, reap them, stop the server and the threads. Idempotent."""
        ...
