"""A job that knows the future: the bound that no policy exceeds.

With n(t) nodes held at time t and s(k) the predicted seconds of the fastest step known of any layout on at most k
nodes, of either reduction, the oracle makes

    steps = integral of dt / s(n(t)) over the trace.

It pays for nothing: no time to notice, form, build, load, save or change, and parts of a step count. Any policy makes a
step of a layout of k nodes in s >= s(k) seconds, in which those k nodes are held throughout, one step after another; so
at each moment of it n(t) >= k and 1 / s(n(t)) >= 1 / s(k) >= 1 / s. Summed over its steps, none makes more than the
oracle. "Known" are the best of the planner's ranking for each number of nodes and every layout that a policy ran, so
that the bound does not lean on the planner's search being exhaustive.

Its nodes train while they are held; those that its layout leaves out are spare.
"""

from __future__ import annotations

from chaos.goodput.ledger import Account, Spent
from chaos.goodput.lives import Crowd
from chaos.goodput.step_times import Fastest

ORACLE = "oracle"


def oracle(crowd: Crowd, fastest: Fastest) -> Account:
    """Return the oracle's account, of the layouts that are known when all policies have been played."""
    spent = dict.fromkeys(Spent, 0.0)
    steps = training = held = 0.0
    curve = [(0.0, 0.0)]
    for since, until, nodes in crowd.counts():
        seconds, passed = fastest.seconds(nodes), until - since
        held += nodes * passed
        if seconds is None:
            spent[Spent.WAITING] += nodes * passed
        else:
            used = fastest.used(nodes)
            spent[Spent.USEFUL] += used * passed
            spent[Spent.SPARE] += (nodes - used) * passed
            steps += passed / seconds
            training += passed
        curve.append((until, steps))
    return Account(
        policy=ORACLE,
        node_seconds=spent,
        held=held,
        steps=steps,
        training=training,
        possible=training,
        curve=tuple(curve),
    )
