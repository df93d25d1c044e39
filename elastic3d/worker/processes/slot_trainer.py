"""One trainer as its slot's thread knows it, and how it ended: by its exit code, its last words and the kernel's."""

from __future__ import annotations

import signal
import socket
from dataclasses import dataclass, field

from elastic3d.devices.oom_killer import KillCount
from elastic3d.port import Assignment, Go
from elastic3d.shortfall import Shortfall
from elastic3d.worker.processes import channel
from elastic3d.worker.processes.channel import FromTrainer, KeeperEnd
from elastic3d.worker.processes.events import ExitKind, TrainerExited
from elastic3d.worker.processes.failure import OUT_OF_MEMORY
from elastic3d.worker.processes.process import ExitCode
from elastic3d.worker.processes.supervisor import describe_exit


@dataclass(slots=True)
class SlotTrainer:
    """A trainer from the request to prepare it until its exit is reported."""

    number: int
    assignment: Assignment
    end: KeeperEnd
    theirs: socket.socket | None  # until the template has them
    pid: int | None = None
    leave: bool = False
    go: Go | None = None  # its leave to start, until it is sent
    gone: bool = False  # it was sent
    stopped: bool = False
    garbled: str = ""  # what of its words was not understood, for which it was killed
    hung_up: bool = False  # its end of the socket is closed: it ends, and its template is to say how
    saves: int = 0  # checkpoints it asked for
    step: int = -1
    table: str = ""
    last: FromTrainer | None = None
    kills: KillCount | None = None
    early: list[FromTrainer] = field(default_factory=list)  # messages that arrived before its template had reported it

    def exited(
        self, slot: int, code: int, kind: ExitKind | None = None, detail: str | None = None, *, waited: bool
    ) -> TrainerExited:
        """Return how it ended. code: of its exit. kind, detail: what else is known. waited: it waited for its peers."""
        kind = kind or self._kind(code)
        if kind is ExitKind.CRASH and code == -signal.SIGABRT and waited:
            # gloo's own threads end the process where the sizes of a collective do not fit: that is no fault of the
            # rank that they end, and what all recorded says whose it is.
            kind = ExitKind.PEER_LOST
        who, killed = f"the trainer of rank {self.assignment.rank}", code
        if kind is ExitKind.CRASH and self._loader():
            who, killed = f"a process of the data loader of rank {self.assignment.rank}", -self._loader()
        short = self._short(kind, killed)
        if short is not None and short.killed:
            kind, limit = ExitKind.OUT_OF_MEMORY, f" of {short.total} bytes" if short.total else ""
            detail = (
                f"the kernel killed {who}: the memory{limit} of its control group, or of the host, ran out. "
                f"{OUT_OF_MEMORY}"
            )
        returned = self.last if isinstance(self.last, channel.MainReturned) else None
        return TrainerExited(
            slot=slot,
            trainer=self.number,
            kind=kind,
            step=self.step,
            code=code,
            digest=returned.digest if returned is not None else None,
            exception=self.last.exception if isinstance(self.last, channel.MainRaised) else None,
            unsaved=returned.unsaved if returned is not None else -1,
            detail=detail or self.garbled or f"{who} {describe_exit(killed)}",
            short=short,
        )

    def _loader(self) -> int:
        """Return the signal that killed a process of its data loader, if it has ended for that, and else 0."""
        return self.last.exception.loader if isinstance(self.last, channel.MainRaised) else 0

    def _short(self, kind: ExitKind, code: int) -> Shortfall | None:
        """Return what was missing where it ended because memory ran out: by its own words, or by the kernel's."""
        if kind is ExitKind.OUT_OF_MEMORY and isinstance(self.last, channel.MainRaised):
            return self.last.exception.short
        killed = kind is ExitKind.CRASH and code == -signal.SIGKILL
        if not killed or self.kills is None or not self.kills.killed_since():
            return None
        given = self.assignment
        return Shortfall(rank=given.rank, host=True, device=given.device, total=self.kills.limit(), killed=True)

    def code_of_its_words(self) -> int | None:
        """Return the exit code that goes with what it said last; None where it said nothing of its end."""
        match self.last:
            case channel.MainReturned():
                return ExitCode.DONE
            case channel.MainLeft():
                return ExitCode.LEFT
            case channel.MainRaised(peer=peer):
                return ExitCode.PEER_LOST if peer else ExitCode.ERROR
            case _:
                return None

    def _kind(self, code: int) -> ExitKind:
        """Return how it ended: its exit code and its last words must agree."""
        match code, self.last:
            case ExitCode.DONE, channel.MainReturned():
                return ExitKind.DONE
            case ExitCode.LEFT, channel.MainLeft():
                return ExitKind.LEFT
            case ExitCode.MEASURED, channel.Profiled():
                return ExitKind.MEASURED
            case ExitCode.PEER_LOST, channel.MainRaised(peer=True):
                return ExitKind.PEER_LOST
            case ExitCode.ERROR, channel.MainRaised(peer=False) if self._loader():
                return ExitKind.CRASH
            case ExitCode.ERROR, channel.MainRaised(peer=False, exception=exception):
                return ExitKind.ERROR if exception.memory_use is None else ExitKind.OUT_OF_MEMORY
            case ExitCode.CONVICTED, channel.AuditTold(last=True):
                return ExitKind.CONVICTED
            case -9, _ if self.stopped:
                return ExitKind.STOPPED
            case _:
                return ExitKind.CRASH
