"""How torch's agents end where torch leaves it open: when their job succeeds without them, and by a signal.

torch's handlers end an agent that was a spare to the end by RendezvousGracefulExitError. torch's agent catches that and
returns None, for which `launch_agent` has no case: it fails with an AttributeError, under torchrun and under
`elastic_launch` alike. Here such an agent returns the result of a group without workers: torchrun exits with 0, and
`elastic_launch` returns no values.

After a signal `launch_agent` does not shut the handler down, so that others may go on under the run id, and trusts that
the process ends. A program that launched an agent may catch torch's SignalException and live on, a notebook does after
an interrupt: here such an agent leaves as one whose process ends does, or the others would wait for it for ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerState
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousHandler

H = TypeVar("H", bound=RendezvousHandler)


def let_agents_of(handlers: type[H], leave: Callable[[H], None]) -> None:
    """Have torch's agents whose handler is of this class return a result whenever they succeed. Idempotent.

    leave: called for the handler of one that a signal ends, once its workers have ended.
    """
    run = SimpleElasticAgent.run
    if handlers in getattr(run, "elastic3d_handlers", ()):
        return

    @functools.wraps(run)
    def run_to_a_result(agent: SimpleElasticAgent, *given: Any, **named: Any) -> RunResult:
        handler = agent.get_worker_group().spec.rdzv_handler
        try:
            result: RunResult | None = run(agent, *given, **named)
        except SignalException:
            if isinstance(handler, handlers):
                leave(handler)
            raise
        if result is None and isinstance(handler, handlers):
            return RunResult(state=WorkerState.SUCCEEDED)
        return result  # type: ignore[return-value]  # other handlers' None is left to them

    setattr(run_to_a_result, "elastic3d_handlers", (handlers,))  # noqa: B010  # a function has no such attribute
    setattr(SimpleElasticAgent, "run", run_to_a_result)  # noqa: B010  # nor is a method assigned to
