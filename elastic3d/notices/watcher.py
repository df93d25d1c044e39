"""Threads that listen to sources and report each notice once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import tenacity

from elastic3d import threads
from elastic3d.clock import SYSTEM, Clock
from elastic3d.log import process_log
from elastic3d.notices.metadata import Unheard
from elastic3d.notices.notice import ADVICE, CloudNotice
from elastic3d.notices.source import Look, NoticeSource

LONGEST_WAIT = 5.0
"""Most seconds between two tries while a source is silent; a notice of 30 s must not be over when it is back."""


class Watcher:
    """Listens to `sources`, a thread for each, until it is closed.

    tell: called once for each notice after which this machine is gone. withdrawn: called when a reported notice no
    longer holds, because the cloud called it off or the event is over; never because the cloud fell silent. Both are
    called on the watcher's threads and must neither block nor raise.

    Other notices (a freeze, a live migration, a recommendation) are only logged; with `rebalance`, rebalance
    recommendations are reported too. A source that does not answer is asked for ever, and its outage is logged once.
    """

    def __init__(
        self,
        sources: Sequence[NoticeSource],
        tell: Callable[[CloudNotice], None],
        *,
        withdrawn: Callable[[CloudNotice], None] | None = None,
        rebalance: bool = False,
        clock: Clock = SYSTEM,
    ) -> None:
        self._sources, self._tell, self._withdrawn, self._clock = tuple(sources), tell, withdrawn, clock
        self._only_logged = ADVICE - {"rebalance"} if rebalance else ADVICE
        self._closed = threading.Event()
        self._heard: list[dict[str, CloudNotice]] = [{} for _ in self._sources]
        self._threads = [
            threads.start(self._run, *pair, name=f"elastic3d-notices-{number}", edge=threads.Edge.AGAIN)
            for number, pair in enumerate(zip(self._sources, self._heard, strict=True))
        ]

    def acknowledge(self) -> bool:
        """Tell the cloud that this node has left, so that it need not wait: nothing of value is here any more.

        Call it before `close`. As a rule it is answered at once; it blocks for some 15 s if the server hangs. Returns
        False if the cloud could not be told, which is logged and harmless: it then waits for the time it had set.
        """
        acknowledged = True
        retry = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(Unheard),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=1.0),
            stop=tenacity.stop_after_attempt(3),
            sleep=self._clock.sleep,
            reraise=True,
        )
        for source, heard in zip(self._sources, self._heard, strict=True):
            keys = [key for key, notice in heard.copy().items() if notice.action not in self._only_logged]
            try:
                retry(source.acknowledge, keys)
            except Unheard as error:
                process_log().emit("notices.unacknowledged", source=source.name, error=str(error))
                acknowledged = False
        return acknowledged

    def close(self) -> None:
        """Stop listening; nothing is reported after this returns. May be called from `tell`."""
        self._closed.set()
        for source in self._sources:
            source.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5)

    def _run(self, source: NoticeSource, heard: dict[str, CloudNotice]) -> None:
        while not self._closed.is_set():
            look = self._look(source)
            if look is None:
                return
            self._take(look, heard)
            self._closed.wait(look.pause)

    def _look(self, source: NoticeSource) -> Look | None:
        """Return what the source says, however long it takes to answer; None once closed."""
        silent_since: list[float] = []

        def note(state: tenacity.RetryCallState) -> None:
            if not silent_since and not self._closed.is_set():
                silent_since.append(self._clock.monotonic())
                error = state.outcome.exception() if state.outcome else None
                process_log().emit("notices.lost", source=source.name, error=str(error))

        retry = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(Unheard),
            wait=tenacity.wait_exponential(multiplier=0.1, max=LONGEST_WAIT) + tenacity.wait_random(0, 0.1),
            stop=tenacity.stop_when_event_set(self._closed),
            sleep=tenacity.sleep_using_event(self._closed),
            before_sleep=note,
        )
        try:
            look: Look = retry(source.look)
        except tenacity.RetryError:
            return None
        if silent_since:
            process_log().emit("notices.back", source=source.name, seconds=self._clock.monotonic() - silent_since[0])
        return look

    def _take(self, look: Look, heard: dict[str, CloudNotice]) -> None:
        for key in heard.keys() - look.notices.keys():
            notice = heard.pop(key)
            process_log().emit("notice.withdrawn", kind=notice.kind.value, action=notice.action, detail=notice.detail)
            if notice.action not in self._only_logged and self._withdrawn is not None and not self._closed.is_set():
                self._withdrawn(notice)
        for key, notice in look.notices.items():
            if key in heard or self._closed.is_set():
                continue
            heard[key] = notice
            reported = notice.action not in self._only_logged
            process_log().emit(
                "notice.heard",
                kind=notice.kind.value,
                action=notice.action,
                seconds=notice.seconds,
                told=reported,
                detail=notice.detail,
            )
            if reported:
                self._tell(notice)
