"""A successful end for agents whose job succeeds without them.

torch's handlers end an agent that was a spare to the end by RendezvousGracefulExitError. torch's agent catches that and
returns None, for which `launch_agent` has no case: it fails with an AttributeError, under torchrun and under
`elastic_launch` alike. Here such an agent returns the result of a group without workers: torchrun exits with 0, and
`elastic_launch` returns no values.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerState
from torch.distributed.elastic.rendezvous.api import RendezvousHandler


def let_agents_of(handlers: type[RendezvousHandler]) -> None:
    """Have torch's agents whose handler is of this class return a result whenever they succeed. Idempotent."""
    run = SimpleElasticAgent.run
    if handlers in getattr(run, "elastic3d_handlers", ()):
        return

    @functools.wraps(run)
    def run_to_a_result(agent: SimpleElasticAgent, *given: Any, **named: Any) -> RunResult:
        result: RunResult | None = run(agent, *given, **named)
        if result is None and isinstance(agent.get_worker_group().spec.rdzv_handler, handlers):
            return RunResult(state=WorkerState.SUCCEEDED)
        return result  # type: ignore[return-value]  # other handlers' None is left to them

    setattr(run_to_a_result, "elastic3d_handlers", (handlers,))  # noqa: B010  # a function has no such attribute
    setattr(SimpleElasticAgent, "run", run_to_a_result)  # noqa: B010  # nor is a method assigned to
