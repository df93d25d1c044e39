"""Announcements of readers and writers, so that no collection deletes what they need (format.md, section 13)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from checkpointing.errors import FormatError
from checkpointing.format import names
from checkpointing.format.encoding import document, parse
from checkpointing.format.fields import Fields

ANNOUNCED_AFTER = 30.0
"""Seconds after which work is announced. A grace shorter than twice that protects only those who announce at once."""

EXPIRES = 300.0
"""Seconds after which an announcement that was not written again no longer counts."""


class Role(StrEnum):
    """Whether the announcement is a reader's or a writer's."""

    READER = "reader"
    WRITER = "writer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """A reader or writer at work.

    checkpoint: the one being read, or the one that the present save builds on; None for none. began: how many seconds
    before this was written the work began, or more. expires: seconds from writing until it no longer counts. All times
    are durations: the time of writing is the object's own, by the store's clock.
    """

    role: Role
    checkpoint: str | None
    began: float
    expires: float = EXPIRES


def encode_announcement(announcement: Announcement) -> bytes:
    """Return the announcement's object."""
    return document("announcement", dataclasses.asdict(announcement))


def decode_announcement(data: bytes, name: str) -> Announcement:
    """Return the announcement in the object `name`; FormatError for anything that format.md forbids."""
    fields = Fields(parse(data, "announcement", name), name)
    role, checkpoint = fields.text("role"), fields.raw("checkpoint")
    if role not in list(Role):
        raise fields.fail(f"role is {role!r:.40}, neither reader nor writer")
    if checkpoint is not None and names.parse_checkpoint(checkpoint) is None:
        raise fields.fail("names something that is no checkpoint")
    return Announcement(
        role=Role(role),
        checkpoint=checkpoint,
        began=_seconds(fields, "began"),
        expires=_seconds(fields, "expires"),
    )


def _seconds(fields: Fields, field: str) -> float:
    value: Any = fields.raw(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise fields.fail(f"{field} is {value!r:.40}, not a number of seconds")
    return float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class AtWork:
    """The announced readers and writers, as a collection takes them into account.

    checkpoints: those that they read or build on. writing_since: when the first writer began, by the store's clock and
    if anything too early; None if there is no writer.
    """

    checkpoints: frozenset[str] = frozenset()
    writing_since: float | None = None


def at_work(announced: list[tuple[float, Announcement | FormatError]], now: float) -> AtWork:
    """Return the readers and writers at `now`, from announcements and their times of writing, by the store's clock.

    An announcement that cannot be read may be that of a writer who began at any time.
    """
    checkpoints, since = set(), []
    for modified, announcement in announced:
        if isinstance(announcement, FormatError):
            if now < modified + EXPIRES:
                since.append(0.0)
        elif now < modified + announcement.expires:
            if announcement.checkpoint is not None:
                checkpoints.add(announcement.checkpoint)
            if announcement.role is Role.WRITER:
                since.append(modified - announcement.began)
    return AtWork(checkpoints=frozenset(checkpoints), writing_since=min(since, default=None))
