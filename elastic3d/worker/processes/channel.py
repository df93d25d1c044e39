"""What a trainer and its keeper say to each other: frozen messages, one JSON frame each, over a stream socket.

A frame is its length (4 bytes, little-endian) and a JSON array of the message's kind and its fields. A trainer that
was killed mid-frame leaves an unfinished one behind, which is never a message.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast, get_args

from elastic3d.admission.check import CheckResult
from elastic3d.port import AuditReport, Flags, Go, StateRestored, StepRecord
from elastic3d.tagged import Tagged
from elastic3d.trust.frames import Frames, FrameShape, FrameTooLong
from elastic3d.values import DeviceFacts, ModelProfile, ProvenChain
from elastic3d.worker.processes.events import EventSaid, RaisedException

_SHAPE = FrameShape(most=1 << 30, order="little")
BUFFER_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MainReady:
    """Trainer: everything is built; it waits for `go`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """Trainer, measuring: the model's profile, and how and what the node's devices are.

    device: None where a check of them failed. proven: what was proven of the model, for this node's trainers.
    """

    profile: ModelProfile
    checks: tuple[CheckResult, ...] = ()
    device: DeviceFacts | None = None
    proven: ProvenChain | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tabled:
    """Trainer: how the snapshots that follow are laid out; `table` as snapshots.table.to_wire gives it."""

    table: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotWritten:
    """Trainer: a snapshot is complete in `buffer`. This message is what makes the buffer's bytes valid."""

    buffer: int
    step: int
    checkpoint: bool
    facts: dict[str, Any]
    digests: tuple[str, ...] = ()
    """Of its tiles, as they were when they were written; "" for those that were not hashed, none where none was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferWanted:
    """Trainer: a final snapshot must be taken and no buffer is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTaken:
    """Trainer: a step was made."""

    record: StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStepsTaken:
    """Trainer: a standby for its successor would not hold it up any more.

    changed: variables that `main` has set for a device's libraries, for which those of a standby would be loaded too
    early.
    """

    changed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditTold:
    """Trainer: an audit found something, or there are none. last: no message follows, for its step is not made."""

    report: AuditReport
    last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MainLeft:
    """Trainer, last message: it leaves at this step boundary."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MainReturned:
    """Trainer, last message: main returned. unsaved: the step that must still go to the store, -1 for none."""

    digest: str | None
    unsaved: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class MainRaised:
    """Trainer, last message: an exception ended it; `peer` says that it came from a collective."""

    peer: bool
    exception: RaisedException


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Keeper: restore, then train."""

    go: Go


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """Keeper: the flags for the next step vote.

    saves: how often the keeper has seen this trainer ask for a checkpoint.
    """

    flags: Flags
    saves: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """Keeper: the trainer may write its next snapshot into this buffer."""

    buffer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSafe:
    """Keeper: this step's snapshot is held at home and at the buddy. seconds: what it took to hash and send it."""

    step: int
    seconds: float = 0.0


FromTrainer = (
    MainReady
    | Profiled
    | StateRestored
    | Tabled
    | SnapshotWritten
    | BufferWanted
    | StepTaken
    | FirstStepsTaken
    | AuditTold
    | EventSaid
    | MainLeft
    | MainReturned
    | MainRaised
)
FromKeeper = Start | Raised | Granted | SnapshotSafe
Message = FromTrainer | FromKeeper
_MESSAGES: Tagged[Message] = Tagged((*get_args(FromTrainer), *get_args(FromKeeper)))


def encode(message: Message) -> bytes:
    """Return the message as one frame."""
    return Frames(_SHAPE).pack_json(_MESSAGES.to_json(message))


class Decoder:
    """Turns bytes, cut anywhere, into messages."""

    def __init__(self) -> None:
        self._frames = Frames(_SHAPE)

    def feed(self, data: bytes) -> Iterator[Message]:
        """Take more bytes and yield every message that is complete; ValueError for what is none."""
        self._frames.take(data)
        while (body := self._next()) is not None:
            yield _MESSAGES.from_json(*json.loads(body))

    def _next(self) -> bytes | None:
        try:
            return self._frames.next()
        except FrameTooLong as error:
            raise ValueError(f"{error}: this is not a trainer's channel") from error


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the keeper's end (never blocks) and the trainer's end (blocks) of a new channel."""
    keeper, trainer = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (keeper, trainer):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    keeper.setblocking(False)
    return keeper, trainer


class KeeperEnd:
    """The keeper's end: it never blocks, and keeps what the socket does not take. For one thread."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._decoder = Decoder()
        self._unsent = bytearray()

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._end.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether something waits to be flushed."""
        return bool(self._unsent)

    def send(self, message: FromKeeper) -> None:
        """Send as much as possible and keep the rest for `flush`. A dead trainer is no error: its exit is reported."""
        self._unsent += encode(message)
        self.flush()

    def flush(self) -> None:
        """Send what was kept."""
        try:
            while self._unsent:
                del self._unsent[: self._end.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()

    def receive(self) -> list[FromTrainer] | None:
        """Return the messages that have arrived, None when there will be no more."""
        messages: list[FromTrainer] = []
        while True:
            try:
                data = self._end.recv(1 << 20)
            except BlockingIOError:
                return messages
            except OSError:
                data = b""
            if not data:
                return messages or None
            messages.extend(cast(FromTrainer, message) for message in self._decoder.feed(data))

    def close(self) -> None:
        """Close the descriptor."""
        self._end.close()


class TrainerEnd:
    """The trainer's end: any thread may send, one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._decoder = Decoder()
        self._lock = threading.Lock()

    def send(self, message: FromTrainer) -> None:
        """Send the message whole; OSError when the keeper is gone."""
        data = encode(message)
        with self._lock:
            self._end.sendall(data)

    def receive(self) -> list[FromKeeper]:
        """Wait for messages; an empty list means that the keeper is gone."""
        while True:
            data = self._end.recv(1 << 16)
            if not data:
                return []
            messages = [cast(FromKeeper, message) for message in self._decoder.feed(data)]
            if messages:
                return messages
