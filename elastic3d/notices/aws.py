"""Spot interruptions and rebalance recommendations of Amazon EC2, from its instance metadata (IMDSv2).

`spot/instance-action` is absent (404) until two minutes before the instance is stopped or terminated; a hibernation
begins at once. `events/recommendations/rebalance` says only that an interruption has become likely. AWS recommends
asking every 5 s. Each request carries a token, obtained by PUT, that lives for 6 h at most.

The time of an interruption is by the cloud's clock, and so is the `Date` of the answer that has it. The time left is
limited to [0, 120] s.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import UTC, datetime

from elastic3d.clock import SYSTEM, Clock
from elastic3d.notices.metadata import ADDRESS, Metadata, MetadataResponse, Unheard
from elastic3d.notices.notice import CloudNotice, NoticeKind
from elastic3d.notices.source import Look

ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
PAUSE = 5.0
LONGEST_NOTICE = 120.0

_TOKEN_PATH = "/latest/api/token"
_TOKEN = "X-aws-ec2-metadata-token"
_LIFETIME = "X-aws-ec2-metadata-token-ttl-seconds"
_LONGEST_LIFETIME = 21600
_RENEWED_AFTER = 0.9
"""Fraction of a token's life after which it is renewed."""


def sources(base: str = ADDRESS, *, clock: Clock = SYSTEM, pause: float = PAUSE) -> list[Item]:
    """Return the sources of an EC2 instance."""
    return [
        Item(Metadata(base), ACTION, _interruption, clock=clock, pause=pause),
        Item(Metadata(base), REBALANCE, _rebalance, clock=clock, pause=pause),
    ]


def answers(metadata: Metadata) -> bool:
    """Return whether the server at hand speaks IMDSv2."""
    answer = metadata.ask(_TOKEN_PATH, method="PUT", headers={_LIFETIME: "60"})
    return answer.status == 200 and _LIFETIME in answer.headers


class Item:
    """One item of the instance metadata, absent until there is something to report."""

    def __init__(
        self,
        metadata: Metadata,
        path: str,
        read: Callable[[MetadataResponse, float], tuple[str, CloudNotice]],
        *,
        clock: Clock,
        pause: float,
    ) -> None:
        self.name = f"aws{path}"
        self._metadata, self._path, self._read = metadata, path, read
        self._clock, self._pause = clock, pause
        self._token = ""
        self._renew_at = 0.0

    def look(self) -> Look:
        """Return the item's notice, if it is there."""
        answer = self._ask()
        if answer.status == 401:
            # Expired early, or the server forgot its tokens.
            self._token = ""
            answer = self._ask()
        if answer.status == 404:
            return Look(notices={}, pause=self._pause)
        key, notice = self._read(answer.ok(), answer.now(self._clock.wall()))
        return Look(notices={key: notice}, pause=self._pause)

    def acknowledge(self, keys: Collection[str]) -> None:
        """EC2 takes no acknowledgement."""

    def close(self) -> None:
        """Abandon a request under way."""
        self._metadata.close()

    def _ask(self) -> MetadataResponse:
        if not self._token or self._clock.monotonic() >= self._renew_at:
            self._fetch_token()
        return self._metadata.ask(self._path, headers={_TOKEN: self._token})

    def _fetch_token(self) -> None:
        asked_at = self._clock.monotonic()
        answer = self._metadata.ask(_TOKEN_PATH, method="PUT", headers={_LIFETIME: str(_LONGEST_LIFETIME)}).ok()
        lifetime = answer.headers.get(_LIFETIME, "")
        if not (lifetime.isascii() and lifetime.isdigit()):
            raise Unheard(f"{answer.asked} was answered without a lifetime of the token ({lifetime!r})")
        token = answer.text()
        if not (token.isascii() and token.isprintable() and token):
            raise Unheard(f"{answer.asked} was answered by something that is not a token: {token[:200]!r}")
        self._token = token
        self._renew_at = asked_at + _RENEWED_AFTER * int(lifetime)


def _interruption(answer: MetadataResponse, wall: float) -> tuple[str, CloudNotice]:
    data = answer.json()
    action, time = data.get("action"), data.get("time")
    if not isinstance(action, str) or not action:
        raise Unheard(f"{answer.asked} names no action: {answer.text()[:200]}")
    return f"{action} {time}", CloudNotice(
        kind=NoticeKind.AWS,
        seconds=_left(time, wall),
        detail=f"spot/instance-action: {answer.text()[:500]}",
        action=action.lower(),
    )


def _rebalance(answer: MetadataResponse, wall: float) -> tuple[str, CloudNotice]:
    time = answer.json().get("noticeTime")
    # Its time is when it was issued, not when anything ends.
    return f"rebalance {time}", CloudNotice(
        kind=NoticeKind.AWS,
        seconds=None,
        detail=f"recommendations/rebalance: {answer.text()[:500]}",
        action="rebalance",
    )


def _left(time: object, wall: float) -> float | None:
    """Return the seconds until `time`, as 2017-09-18T08:22:00Z; None if it cannot be read: it is still a notice."""
    try:
        at = datetime.fromisoformat(time) if isinstance(time, str) else None
    except ValueError:
        at = None
    if at is None:
        return None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return min(max(at.timestamp() - wall, 0.0), LONGEST_NOTICE)
