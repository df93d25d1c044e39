"""How a process runs a user's `main`: as a trainer that a port hosts, or alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

from elastic3d.errors import UnmatchedCollective
from elastic3d.islands import Islands
from elastic3d.parallel.peer_errors import is_lost_peer
from elastic3d.port import Port
from elastic3d.provenance.record import ScriptOrigin
from elastic3d.training import restoring
from elastic3d.training.run import Run
from elastic3d.training.standalone import StandalonePort

Main = Callable[[Run], None]


def train(
    main: Main,
    port: Port,
    *,
    tiers: restoring.Tiers | None = None,
    origin: ScriptOrigin | None = None,
    islands: Islands | None = None,
) -> NoReturn:
    """Run `main` as the trainer that `port` hosts, which ends the process.

    origin: what is known of where its states come from, None for nothing. islands: what it merges with, None for none.
    """
    unsaved = -1
    run: Run | None = None
    try:
        run = Run(port, tiers=tiers, origin=origin, islands=islands)
        try:
            main(run)
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
        unsaved = run.finish()
    except Exception as error:  # noqa: BLE001  # the edge of the trainer: whatever the user's code raised goes to the host
        port.failed(_cause(run, error))
    port.done(None, unsaved)


def _cause(run: Run | None, error: Exception) -> Exception:
    """Return the error to report to the host; end the process where another rank was lost."""
    if run is not None and is_lost_peer(error):
        try:
            run.lost(error)
        except UnmatchedCollective as unmatched:
            return unmatched
    return error


def run_alone(
    main: Main, *, threads: int | None = None, device: str = "cpu", islands: Islands | None = None, name: str = "alone"
) -> Run:
    """Run `main` in this process, as the only rank; return the run as `main` left it.

    There are no snapshots and no checkpoints. A stream with a state of its own is as an earlier run of this process
    left it: make it in `main`, so that each run has the same samples.

    threads: for tensor operations; torch's own choice by default. device: its kind. islands: what it merges with, None
    for none; name: of the run, and so of its island.
    """
    run = Run(StandalonePort(run_id=name, threads=threads or torch.get_num_threads(), device=device), islands=islands)
    main(run)
    if islands is not None:
        run.finish()
    return run
