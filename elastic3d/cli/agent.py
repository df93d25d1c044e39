"""`elastic3d agent`: torchrun's agent of one node, with an exit code by which a supervisor knows whether to replace it.

torchrun ends with 0 when its node has left at a notice or by `elastic3d drain`, although the job goes on, and with 1
after any signal, although the job may be over. Kubernetes, systemd and others decide by that code alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from elastic3d import environment, output
from elastic3d.clock import SYSTEM
from elastic3d.errors import Elastic3dError, UsageError

if TYPE_CHECKING:
    from elastic3d.etcd import EtcdClient
    from elastic3d.rendezvous.settings import Settings

_T = TypeVar("_T")
LEFT = 75
"""The exit code of a node that left while the job goes on, or may be begun again: EX_TEMPFAIL of sysexits.h."""
BACKENDS = ("etcd", "etcd-v3")
_PASSED_ON = (signal.SIGTERM, signal.SIGINT)
CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def agent(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TORCHRUN-OPTIONS SCRIPT [ARGUMENTS...]", help="As torchrun takes them.", show_default=False
        ),
    ] = None,
) -> None:
    """Run torchrun for this node, and say by the exit code whether the job is over.

    For supervisors that start a node anew: a Kubernetes Job, systemd, a task of SkyPilot. SIGTERM and SIGINT are passed
    on. Exit codes: 0 if the job is over and did not fail; 75 if this node left in order and the job goes on, or can be
    started again since it stopped when every node had been told to leave; 2 for a wrong call; torchrun's own for
    everything else, or 128 and the number of the signal that ended it.

    Examples:

        elastic3d agent --nnodes=2:8 --nproc-per-node=8 --rdzv-backend=etcd --rdzv-endpoint=e1:2379 --rdzv-id=gpt-1b --rdzv-conf=mode=resident train.py
    """  # noqa: E501 a command that is shown is one line
    # What arrives while torch is imported waits for torchrun: as a container's first process, it would be ignored.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    begun = SYSTEM.monotonic()
    try:
        settings = _settings(arguments or [])
        child, passed_on = _start(arguments or [], before, begun)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    from elastic3d.membership.driver.ended import end_seen, last_end

    # torchrun still imports torch: it has cleared away no earlier job yet, and ended none.
    earlier = _ask(settings, lambda client: end_seen(client, settings.root, begun, SYSTEM), patience=0.0)
    code = child.wait()
    # A signal that comes before torchrun heeds any ends it; the node has not joined then.
    if code == 0 or (passed_on and code in (1, *(-number for number in passed_on))):
        # Whoever sent a signal ends this process, too, when their patience is at an end.
        last = _ask(settings, lambda client: last_end(client, settings.root), patience=0.0 if passed_on else None)
        if last is None or last[1] == earlier:
            output.say(f"this node has left, and the job {settings.run_id} goes on: exit code {LEFT}")
            code = LEFT
        elif last[0].stopped:
            output.say(f"the job {settings.run_id} stopped before its last step ({last[0].detail}): exit code {LEFT}")
            code = LEFT
        else:
            code = (code or 1) if last[0].failed else 0
    raise typer.Exit(code if code >= 0 else 128 - code)


def _settings(arguments: Sequence[str]) -> Settings:
    """Return the rendezvous settings in torchrun's arguments; UsageError for others than ours."""
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config
    from torch.distributed.run import get_args_parser, parse_min_max_nnodes

    from elastic3d.rendezvous.settings import from_parameters

    if not arguments:
        raise UsageError("agent needs torchrun's options and a script; see elastic3d agent --help")
    parsed = get_args_parser().parse_args(list(arguments))
    if parsed.rdzv_backend not in BACKENDS:
        raise UsageError(
            f"--rdzv-backend={parsed.rdzv_backend}: agent asks etcd whether the job is over; "
            f"give --rdzv-backend={BACKENDS[0]}, or start torchrun itself"
        )
    try:
        least, most = parse_min_max_nnodes(parsed.nnodes)
        conf = _parse_rendezvous_config(parsed.rdzv_conf)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"torchrun cannot read its options: {error}") from error
    return from_parameters(
        RendezvousParameters(
            backend=parsed.rdzv_backend,
            endpoint=parsed.rdzv_endpoint,
            run_id=parsed.rdzv_id,
            min_nodes=least,
            max_nodes=most,
            local_addr=parsed.local_addr,
            **conf,
        )
    )


def _start(arguments: Sequence[str], unblocked: set[int], begun: float) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Start torchrun; return it, and the signals that were passed on to it so far, which grows.

    unblocked: the signal mask for torchrun. begun: when this node was started, on the machine's monotonic clock.
    """
    from elastic3d.worker.processes.process import die_with_parent

    parent = os.getpid()
    passed_on: list[int] = []

    def begin() -> None:
        die_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)

    def pass_on(number: int, frame: types.FrameType | None) -> None:
        passed_on.append(number)
        child.send_signal(number)

    child = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        env={**os.environ, environment.AGENT_BEGUN.name: str(begun)},
        # Of its own, so that a terminal's Ctrl-C arrives once: a second signal ends a node at once.
        process_group=0,
        preexec_fn=begin,
    )
    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    return child, passed_on


def _ask(settings: Settings, question: Callable[[EtcdClient], _T], patience: float | None) -> _T | None:
    """Return etcd's answer, None where it gives none. patience: as in `connect`."""
    from elastic3d.rendezvous.connect import connect

    try:
        with connect(settings, patience=patience) as client:
            return question(client)
    except Elastic3dError as error:
        output.say(f"whether the job {settings.run_id} is over cannot be read, so it is taken to go on: {error}")
        return None
