"""When a member is started again, and what people are told of its end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from elastic3d.errors import ConfigurationError
from elastic3d.etcd_server.cluster import new_cluster
from elastic3d.etcd_server.reasons import MOST, reason
from elastic3d.etcd_server.restarts import FIRST, LONGEST, STEADY, next_restart
from elastic3d.etcd_server.supervisor import Supervisor


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


def zap(message: str, error: str = "", level: str = "fatal") -> str:
    return json.dumps({"level": level, "msg": message, "error": error}) + "\n"


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


def test_what_a_member_lived_on_with_is_no_reason() -> None:
    """A client without a certificate, weeks ago, says nothing of the disk that is full now, or of an unknown end."""
    before = zap("rejected connection", "remote error: tls: bad certificate", "warn") + "WARNING: x509: unknown\n"
    assert "disk with its data is full" in reason(before + zap("failed to commit", "no space left on device"))
    assert reason(before + zap("gone")) == "it said last: gone"


LONG = """#!{python}
import sys
sys.stdout.write("apply request took too long\\n" * 100_000)
sys.stdout.write("panic: write /data/wal: no space left on device\\n")
sys.exit(2)
"""


def test_the_end_of_a_long_log_is_looked_at(tmp_path: Path) -> None:
    """A member that was slow for days has said more than is read."""
    binary = tmp_path / "etcd"
    binary.write_text(LONG.format(python=sys.executable))
    binary.chmod(0o755)
    cluster = new_cluster(members=1, hosts=(), here="", port=None, tls=False)
    supervisor = Supervisor(
        cluster=cluster, folder=tmp_path, binary=binary, version=(3, 5, 21), say=print, over=lambda: False
    )
    try:
        with pytest.raises(ConfigurationError, match="m0 does not start: the disk with its data is full"):
            supervisor.start()
    finally:
        supervisor.close()


def test_of_an_unknown_end_the_last_line_is_shown() -> None:
    """What it says, not its JSON; nothing that a terminal would obey; and nothing for an empty log."""
    assert reason("") == reason("\n\n") == ""
    assert reason(zap("all well") + zap("gone", "for no reason")) == "it said last: gone: for no reason"
    assert reason("panic: \x1b[31mred\n") == "it said last: panic: ?[31mred"
    assert reason('{"half": \n') == 'it said last: {"half":'
    assert reason("[]\n7\n") == "it said last: 7"
    assert len(reason("x" * 10_000)) < MOST + 20
