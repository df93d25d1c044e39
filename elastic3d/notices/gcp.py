"""Preemption and host maintenance of Google Compute Engine, from its metadata server.

`instance/preempted` turns from FALSE to TRUE when a Spot VM is preempted, 30 s before it is stopped.
`instance/maintenance-event` is NONE, MIGRATE_ON_HOST_MAINTENANCE or TERMINATE_ON_HOST_MAINTENANCE: 60 s ahead, an hour
for machines with GPUs, which cannot be found out from here; the shorter is assumed. Google warns only VMs that query
this value.

Both are read by a hanging GET: the server answers when the value's ETag differs from `last_etag`, or after
`timeout_sec` with the present value, so that no change falls between two requests. The header `Metadata-Flavor: Google`
in both directions tells that server from any other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from urllib.parse import quote

from elastic3d.clock import SYSTEM, Clock
from elastic3d.notices.metadata import ADDRESS, ANSWER_SECONDS, Metadata, MetadataResponse, Unheard
from elastic3d.notices.notice import CloudNotice, NoticeKind
from elastic3d.notices.source import Look

PREEMPTED = "/computeMetadata/v1/instance/preempted"
MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"
HANG = 60
PAUSE = 1.0
"""Fewest seconds from one request to the next, whatever the server does."""

_FLAVOR = "Metadata-Flavor"
_GOOGLE = {_FLAVOR: "Google"}

_MEANINGS: Mapping[str, Mapping[str, tuple[str, float | None] | None]] = {
    PREEMPTED: {"FALSE": None, "TRUE": ("preempt", 30.0)},
    MAINTENANCE: {
        "NONE": None,
        "MIGRATE_ON_HOST_MAINTENANCE": ("migrate", 60.0),
        "TERMINATE_ON_HOST_MAINTENANCE": ("terminate", 60.0),
    },
}
"""Action and shortest time of each value; None for values that mean that all is well."""


def sources(
    base: str = ADDRESS, *, clock: Clock = SYSTEM, pause: float = PAUSE, hang: int = HANG
) -> list[MetadataEntry]:
    """Return the sources of a Compute Engine VM."""
    return [
        MetadataEntry(Metadata(base), path, clock=clock, pause=pause, hang=hang) for path in (PREEMPTED, MAINTENANCE)
    ]


def answers(metadata: Metadata) -> bool:
    """Return whether the server at hand is Google's."""
    answer = metadata.ask(PREEMPTED, headers=_GOOGLE)
    return answer.status == 200 and answer.headers.get(_FLAVOR) == "Google"


class MetadataEntry:
    """One entry of the metadata server."""

    def __init__(self, metadata: Metadata, path: str, *, clock: Clock, pause: float, hang: int) -> None:
        self.name = f"gcp{path}"
        self._metadata, self._path = metadata, path
        self._clock, self._pause, self._hang = clock, pause, hang
        self._etag = ""

    def look(self) -> Look:
        """Return the entry's notice: the first time at once, then once it has changed or `hang` seconds have passed."""
        began = self._clock.monotonic()
        query = ""
        if self._etag:
            query = f"?wait_for_change=true&timeout_sec={self._hang}&last_etag={quote(self._etag, safe='')}"
        answer = self._metadata.ask(
            self._path + query, headers=_GOOGLE, timeout=ANSWER_SECONDS + (self._hang if query else 0)
        ).ok()
        if answer.headers.get(_FLAVOR) != "Google":
            raise Unheard(f"{answer.asked} was answered by another server than Google's")
        notices = _read(self._path, answer)
        # Without an ETag changes in between can be missed: the value is polled then.
        self._etag = answer.headers.get("ETag", "")
        return Look(notices=notices, pause=max(0.0, self._pause - (self._clock.monotonic() - began)))

    def acknowledge(self, keys: Collection[str]) -> None:
        """Compute Engine takes no acknowledgement."""

    def close(self) -> None:
        """Abandon a request under way."""
        self._metadata.close()


def _read(path: str, answer: MetadataResponse) -> dict[str, CloudNotice]:
    value = answer.text()
    if not value:
        raise Unheard(f"{answer.asked} got an empty answer")
    # An unknown value is for a person to read, not a reason to leave.
    meaning = _MEANINGS[path].get(value, ("maintenance", None))
    if meaning is None:
        return {}
    action, seconds = meaning
    detail = f"{path.rpartition('/')[2]}: {value[:500]}"
    return {value: CloudNotice(kind=NoticeKind.GCP, seconds=seconds, detail=detail, action=action)}
