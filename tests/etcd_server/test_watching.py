"""When a member is started again, and what people are told of its end."""

from __future__ import annotations

import json

import pytest

from elastic3d.etcd_server.reasons import MOST, reason
from elastic3d.etcd_server.restarts import FIRST, LONGEST, STEADY, next_restart


def test_a_member_that_ends_again_and_again_is_started_ever_more_rarely() -> None:
    """At once the first time, then after twice as long, up to a limit; a minute of life makes it the first again."""
    now, times, waits = 0.0, 0, []
    for _ in range(12):
        due = next_restart(times, started=now, now=now + 1)
        waits.append(due.at - now - 1)
        now, times = due.at, due.times
    assert waits[:4] == [FIRST, 2 * FIRST, 4 * FIRST, 8 * FIRST]
    assert waits[-1] == LONGEST
    again = next_restart(times, started=now, now=now + STEADY)
    assert (again.times, again.at) == (1, now + STEADY + FIRST)
    assert next_restart(10**9, started=0.0, now=1.0).at == 1.0 + LONGEST


def zap(message: str, error: str = "") -> str:
    return json.dumps({"level": "fatal", "msg": message, "error": error}) + "\n"


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (zap("failed to start", "write /d/m0/member/wal: no space left on device"), "disk with its data is full"),
        (zap("discovery failed", "listen tcp 127.0.0.1:2379: bind: address already in use"), "another process"),
        (zap("x", "member 8e9 has already been bootstrapped"), "its data are gone"),
        (zap("request cluster ID mismatch"), "another cluster"),
        (zap("x", "error validating peerURLs: member count is unequal"), "other members"),
        (zap("x", "open /d: permission denied"), "may not use its folder"),
        (zap("x", "walpb: crc mismatch"), "damaged"),
        (zap("x", "remote error: tls: bad certificate"), "certificates"),
    ],
)
def test_known_ends_say_what_to_do(log: str, why: str) -> None:
    """Among whatever else is in the log."""
    assert why in reason(zap("something harmless") + log + zap("closing"))


def test_of_an_unknown_end_the_last_line_is_shown() -> None:
    """What it says, not its JSON; nothing that a terminal would obey; and nothing for an empty log."""
    assert reason("") == reason("\n\n") == ""
    assert reason(zap("all well") + zap("gone", "for no reason")) == "it said last: gone: for no reason"
    assert reason("panic: \x1b[31mred\n") == "it said last: panic: ?[31mred"
    assert reason('{"half": \n') == 'it said last: {"half":'
    assert reason("[]\n7\n") == "it said last: 7"
    assert len(reason("x" * 10_000)) < MOST + 20
