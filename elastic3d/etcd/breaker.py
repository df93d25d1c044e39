"""Which endpoint to ask: the one that works, until it does not.

Blind round robin pays one deadline for every turn of a stopped member. Here a member that failed is set aside for a
while (twice as long after each failure in a row); the one that answered last is asked first. The breaker only orders:
even with every member set aside all are still tried, the one that has rested longest first, to find out when etcd is
back.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_REST = 0.5
LONGEST_REST = 8.0

ELECTION = 1.5
"""Seconds allowed for an election: a member without a leader is asked before those that do not answer, and it is not
reported yet that etcd no longer serves."""


@dataclass(slots=True)
class _Member:
    failures: int = 0
    rested: float = 0.0
    electing: float | None = None


class Breaker:
    """Order over `count` endpoints, numbered from 0; `preferred` is asked first. Not thread-safe; takes `now`."""

    def __init__(self, count: int, *, preferred: int = 0) -> None:
        assert 0 <= preferred < count
        self._members = [_Member() for _ in range(count)]
        self._preferred = preferred

    def order(self, now: float) -> list[int]:
        """Return all endpoints, best first: working, without a leader, rested, resting."""

        def rank(index: int) -> tuple[int, float, int]:
            member = self._members[index]
            turn = (index - self._preferred) % len(self._members)
            if member.failures == 0:
                return 0, 0.0, turn
            if member.electing is not None and now < member.electing + ELECTION:
                return 1, member.rested, turn
            return (2 if member.rested <= now else 3), member.rested, turn

        return sorted(range(len(self._members)), key=rank)

    def alone(self, index: int) -> bool:
        """Return whether no endpoint but `index` is known to work."""
        return all(member.failures for other, member in enumerate(self._members) if other != index)

    def succeeded(self, index: int) -> None:
        """Take note of an answer: `index` works and is preferred from now on, unless the preferred one works too."""
        self._members[index].failures = 0
        self._members[index].electing = None
        if self._members[self._preferred].failures:
            self._preferred = index

    def failed(self, index: int, now: float, *, electing: bool = False) -> None:
        """Take note of a failure: `index` rests, longer each time in a row. electing: it answers, without a leader."""
        member = self._members[index]
        if not electing:
            member.electing = None
        elif member.electing is None:
            member.electing = now
        rest = min(FIRST_REST * 2**member.failures, LONGEST_REST)
        # Many threads may fail on the same outage: only a failure after a rest counts as another one.
        if member.failures == 0 or now >= member.rested:
            member.failures = min(member.failures + 1, 8)
            member.rested = now + rest
