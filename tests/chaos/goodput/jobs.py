"""A job for tests: a model, of 7 billion parameters by default, on nodes of eight H200, planned once."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache

from chaos.goodput.compare import Job, Planned
from chaos.goodput.costs import RecoveryCosts
from chaos.goodput.lives import Crowd, crowd
from chaos.simulation.trace import Held
from elastic3d.cli.plan.question import described, requested
from elastic3d.planner.devices import Number, device_named


@cache
def planned(model: str = "llama-7b") -> Planned:
    """Return the job with the default costs."""
    profile = described(
        model,
        number=Number.BF16,
        global_batch=512,
        micro_batch=1,
        context=None,
        recompute="none",
        optimizer="adamw",
    )
    costs = device_named("h200").costs(Number.BF16)
    return Planned(Job(profile=profile, costs=costs, slots=8, request=requested(""), recovery=RecoveryCosts()))


def with_costs(recovery: RecoveryCosts) -> Planned:
    """Return the same job with other costs of recovery."""
    made = Planned(replace(planned().job, recovery=recovery))
    made.fastest, made.fast, made.ordered = planned().fastest, planned().fast, planned().ordered
    return made


def free() -> RecoveryCosts:
    """Return costs with which nothing costs anything that a cost is about."""
    seconds = (one for one in fields(RecoveryCosts) if "bytes/s" not in one.metadata["source"])
    rates = (one for one in fields(RecoveryCosts) if "bytes/s" in one.metadata["source"])
    return RecoveryCosts(**{one.name: 0.0 for one in seconds}, **{one.name: 1e18 for one in rates})


def people(end: float, *rows: tuple[float, int], announced: float = 0.0, seed: int = 1) -> Crowd:
    """Return the nodes of a trace of these rows."""
    return crowd([Held(at=at, nodes=nodes) for at, nodes in rows], end, seed=seed, announced=announced)
