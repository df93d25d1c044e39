"""What a slot tells its keeper, as frozen events.

Every event names its slot (local index) and, where one is meant, the trainer: a number unique within the slot.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from elastic3d import log
from elastic3d.admission.check import CheckResult
from elastic3d.clock import SYSTEM
from elastic3d.membership.stalls import RankStall
from elastic3d.port import AuditReport, StateRestored, StepRecord
from elastic3d.shortfall import Shortfall
from elastic3d.trust.listening import Refusal
from elastic3d.values import DeviceFacts, ModelProfile, ProvenChain


class ExitKind(StrEnum):
    """How a trainer ended. Only `done` carries a digest, only `left` and `done` a step that means something."""

    DONE = "done"  # main returned
    LEFT = "left"  # asked to leave, and left at a step boundary
    MEASURED = "measured"  # a measuring trainer reported its profile
    PEER_LOST = "peer_lost"  # a collective failed: another rank is gone
    ERROR = "error"  # the script raised
    OUT_OF_MEMORY = "out_of_memory"  # the script raised that memory ran out, or the kernel killed it for that
    CONVICTED = "convicted"  # a check found a rank that computes wrongly, or a loss that jumped up: no update was made
    STOPPED = "stopped"  # killed because the keeper asked for it
    CRASH = "crash"  # it, or a process of its data loader, was killed by nobody here; or an exit code that is not ours
    TEMPLATE = "template"  # its template died, and it died with it


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedException:
    """An exception as sent to another process: its class, its message and its formatted traceback.

    final: it will be raised again however often it is tried. memory_use: who held the memory, where it says that memory
    ran out; None otherwise. short: then what was missing. loader: the signal that killed a process of the data loader,
    where that is why it was raised, and else 0.
    """

    kind: str
    message: str
    traceback: str
    final: bool = False
    memory_use: str | None = None
    short: Shortfall | None = None
    loader: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileMeasured:
    """A measuring trainer reported the model's profile, and how and what the devices are; None where a check failed.

    Its `TrainerExited(kind=measured)` follows.
    """

    slot: int
    trainer: int
    profile: ModelProfile
    checks: tuple[CheckResult, ...] = ()
    device: DeviceFacts | None = None
    proven: ProvenChain | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A trainer was forked and runs as `pid`, leader of process group `pid`."""

    slot: int
    trainer: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerReady:
    """A trainer has built everything and waits in `run.restore` for `go`."""

    slot: int
    trainer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A trainer has its state."""

    slot: int
    trainer: int
    state: StateRestored


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinished:
    """A trainer made a step."""

    slot: int
    trainer: int
    record: StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditHeard:
    """A trainer told what an audit found; all trainers of the generation tell the same."""

    slot: int
    trainer: int
    report: AuditReport


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotTaken:
    """A snapshot is complete in this host's memory and its digests are known: `pieces(step)` works from here on.

    checkpoint: the trainer asked for a durable checkpoint of it; the snapshot is pinned until `pieces(step)` has been
    entered and left, or `unpin(step)` called.
    """

    slot: int
    trainer: int
    generation: int
    step: int
    checkpoint: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotHeld:
    """A snapshot is held at home and at the buddy (at home alone while there is no buddy).

    sent: bytes of snapshots that a buddy has taken since the one before. buddy: its address, None for none.
    """

    slot: int
    generation: int
    step: int
    sent: int = 0
    buddy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BuddyUnreachable:
    """No snapshot could be sent to the buddy at `address` for `seconds`; `error` is how the last try ended."""

    slot: int
    address: str
    seconds: float
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSilent:
    """A trainer shows no sign of progress, and this is what it is at; again when that has changed.

    over: it has been silent for longer than it may be, or has ended by itself (state dead). False where the keeper
    follows the trainer: this is what it is at.
    """

    slot: int
    trainer: int
    rank: RankStall
    over: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMoving:
    """A trainer that was silent for too long moves again."""

    slot: int
    trainer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerExited:
    """A trainer and its whole process group are dead and reaped; the last event of that trainer.

    step: the last step it committed or left at, -1 for none. code: exit code, or minus the signal's number. digest: of
    the final state, where kind is `done` and it was computed. exception: where kind is `error`, `out_of_memory` or
    `peer_lost`.
    unsaved: where kind is `done`, the step that must still go to the store, -1 for none. detail: one line for people.
    short: what was missing, where kind is `out_of_memory`.
    """

    slot: int
    trainer: int
    kind: ExitKind
    step: int
    code: int
    digest: str | None = None
    exception: RaisedException | None = None
    unsaved: int = -1
    detail: str = ""
    short: Shortfall | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateDied:
    """The template died; a new interpreter is being started, and forks requested meanwhile wait for it."""

    slot: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLost:
    """The slot cannot go on: its companion keeper is gone, or its template could not be started again."""

    slot: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSignalled:
    """The slot's companion keeper got SIGTERM or SIGINT."""

    slot: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionRefused:
    """A connection to one of the slot's ports was refused; see `trust.listening.Refusal`."""

    slot: int
    refusal: Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSaid:
    """A process of the slot said that something happened which the list of events has; it was shown already.

    at: by the wall clock. fields: with those that the process's log is bound with, as JSON has them.
    """

    slot: int
    name: str
    at: float
    fields: dict[str, Any]

    def __post_init__(self) -> None:
        log.check(self.name, self.fields)

    @classmethod
    def now(cls, slot: int, name: str, fields: Mapping[str, Any]) -> EventSaid:
        """Return it for what happens now. fields: whatever the log writes."""
        return cls(slot=slot, name=name, at=SYSTEM.wall(), fields=json.loads(json.dumps(fields, default=str)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotAlive:
    """The slot's companion keeper answered the question whether it is there."""

    slot: int


SlotEvent = (
    ProfileMeasured
    | Started
    | TrainerReady
    | Restored
    | StepFinished
    | AuditHeard
    | SnapshotTaken
    | SnapshotHeld
    | BuddyUnreachable
    | EventSaid
    | SlotAlive
    | RankSilent
    | RankMoving
    | TrainerExited
    | TemplateDied
    | SlotLost
    | SlotSignalled
    | ConnectionRefused
)
