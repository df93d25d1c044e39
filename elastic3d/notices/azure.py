"""Scheduled Events of Azure, from its instance metadata (API version 2020-07-01).

One document lists the events of all VMs that belong together; those that name this VM in `Resources` count. An event
is Scheduled, not to begin before `NotBefore`, then Started, and gone when it is over or called off. A Spot VM's
Preempt comes 30 s ahead, the others minutes or days. Azure recommends asking every second. The first request ever
enables the service and may take two minutes.

An event begins when its time comes or, for all VMs that it names, as soon as one of them has acknowledged it. So only
events that name no other VM are acknowledged.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from elastic3d.clock import SYSTEM, Clock
from elastic3d.notices.metadata import ADDRESS, ANSWER_SECONDS, Metadata, MetadataResponse, Unheard
from elastic3d.notices.notice import CloudNotice, NoticeKind
from elastic3d.notices.source import Look

EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_ENVIRONMENT = "/metadata/instance/compute/azEnvironment?api-version=2021-02-01&format=text"
PAUSE = 1.0
FIRST_SECONDS = 130.0

_HEADERS = {"Metadata": "true"}


def sources(base: str = ADDRESS, *, clock: Clock = SYSTEM, pause: float = PAUSE, vm: str = "") -> list[Events]:
    """Return the sources of an Azure VM; `vm` is its name, asked for if not given."""
    return [Events(Metadata(base), clock=clock, pause=pause, vm=vm)]


def answers(metadata: Metadata) -> bool:
    """Return whether the server at hand is Azure's."""
    answer = metadata.ask(_ENVIRONMENT, headers=_HEADERS)
    # AzurePublicCloud, AzureUSGovernmentCloud, AzureChinaCloud...
    return answer.status == 200 and answer.text().startswith("Azure")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    """One event, parsed. `alone`: it names this VM and no other."""

    identity: str
    type: str
    started: bool
    not_before: str
    alone: bool
    text: str


class Events:
    """The document of scheduled events."""

    def __init__(self, metadata: Metadata, *, clock: Clock, pause: float, vm: str) -> None:
        self.name = "azure/metadata/scheduledevents"
        self._metadata, self._clock, self._pause, self._vm = metadata, clock, pause, vm
        self._enabled = False
        self._events: dict[str, _Event] = {}

    def look(self) -> Look:
        """Return the events that name this VM."""
        if not self._vm:
            answer = self._metadata.ask(NAME, headers=_HEADERS).ok()
            if not answer.text():
                raise Unheard(f"{answer.asked} got an empty answer")
            self._vm = answer.text()
        timeout = ANSWER_SECONDS if self._enabled else FIRST_SECONDS
        answer = self._metadata.ask(EVENTS, headers=_HEADERS, timeout=timeout).ok()
        self._events = {event.identity: event for event in _read(answer, self._vm)}
        self._enabled = True
        wall = answer.now(self._clock.wall())
        return Look(
            notices={
                event.identity: CloudNotice(
                    kind=NoticeKind.AZURE, seconds=_left(event, wall), detail=event.text, action=event.type.lower()
                )
                for event in self._events.values()
            },
            pause=self._pause,
        )

    def acknowledge(self, keys: Collection[str]) -> None:
        """Let Azure begin these events before their time: those not begun that name only this VM."""
        events = self._events
        wanted = [k for k in keys if k in events and events[k].alone and not events[k].started]
        if wanted:
            body = json.dumps({"StartRequests": [{"EventId": key} for key in wanted]}).encode()
            headers = {**_HEADERS, "Content-Type": "application/json"}
            self._metadata.ask(EVENTS, method="POST", headers=headers, body=body).ok()

    def close(self) -> None:
        """Abandon a request under way."""
        self._metadata.close()


def _read(answer: MetadataResponse, vm: str) -> list[_Event]:
    document = answer.json()
    listed = document.get("Events")
    if not isinstance(listed, list):
        raise Unheard(f"{answer.asked} was answered without a list of events: {answer.text()[:200]}")
    events = []
    for data in listed:
        event = data if isinstance(data, dict) else {}
        resources = event.get("Resources")
        identity, kind = event.get("EventId"), event.get("EventType")
        if not isinstance(resources, list) or not isinstance(identity, str) or not isinstance(kind, str):
            raise Unheard(f"{answer.asked} lists something that is not an event: {str(data)[:200]}")
        # Azure's names are case-insensitive.
        names = {str(name).lower() for name in resources}
        if vm.lower() in names:
            not_before = event.get("NotBefore")
            events.append(
                _Event(
                    identity=identity,
                    type=kind,
                    started=event.get("EventStatus") == "Started",
                    not_before=not_before if isinstance(not_before, str) else "",
                    alone=len(names) == 1,
                    text=json.dumps(event)[:1000],
                )
            )
    return events


def _left(event: _Event, wall: float) -> float | None:
    """Return the seconds until the event may begin; None if that cannot be read: it is still a notice."""
    if event.started:
        return 0.0
    try:
        return max(0.0, parsedate_to_datetime(event.not_before).timestamp() - wall)
    except ValueError:
        return None
