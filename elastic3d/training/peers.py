"""A trainer among the others of its generation: its device, their process groups, and what follows when one is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import torch.distributed as dist

from elastic3d.clock import Clock
from elastic3d.devices.turn import await_memory
from elastic3d.errors import UnmatchedCollective
from elastic3d.health.phases import Axis
from elastic3d.health.record import fingerprint
from elastic3d.parallel.all_ranks import AllRanks, unmatched
from elastic3d.parallel.group_errors import GroupErrors
from elastic3d.parallel.mesh import Mesh, join_world
from elastic3d.parallel.one_node import check_node
from elastic3d.parallel.peer_errors import is_lost_peer
from elastic3d.port import Assignment, Go, Port
from elastic3d.values import Layout

COPY_PATIENCE = 5.0
"""Seconds that a snapshot may still take to be copied where a device has stopped in the middle of its work."""


class Peers:
    """See the module. steps: returns how many steps this rank has made."""

    def __init__(self, port: Port, clock: Clock, steps: Callable[[], int]) -> None:
        self.go: Go | None = None
        self.ranks: AllRanks | None = None
        self._port, self._clock, self._steps = port, clock, steps
        self._rank = port.assignment.rank
        self._group_errors: GroupErrors | None = None

    def open_device(self, assignment: Assignment) -> None:
        """Take the device into use. Where one trainer holds it at a time, this one waits for its turn first.

        All that is prepared beside the trainers of the generation before is then what the host alone can do; `go` is
        what the keeper said.
        """
        device = self._port.device
        if device.exclusive:
            self.go = self._port.await_go()
        device.open()
        if device.exclusive:
            await_memory(device, assignment.device_free, clock=self._clock)

    def join(self, assignment: Assignment, layout: Layout, *, passes: bool) -> Mesh:
        """Meet the other ranks and make the mesh; a collective, to be called within `followed`.

        passes: sums go from replica to replica.
        """
        device, progress = self._port.device, self._port.progress
        if assignment.world > 1:
            meeting = progress.enter(Axis.WORLD, fingerprint(0))
            store = join_world(assignment, device)
            self.ranks = AllRanks(store, rank=self._rank, world=assignment.world)
            progress.leave(Axis.WORLD, meeting)
        mesh = Mesh(layout, self._rank, device, progress=progress, passes=passes)
        if mesh.groups and device.exclusive:
            self._group_errors = GroupErrors(mesh.groups, device, self._group_failed)
        for axis, ranks in (("tp", mesh.tp), ("cp", mesh.cp)):
            if ranks is not None:
                check_node(axis, ranks, assignment.node)
        return mesh

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Pass the failure of a collective to the port, which ends the process."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            if is_lost_peer(error):
                self.lost(error)
            raise

    def lost(self, error: BaseException, *, patience: float | None = None) -> NoReturn:
        """End the process because a collective failed; UnmatchedCollective if `main` has returned on a rank.

        patience: as `Port.peer_lost` takes it.
        """
        returned = self.ranks.returned() if self.ranks is not None else None
        # One that returned after a step that this rank had not ended yet made all its collectives of it.
        if returned is not None and returned[1] <= self._steps():
            raise unmatched(self._rank, *returned) from error
        self._port.peer_lost(error, patience=patience)

    def stop_looking(self) -> None:
        """Look for groups that failed no longer: the other ranks may leave."""
        if self._group_errors is not None:
            self._group_errors.stop()

    def say_returned(self) -> None:
        """Have the other ranks know that `main` returned on this one."""
        if self.ranks is not None:
            with suppress(dist.DistError):  # nothing is missing here; ranks that still wait for this one see it go
                self.ranks.say_returned(self._steps())

    def _group_failed(self, error: BaseException) -> None:
        """End the process from a thread beside: the main thread waits for what the device will never have."""
        try:
            self.lost(error, patience=COPY_PATIENCE)
        except UnmatchedCollective as unmatched:
            self._port.failed(unmatched)
