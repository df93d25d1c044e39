"""The measurement of a restore's plan, on a small state."""

from __future__ import annotations

from chaos.bench.restore_plans import measure, planned, state
from elastic3d.snapshots.client import merged
from elastic3d.training import restoring


def test_a_rank_plans_its_own_tiles_alone() -> None:
    """Of a state that two servers hold, each of its tiles is spelled out and planned once, and no other."""
    assert measure(tiles=2000, ranks=4, turns=1).tiles == 1920
    held, _ = state(2000, 4)
    offers = tuple(offer for one in merged(held) for offer in one.offers())
    decision = restoring.Decision(source=restoring.MEMORY, step=1, generation=1, offers=offers)
    wanted = [(entry.spec, entry.box) for entry in held[0].table.entries]
    own = sum(held[0].table.counts)
    assert planned(decision, wanted) == own
    assert len(restoring.offers(decision, dict.fromkeys(decision.sources()), wanted)) == own  # type: ignore[arg-type]
