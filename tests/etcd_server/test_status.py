"""What follows from what the members of an etcd say."""

from __future__ import annotations

import dataclasses

import pytest

from elastic3d.etcd import MemberStatus
from elastic3d.etcd_server.status import ServerState, ServerStatus, judge, of_member

SAID = MemberStatus(
    cluster=0xABC,
    member=0x1,
    version="3.5.21",
    leads=False,
    has_leader=True,
    learner=False,
    size=1 << 20,
    in_use=1 << 19,
    quota=0,
    errors=(),
)
FULL, UNLIKE = "memberID:1 alarm:NOSPACE ", "memberID:1 alarm:CORRUPT "
AWAY = ServerStatus(endpoint="http://e3:2379", state=ServerState.AWAY, problem="no answer")


def member(number: int, **said: object) -> ServerStatus:
    return of_member(f"http://e{number}:2379", dataclasses.replace(SAID, member=number, **said))  # type: ignore[arg-type]


def test_a_member_is_what_it_says() -> None:
    """Alarms are problems."""
    assert member(1).state is ServerState.FOLLOWS
    assert member(1, leads=True).state is ServerState.LEADS
    assert member(1, has_leader=False).state is ServerState.WAITS
    assert member(1, learner=True).state is ServerState.LEARNS
    assert member(1, errors=(FULL,)).problem == FULL
    assert member(26).member == "1a"


def test_three_members_that_are_well_need_nothing() -> None:
    """One leads, the others follow."""
    seen = judge((member(1, leads=True), member(2), member(3)), 3)
    assert seen.serving
    assert seen.warnings == ()


@pytest.mark.parametrize(
    ("members", "serving", "warning"),
    [
        ((member(1, leads=True), member(2), AWAY), True, "if one more member were lost"),
        ((member(1, has_leader=False), AWAY, AWAY), False, "takes no writes"),
        ((member(1), member(2), AWAY), True, "if one more member were lost"),
        ((AWAY,), False, "takes no writes"),
        ((member(1, leads=True), AWAY, AWAY), True, "only 1 of its 3 members answer here"),
        ((member(1, leads=True), member(2)), True, "2 members stand no more losses than 1 would: run an odd number"),
        ((member(1, leads=True), member(2, cluster=7), member(3)), False, "different clusters"),
        ((member(1, leads=True, version="3.5.2"), member(2), member(3)), True, r"3\.5\.2 loses data"),
        ((member(1, leads=True, in_use=2 << 30), member(2), member(3)), True, "half of its database"),
        ((member(1, leads=True, errors=(FULL,)), member(2, errors=(FULL,)), AWAY), False, "its database is full"),
        ((member(1, leads=True, errors=(UNLIKE,)), member(2), member(3)), False, "other data than the rest"),
    ],
)
def test_what_is_wrong_is_said(members: tuple[ServerStatus, ...], serving: bool, warning: str) -> None:
    """And whether it takes writes all the same."""
    import re

    seen = judge(members, len(members))
    assert seen.serving is serving
    assert [one for one in seen.warnings if re.search(warning, one)], seen.warnings


def test_the_space_in_use_is_judged_by_the_quota_that_a_member_has() -> None:
    """By etcd's own where it does not say."""
    three = {
        quota: (member(1, leads=True, in_use=3 << 30, quota=quota), member(2), member(3)) for quota in (0, 8 << 30)
    }
    assert "half of its database" in " ".join(judge(three[0], 3).warnings)
    assert judge(three[8 << 30], 3).warnings == ()
    small = (member(1, leads=True, in_use=60 << 20, quota=100 << 20), member(2), member(3))
    assert "half of its database" in " ".join(judge(small, 3).warnings)


def test_one_endpoint_is_enough_though_another_member_leads() -> None:
    """A service's name, or one host's, stands for the cluster: its member follows, so that somebody leads."""
    seen = judge((member(2),), 0)
    assert seen.serving
    assert [one for one in seen.warnings if "name all of them" in one], "whether it stands a loss is not known"


def test_members_without_a_vote_make_no_majority() -> None:
    """Of two with a vote and a learner, the loss of one stops all writes."""
    seen = judge((member(1, leads=True), member(2), member(3, learner=True)), 2)
    assert seen.serving
    assert [one for one in seen.warnings if "2 members stand no more losses" in one]


def test_a_version_that_nobody_can_read_is_none_of_the_list() -> None:
    """Such as a build of one's own."""
    assert judge((member(1, leads=True, version="3.5.1+git"),), 1).warnings != ()
    assert judge((member(1, leads=True, version="main"),), 1).warnings == ()
