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
from chaos.servers.s3_proxy import LISTS, Do, Harm
from elastic3d.errors import UsageError

_AGAIN = "each operation is tried again, part by part, for as long as `patience=` says; training goes on"
_FAILED = "checkpoint.failed"
_BUSY = "the object store is busy (503) or away for a while"
UNWRITABLE = "the store cannot be written: full, gone, no permission"
WITHOUT = "training goes on without checkpoints, and an event says so; they go on when the store works again"
_DAMAGED = "a checkpoint is damaged, a tile of it or its record"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreGone(Fault):
    """A folder is gone for `seconds`: a file is in its place."""

    WORD = "store-gone"
    seconds: float = 5.0
    ABOUT = About(
        place=Place.STORE,
        enters="the folder is renamed, a file gets its name, then the way back",
        promised=WITHOUT,
        row=UNWRITABLE,
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
    PATH: ClassVar[str] = ""
    """What the address of a request has that it happens to."""

    times: int = 5
    method: str = ""

    def make(self, job: LiveJob) -> bool:
        """Let the proxy before the store do it."""
        job.note(self.WORD)
        job.harm(self, Harm(do=self.DO, method=self.method, path=self.PATH, times=self.times))
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


def _about(what: str, promised: str, row: str, detector: str = "", page: str = "reference/failures.md") -> About:
    return About(
        place=Place.STORE,
        enters=f"a proxy before the store: {what}",
        promised=promised,
        row=row,
        page=page,
        detector=detector,
        needs=frozenset({Need.S3}),
        ends=Ends.NOTHING,
        sure=not detector,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFlipsWrites(_Harmed):
    """A bit of what the store is given to keep is another one."""

    WORD = "store-flips-writes"
    DO = Do.FLIP_REQUEST
    method: str = "PUT"
    ABOUT = _about(
        "one bit of the request's body is flipped",
        "it is written again where the store's checksum shows it, and is never part of a checkpoint otherwise",
        "",
        page="guides/checkpoints.md",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreErrorAfter(_Harmed):
    """The store does what it is asked to, and answers that it has an error (500)."""

    WORD = "store-error-after"
    DO = Do.ERROR_AFTER
    ABOUT = _about("the server executes it, and the client gets a 500", _AGAIN, _BUSY)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFull(_Harmed):
    """The store refuses writes as full (507)."""

    WORD = "store-full"
    DO = Do.FULL
    method: str = "PUT"
    ABOUT = _about("507 InsufficientStorage, and the server never hears of it", WITHOUT, UNWRITABLE, _FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreDenies(_Harmed):
    """The store allows no writes (403)."""

    WORD = "store-denies"
    DO = Do.DENY
    method: str = "PUT"
    ABOUT = _about("403 AccessDenied, and the server never hears of it", WITHOUT, UNWRITABLE, _FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSkewed(_Harmed):
    """The store finds the writers' clocks too far off (403)."""

    WORD = "store-skewed"
    DO = Do.SKEWED
    method: str = "PUT"
    ABOUT = _about("403 RequestTimeTooSkewed, and the server never hears of it", WITHOUT, UNWRITABLE, _FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStrips(_Harmed):
    """The store ignores the conditions of writes from then on, though it kept them when it was tried."""

    WORD = "store-strips"
    DO = Do.STRIP
    method: str = "PUT"
    ABOUT = _about(
        "the server gets it without If-Match and If-None-Match",
        "as long as one leader writes, nothing happens; a store that never keeps conditions is refused at the start",
        "",
        page="guides/checkpoints.md",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStale(_Harmed):
    """The store's lists are those of before."""

    WORD = "store-stale-lists"
    DO = Do.STALE
    PATH = LISTS
    method: str = "GET"
    ABOUT = _about(
        "a list is answered as it was the last time before",
        "what is in use is never collected, and the newest checkpoint is found without a list",
        "",
        page="guides/checkpoints.md",
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
    StoreFlipsWrites,
    StoreErrorAfter,
    StoreFull,
    StoreDenies,
    StoreSkewed,
    StoreStrips,
    StoreStale,
)
