"""How fast generations may follow each other: in a storm of losses, and for newcomers beyond the hour's budget."""

from __future__ import annotations

from elastic3d.membership.machine.situation import Situation
from elastic3d.membership.machine.triggers import Interruption

SOON = 10.0
"""A generation that a loss ends within these seconds belongs to a storm."""

GROWTH = 0.2
"""Seconds that a storm's second loss waits for a third; doubled with each further one."""

HOUR = 3600.0


def storm(situation: Situation, why: Interruption) -> int:
    """Return how many generations in a row a loss ended soon, this one included."""
    view, leader_state, now = situation.view, situation.leader_state, situation.alarm.now
    assert view.generation is not None
    if not why.lost:
        return 0
    leader_state.lost_at = now if leader_state.lost_at is None else leader_state.lost_at
    return view.generation.storm + 1 if leader_state.lost_at < view.sealed_at + SOON else 0


def calm(situation: Situation, storms: int) -> bool:
    """Return whether a storm has been given time to show its next loss; a single death waits for nothing."""
    policy, leader_state, alarm = situation.policy, situation.leader_state, situation.alarm
    if storms < 2 or leader_state.lost_at is None:
        return True
    return alarm.due(leader_state.lost_at + min(GROWTH * 2 ** min(storms - 1, 30), policy.damping))


def level(situation: Situation) -> float:
    """Return how much of the hour's re-formings is used up. A new leader counts from when it heard of them."""
    view, policy, now = situation.view, situation.policy, situation.alarm.now
    if view.generation is None or not policy.budget:
        return 0.0
    return max(0.0, view.generation.spent - (now - view.sealed_at) * policy.budget / HOUR)


def spent(situation: Situation) -> float:
    """Return the level after one more. Losses may exceed the budget: newcomers then wait for one's share of time."""
    policy = situation.policy
    return min(level(situation) + 1.0, float(policy.budget)) if policy.budget else 0.0


def affordable(situation: Situation) -> bool:
    """Return whether the budget allows one more re-forming for newcomers."""
    policy, alarm = situation.policy, situation.alarm
    over = level(situation) + 1.0 - policy.budget if policy.budget else 0.0
    # A rounding error must not set the alarm to a moment before the one it waits for.
    return over <= 1e-6 or alarm.due(alarm.now + over * HOUR / policy.budget)
