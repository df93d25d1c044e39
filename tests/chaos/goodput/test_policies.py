"""All policies over small traces, with the production membership machine and planner."""

from __future__ import annotations

import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from chaos.goodput.compare import Contender, compare
from chaos.goodput.ledger import Account, Spent
from chaos.goodput.production import Production
from chaos.goodput.young_daly import optimum
from elastic3d.errors import MembershipError
from tests.chaos.goodput.jobs import free, people, planned, with_costs

ROWS = st.lists(st.tuples(st.floats(1.0, 200.0), st.integers(0, 4)), min_size=1, max_size=6)


@settings(max_examples=8, deadline=None)
@example(rows=[(1.0, 0), (1.0, 3), (9.0, 1), (120.0, 0)], announced=0.5, seed=279)
# A node comes back with the state of steps that were lost without it.
@example(rows=[(1.0, 4), (199.99999999999997, 2), (21.0, 4), (90.0, 0), (1.0, 1)], announced=0.5, seed=1)
@given(rows=ROWS, announced=st.sampled_from([0.0, 0.5, 1.0]), seed=st.integers(0, 1000))
def test_each_node_second_has_one_category_and_none_beats_the_oracle(
    rows: list[tuple[float, int]], announced: float, seed: int
) -> None:
    """Whatever the trace: categories add up to what is held, none is negative, and the oracle is a bound for all.

    But for traces at which the job ends since all who are left were told to leave: they are refused, as the example is.
    """
    at, changes = 0.0, [(0.0, 3)]
    for gap, nodes in rows:
        at += gap
        changes.append((at, nodes))
    crowd = people(at + 100.0, *changes, announced=announced, seed=seed)
    try:
        comparison = compare(crowd, planned(), list(Contender))
    except MembershipError as error:
        if not announced or "had been told to leave" not in str(error):
            raise
        reject()
    held = sum(nodes * (until - since) for since, until, nodes in crowd.counts())
    for account in (*comparison.accounts, comparison.oracle):
        assert sum(account.node_seconds.values()) == pytest.approx(held)
        assert account.held == pytest.approx(held)
        assert min(account.node_seconds.values()) >= 0.0
        assert account.steps <= comparison.oracle.steps + 1e-9, account.policy
        assert account.training <= account.possible + 1e-9


def one(
    contender: Contender, *rows: tuple[float, int], end: float = 1200.0, announced: float = 0.0, seed: int = 1
) -> Account:
    """Return a policy's account of a trace."""
    (account,) = compare(people(end, *rows, announced=announced, seed=seed), planned(), [contender]).accounts
    return account


def test_nothing_is_lost_where_nothing_happens_and_nothing_costs() -> None:
    """With nodes that stay and costs of nothing all but the last step's part counts: the bound can be reached."""
    crowd = people(3600.0, (0.0, 3))
    contenders = [Contender.FAST, Contender.RESTART]
    comparison = compare(crowd, with_costs(free()), contenders)
    for account in comparison.accounts:
        # elastic3d waits three seconds for more nodes before it begins.
        assert comparison.goodput(account) > 0.995
        assert account.node_seconds[Spent.RECOVERY] == 0.0


def test_a_sudden_loss_costs_a_step_and_an_announced_one_none() -> None:
    """Survivors hold the snapshots of a node that is gone; one that is told to leave leaves at a boundary."""
    sudden = one(Contender.FAST, (0.0, 4), (600.0, 3))
    announced = one(Contender.FAST, (0.0, 4), (600.0, 3), announced=1.0)
    lost, kept = sudden.node_seconds, announced.node_seconds
    assert 0.0 < lost[Spent.REPEATED] < 4 * 3 * 8.0
    assert 30.0 < lost[Spent.RECOVERY] < 100.0
    assert lost[Spent.LEAVING] == 0.0
    # What is left is the step that the end of the trace cuts short.
    assert kept[Spent.REPEATED] < 3 * 10.0
    assert kept[Spent.RECOVERY] == 0.0
    assert kept[Spent.CHANGE] > 0.0
    # It is notified two minutes before, and is out of the job a step later.
    assert 90.0 < kept[Spent.LEAVING] < 120.0


def test_a_loss_that_memory_does_not_survive_goes_back_to_a_checkpoint() -> None:
    """Three of four nodes at once take both copies of some of the state along: minutes are lost, and not all."""
    account = one(Contender.FAST, (0.0, 4), (900.0, 1))
    steps = [steps for at, steps in account.curve if at >= 900.0]
    before = max(steps for at, steps in account.curve if at < 900.0)
    assert 0.6 * before < min(steps) < before - 1
    assert account.steps > min(steps)


def test_a_restart_repeats_what_was_made_since_the_checkpoint() -> None:
    """A job of four that loses one restarts, and loses more than elastic3d, whose peers' memory has the last step."""
    restart = one(Contender.RESTART, (0.0, 4), (600.0, 3)).node_seconds
    elastic = one(Contender.FAST, (0.0, 4), (600.0, 3)).node_seconds
    assert restart[Spent.REPEATED] > elastic[Spent.REPEATED]
    assert restart[Spent.SAVING] > 0.0
    assert restart[Spent.RECOVERY] > elastic[Spent.RECOVERY]


def test_replicas_go_on_without_the_one_that_is_lost() -> None:
    """A node is a replica of this model: the others wait for new communicators only, and repeat a part of one step."""
    spent = one(Contender.REPLICAS, (0.0, 4), (600.0, 3), (800.0, 4)).node_seconds
    costs = planned().job.recovery
    assert spent[Spent.RECOVERY] == pytest.approx(3 * (costs.replica_recovery + costs.communicators))
    assert spent[Spent.CHANGE] == pytest.approx(4 * (costs.replica_pause + costs.communicators))


@pytest.mark.parametrize(
    ("model", "rows", "seed", "least"),
    [
        # Two of three nodes are a replica, the third one is no other: one of the two is lost.
        ("llama-70b", ((0.0, 3), (18_000.0, 2)), 1, 0.5),
        # The only replica is lost before another one has come.
        ("llama-7b", ((0.0, 1), (18_000.0, 2), (18_030.0, 1)), 3, 0.9),
    ],
)
def test_replicas_save_where_all_are_lost_though_enough_nodes_are_held(
    model: str, rows: tuple[tuple[float, int], ...], seed: int, least: float
) -> None:
    """State is lost with the last living replica, however many nodes are held: the job goes on from a checkpoint."""
    comparison = compare(people(21_600.0, *rows, seed=seed), planned(model), [Contender.REPLICAS])
    (account,) = comparison.accounts
    assert account.node_seconds[Spent.SAVING] > 0.0
    assert comparison.goodput(account) > least


def test_replicas_save_nothing_where_one_always_lives() -> None:
    """A loss that others survive is none of all state."""
    assert one(Contender.REPLICAS, (0.0, 4), (600.0, 3), (800.0, 4)).node_seconds[Spent.SAVING] == 0.0


def test_a_replica_that_was_about_to_join_the_last_one_goes_on_by_itself() -> None:
    """It was ready when that one was lost in the middle of a step, and would have waited for its end for ever."""
    account = one(Contender.REPLICAS, (0.0, 1), (1000.0, 2), (1064.0, 1), seed=3, end=10_000.0)
    assert account.steps > 250


def test_a_job_that_ends_before_its_trace_is_no_result() -> None:
    """It is said, and nothing is counted as if the job had gone on."""
    job = planned().job
    planned().prepare(2, lambda what, share: None)
    production = Production(
        "elastic3d", people(400.0, (0.0, 2)), planned().fast, job.recovery, seed=1, notice=120.0, enough=1
    )
    production.loop.at(200.0, production.world.trainers.finish)
    with pytest.raises(MembershipError, match="ended before its trace"):
        production.play()


def test_a_checkpoint_is_vetted_by_audits_since_its_step_was_made() -> None:
    """Not since its upload ended, which takes many steps here."""
    planned().prepare(3, lambda what, share: None)
    job = planned().job
    crowd = people(1200.0, (0.0, 3), (700.0, 2))
    production = Production("elastic3d", crowd, planned().fast, job.recovery, seed=1, notice=120.0, enough=1)
    production.play()
    assert len(production.world.checkpoints.committed) > 10
    assert production.world.checkpoints.violations == []


def test_a_long_trace_takes_no_memory_for_what_members_have_written() -> None:
    """Of an hour and of two as much of etcd's history is kept: a trace of weeks would take gigabytes else."""
    planned().prepare(2, lambda what, share: None)
    kept = []
    for hours in (1.0, 2.0):
        crowd = people(hours * 3600.0, (0.0, 2))
        production = Production("elastic3d", crowd, planned().fast, planned().job.recovery, seed=1, notice=0, enough=1)
        production.play()
        logs = production.world.etcd.store.logs.values()
        assert sum(map(len, logs)) > 100 * hours
        kept.append(sum(len(log.between(0, len(log))) for log in logs))
    assert max(kept) < 60, kept


def test_the_optimum_between_checkpoints_is_daly_s() -> None:
    """Daly 2006, equation 37: near Young's square root for short stalls, and the mean time between for long ones."""
    assert optimum(2.0, 3600.0) == pytest.approx(118.67, abs=0.02)
    assert optimum(10.0, 4.0) == 4.0
    assert optimum(1.0, float("inf")) == float("inf")
