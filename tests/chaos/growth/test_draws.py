"""The endless list of faults: the same for a seed, and one that some node always survives."""

from __future__ import annotations

import itertools

import pytest

from chaos.faults.fault import OfNode, node_name
from chaos.faults.orders import Join
from chaos.faults.process import Kill
from chaos.growth.draws import DEFAULT, WORDS, Draws


@pytest.mark.parametrize("words", [DEFAULT, WORDS, ("kill",)])
@pytest.mark.parametrize("seed", range(5))
def test_the_first_node_stays_and_faults_meet_nodes_that_are_there(words: tuple[str, ...], seed: int) -> None:
    """There are never more nodes than at the beginning, and whoever is lost is replaced by a fresh one."""
    draws = Draws(seed, words, 3)
    alive, fresh = [node_name(number) for number in range(3)], itertools.count(3)
    seen = set()
    for step in range(1, 400):
        fault = draws.draw(step)
        fault.check()
        assert fault.when.step == step
        seen.add(fault.WORD)
        if isinstance(fault, Join):
            alive.append(node_name(next(fresh)))
        elif isinstance(fault, OfNode):
            assert fault.node in alive
            if fault.CHANGES == (-1,):
                assert fault.node != "node0"
                alive.remove(fault.node)
        assert 1 <= len(alive) <= 3
    assert seen == {*words, "join"}


def test_a_seed_draws_the_same_faults() -> None:
    """And another one others."""
    first, same, other = ([Draws(seed, DEFAULT, 3).draw(step) for step in range(1, 2)] for seed in (1, 1, 2))
    assert first == same
    many = [[draws.draw(step) for step in range(1, 50)] for draws in (Draws(1, DEFAULT, 3), Draws(2, DEFAULT, 3))]
    assert many[0] != many[1]
    assert len(other) == 1


def test_a_node_of_which_the_fault_was_not_made_is_drawn_again() -> None:
    """It waited for its node for too long, which is still there."""
    draws = Draws(3, ("kill",), 3)
    first = draws.draw(1)
    assert isinstance(first, Kill)
    draws.take_back(first)
    assert sorted(draws._alive) == ["node0", "node1", "node2"]
