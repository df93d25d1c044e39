"""A source of notices, to which a watcher listens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from elastic3d.notices.notice import CloudNotice


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The result of one look at a source: the notices that hold now, by key, and the seconds until the next look."""

    notices: Mapping[str, CloudNotice]
    pause: float


class NoticeSource(Protocol):
    """One item that a cloud publishes, read by one thread."""

    name: str

    def look(self) -> Look:
        """Return the notices that hold now, maybe after waiting for a change; Unheard if there is no answer."""
        ...

    def acknowledge(self, keys: Collection[str]) -> None:
        """Tell the cloud that the notices under `keys` need not wait for this machine any more; Unheard as above.

        Does nothing if the cloud takes no such message.
        """
        ...

    def close(self) -> None:
        """Let a `look` under way end at once, with Unheard; from any thread."""
        ...
