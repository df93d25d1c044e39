"""Who is cut off, derived from who does not hear whom: properties of the ring."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic3d.membership.driver.links import FRESH, INTERVAL
from elastic3d.membership.machine.partition import REACH, cuts_of, made, suspects
from elastic3d.membership.machine.suspicions import PROVEN

IDS = [f"n{at:02d}" for at in range(12)]


def lost(
    size: int,
    silent: set[tuple[str, str]],
    active: set[str],
    judge: str,
    fresh: frozenset[tuple[str, str]] = frozenset(),
) -> dict[str, bool]:
    """Return the members that the judge's side has lost, and whether that is certain."""
    ids = IDS[:size]
    index = {id: at for at, id in enumerate(ids)}
    suspected = suspects(ids, cuts_of(ids, index, silent), dict.fromkeys(active, 0), judge, fresh)
    return {one.id: one.sure for one in suspected}


def neighbours(size: int, at: int) -> list[str]:
    return [IDS[(at + step) % size] for step in (-2, -1, 1, 2)]


@given(st.integers(3, 12), st.data())
def test_one_report_isolates_only_its_author(size: int, data: st.DataObject) -> None:
    """Whomever a member calls silent, nobody but itself is lost because of it."""
    liar = data.draw(st.sampled_from(IDS[:size]))
    said = {(liar, other) for other in data.draw(st.sets(st.sampled_from(IDS[:size])))}
    judge = data.draw(st.sampled_from([id for id in IDS[:size] if id != liar]))
    assert set(lost(size, said, set(IDS[:size]), judge)) <= {liar}


@given(st.integers(3, 12), st.data())
def test_a_silent_node_is_found_by_all_others(size: int, data: st.DataObject) -> None:
    """If none of its neighbours hears it, each other member finds exactly it, without asking anybody."""
    at = data.draw(st.integers(0, size - 1))
    said = {(other, IDS[at]) for other in neighbours(size, at) if other != IDS[at]}
    for judge in IDS[:size]:
        if judge != IDS[at]:
            assert lost(size, said, set(IDS[:size]), judge) == {IDS[at]: True}
    assert lost(size, said, set(IDS[:size]), IDS[at]) == {}


@given(st.integers(2, 12), st.sets(st.tuples(st.sampled_from(IDS), st.sampled_from(IDS)), max_size=60), st.data())
def test_two_sides_are_never_sure_of_each_other(size: int, said: set[tuple[str, str]], data: st.DataObject) -> None:
    """However the ring is cut, at most one of two sides declares the other dead, and it has no fewer active members."""
    ids = IDS[:size]
    active = data.draw(st.sets(st.sampled_from(ids), min_size=1))
    sure = {judge: {id for id, sure in lost(size, said, active, judge).items() if sure} for judge in ids}
    for judge in ids:
        assert judge not in sure[judge]
        assert not any(judge in sure[other] for other in sure[judge])
    judges = [judge for judge in ids if sure[judge]]
    assert not judges or len(active & set(judges)) > 0


@given(st.integers(2, 12), st.sets(st.tuples(st.sampled_from(IDS), st.sampled_from(IDS))))
def test_only_connections_of_the_ring_count_as_cut(size: int, said: set[tuple[str, str]]) -> None:
    """Reports about nodes that are no neighbours mean nothing."""
    ids = IDS[:size]
    index = {id: at for at, id in enumerate(ids)}
    for one, other in cuts_of(ids, index, said):
        apart = abs(index[one] - index[other])
        assert 0 < min(apart, size - apart) <= REACH


def test_two_equal_halves_are_sure_of_nothing() -> None:
    """Neither can know from the ring which is at fault; each can ask its neighbours there."""
    halves = {(one, other) for one in IDS[:3] for other in IDS[3:6]}
    assert lost(6, halves, set(IDS[:6]), IDS[0]) == dict.fromkeys(IDS[3:6], False)
    assert lost(6, halves, set(IDS[:6]), IDS[5]) == dict.fromkeys(IDS[:3], False)


def test_spares_do_not_outvote_active_members() -> None:
    """Only active members count: a side full of spares is the one that is lost."""
    said = {(one, other) for one in IDS[:3] for other in IDS[3:8]}
    assert lost(8, said, set(IDS[:3]), IDS[0]) == dict.fromkeys(IDS[3:8], True)
    assert lost(8, said, set(IDS[:3]), IDS[4]) == {}


SAID = st.sets(st.tuples(st.sampled_from(IDS), st.sampled_from(IDS)), max_size=60)


@given(st.integers(2, 12), SAID, SAID, st.data())
def test_a_sure_verdict_holds_for_any_missing_report(
    size: int, said: set[tuple[str, str]], young: set[tuple[str, str]], data: st.DataObject
) -> None:
    """Even if any young connections are cut: its side is still main, and the other side is the lost one."""
    ids = IDS[:size]
    active = data.draw(st.sets(st.sampled_from(ids), min_size=1))
    fresh = frozenset(pair for pair in young if set(pair) <= set(ids))
    cut = data.draw(st.sets(st.sampled_from(sorted(fresh)))) if fresh else set()
    for judge in ids:
        sure = {id for id, sure in lost(size, said, active, judge, fresh).items() if sure}
        known = lost(size, said | cut, active, judge)
        assert sure <= {id for id, sure in lost(size, said, active, judge).items() if sure}
        assert sure <= set(known)
        assert not any(judge in lost(size, said | cut, active, id) for id in sure)


def test_isolated_neighbours_are_no_majority() -> None:
    """Three members that nobody hears became neighbours a moment ago: they are no majority of five."""
    heard, cut = IDS[:2], IDS[2:5]
    said = {(one, other) for one in heard for other in cut} | {(other, one) for one in heard for other in cut}
    young = frozenset((one, other) for one in cut for other in cut)
    assert lost(5, said, set(IDS[:5]), cut[0]) == dict.fromkeys(heard, True)
    assert not any(lost(5, said, set(IDS[:5]), cut[0], young).values())


@given(st.lists(st.sampled_from(IDS), unique=True, min_size=1), st.lists(st.sampled_from(IDS), unique=True))
def test_new_connections_of_a_ring_are_those_it_did_not_have(now: list[str], before: list[str]) -> None:
    """The same ring has no new connections, a first one only new ones."""
    index = {id: at for at, id in enumerate(before)}
    old = cuts_of(before, index, {(one, other) for one in before for other in before})
    all_now = cuts_of(now, {id: at for at, id in enumerate(now)}, {(one, other) for one in now for other in now})
    fresh = made(now, index)
    both_ways = fresh | {(other, one) for one, other in fresh}
    assert both_ways == all_now - old
    assert made(before, index) == frozenset()


def test_a_connection_counts_only_once_its_silence_would_be_known() -> None:
    """The first beat may take its time, and so may a report."""
    assert PROVEN >= FRESH + INTERVAL
