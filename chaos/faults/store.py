"""Faults of the store of checkpoints: it goes away, is busy, loses answers, or gives other bytes than it took."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import ClassVar, Self

from chaos.faults.fault import About, Ends, Fault, Need, Place, Replay, check_seconds
from chaos.faults.live import LiveJob
from chaos.faults.moment import When
from chaos.servers.s3_proxy import Do, Harm
from elastic3d.errors import UsageError

_AGAIN = "each operation is tried again, part by part, for as long as `patience=` says; training goes on"
_BUSY = "the object store is busy (503) or away for a while"
_DAMAGED = "a checkpoint is damaged, a tile of it or its record"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreGone(Fault):
    """A folder is gone for `seconds`: a file is in its place."""

    WORD = "store-gone"
    seconds: float = 5.0
    ABOUT = About(
        place=Place.STORE,
        enters="the folder is renamed, a file gets its name, then the way back",
        promised="training goes on without checkpoints, and an event says so; they go on when the store works again",
        row="the store cannot be written: full, gone, no permission",
        detector="checkpoint.failed",
        replay=Replay.TIMED,
        ends=Ends.NOTHING,
        sure=False,
    )

    def make(self, job: LiveJob) -> bool:
        """Take it away; not before there is one."""
        folder = Path(job.store_folder)
        aside = folder.with_name(f"{folder.name}.aside")
        if not folder.is_dir() or aside.exists():
            return False
        job.note("store gone")
        os.rename(folder, aside)
        folder.touch()

        def put_back() -> None:
            folder.unlink()
            os.rename(aside, folder)

        job.later(self.seconds, put_back)
        return True

    def check(self) -> None:
        """Refuse a time that is none."""
        check_seconds(self, self.seconds)

    @classmethod
    def drawn(cls, chance: Random, *, nodes: int, steps: int) -> Self:
        """Return one of some seconds."""
        return cls(when=When(step=chance.randrange(1, steps)), seconds=chance.choice((0.5, 2.0, 5.0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Harmed(Fault):
    """From then on `times` requests of an object store fare so. method: "" for any, else such as GET."""

    DO: ClassVar[Do]
    times: int = 5
    method: str = ""

    def make(self, job: LiveJob) -> bool:
        """Let the proxy before the store do it."""
        job.note(self.WORD)
        job.proxy.harms.append(Harm(do=self.DO, method=self.method, times=self.times))
        return True

    def check(self) -> None:
        """Refuse a number that is none."""
        if self.times < 1:
            raise UsageError(f"{self}: it must happen to at least 1 request")
        if self.method not in ("", "GET", "PUT", "POST", "DELETE", "HEAD"):
            raise UsageError(f"{self}: {self.method!r} is no method of requests; give GET, PUT, POST, DELETE or HEAD")

    @classmethod
    def drawn(cls, chance: Random, *, nodes: int, steps: int) -> Self:
        """Return one of some requests."""
        return cls(when=When(step=chance.randrange(1, steps)), times=chance.choice((1, 3, 10)))

    def __str__(self) -> str:
        return f"{self.WORD} {self.method} x{self.times} {self.when}".replace("  ", " ")


def _about(what: str, promised: str, row: str) -> About:
    return About(
        place=Place.STORE,
        enters=f"a proxy before the store: {what}",
        promised=promised,
        row=row,
        needs=frozenset({Need.S3}),
        ends=Ends.NOTHING,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBusy(_Harmed):
    """The store answers that it is busy (503)."""

    WORD = "store-busy"
    DO = Do.BUSY
    ABOUT = _about("503 SlowDown, and the server never hears of it", _AGAIN, _BUSY)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreError(_Harmed):
    """The store answers that it has an error (500)."""

    WORD = "store-error"
    DO = Do.ERROR
    ABOUT = _about("500, and the server never hears of it", _AGAIN, _BUSY)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRefuses(_Harmed):
    """The store closes connections."""

    WORD = "store-refuses"
    DO = Do.REFUSE
    ABOUT = _about("the connection is closed, and the server never hears of it", _AGAIN, _BUSY)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUnanswered(_Harmed):
    """The store does what it is asked to, and the answer is lost."""

    WORD = "store-unanswered"
    DO = Do.UNANSWERED
    ABOUT = _about("the server executes it, and the connection is closed without an answer", _AGAIN, _BUSY)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRepeats(_Harmed):
    """The store gets requests twice."""

    WORD = "store-repeats"
    DO = Do.REPEAT
    ABOUT = _about("the server gets it twice, the client the second answer", _AGAIN, _BUSY)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSlow(_Harmed):
    """The store answers late."""

    WORD = "store-slow"
    DO = Do.DELAY
    ABOUT = _about("each request waits 0.2 s", "training does not wait for it, and nobody is named", _BUSY)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTruncates(_Harmed):
    """Answers of the store end in the middle."""

    WORD = "store-truncates"
    DO = Do.TRUNCATE
    method: str = "GET"
    ABOUT = _about("half of the answer's body, then the end of the connection", _AGAIN, _BUSY)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFlips(_Harmed):
    """A bit of what the store gives back is another one."""

    WORD = "store-flips"
    DO = Do.FLIP_ANSWER
    method: str = "GET"
    ABOUT = _about(
        "one bit of the answer's body is flipped", "digests show it; another copy is used, or an older one", _DAMAGED
    )


KINDS = (
    StoreGone,
    StoreBusy,
    StoreError,
    StoreRefuses,
    StoreUnanswered,
    StoreRepeats,
    StoreSlow,
    StoreTruncates,
    StoreFlips,
)
