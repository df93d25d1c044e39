"""What a watcher listens to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from elastic3d.notices.notice import CloudNotice


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one look at a source found: the notices that stand now, by a key of their own; when to look again."""

    notices: Mapping[str, CloudNotice]
    pause: float


class NoticeSource(Protocol):
    """One thing a cloud says, asked for by one thread."""

    name: str

    def look(self) -> Look:
        """Return what stands now, maybe after having waited for a change; Unheard where no answer can be had."""
        ...

    def acknowledge(self, keys: Collection[str]) -> None:
        """Tell the cloud that the notices under `keys` need not wait for this machine any more; Unheard as above.

        Does nothing where the cloud takes no such word.
        """
        ...

    def close(self) -> None:
        """Let a `look` under way end at once, with Unheard; from any thread."""
        ...
