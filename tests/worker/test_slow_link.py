"""Snapshots over a link that is slower than the steps: taken less often, alike on all ranks, and safe in the end."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from elastic3d.port import Go
from elastic3d.values import Layout
from elastic3d.worker.processes.events import SnapshotTaken, StepFinished, TrainerExited
from tests.worker.keepers import Keeper, Nursery, assignment

PIECE, PAUSE = 1 << 18, 0.02
"""About 12 MB/s at most, where a snapshot has 2 MB."""

PATIENCE = 120.0


@contextlib.contextmanager
def slow_link(port: int) -> Iterator[str]:
    """Yield the address of a link to a port of this machine."""

    def carry(source: socket.socket, target: socket.socket, pause: float) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE):
                target.sendall(data)
                time.sleep(pause * len(data) / PIECE)
            target.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listening.accept()
                far = socket.create_connection(("127.0.0.1", port))
                for source, target, pause in ((near, far, PAUSE), (far, near, 0.0)):
                    threading.Thread(target=carry, args=(source, target, pause), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.long
def test_a_slow_link_widens_the_interval_on_every_rank(nursery: Nursery) -> None:
    """Only one rank's link is slow; both take the same snapshots, and none waits behind another."""
    keepers = [nursery.keeper("sharded") for _ in range(2)]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with slow_link(keepers[1].slot.tile_port) as slow:
        for rank, (keeper, buddy) in enumerate(zip(keepers, (slow, keepers[0].server), strict=True)):
            keeper.slot.sealed(1, tuple(one.id for one in keepers))
            keeper.slot.set_generation(1)
            keeper.slot.set_buddy(buddy)
            trainer = keeper.slot.prepare(
                assignment(rank=rank, world=2, layout=Layout(pp=1, dp=2), store_port=store.port, snapshot_every=None)
            )
            keeper.slot.go(trainer, Go(servers=()))
        first = keepers[0]
        widened = first.wait(StepFinished, PATIENCE, lambda event: event.record.snapshot_every > 2).record
        assert widened.snapshot_rank == 0
        # Snapshots that were taken after it become safe.
        first.wait(StepFinished, PATIENCE, lambda event: event.record.safe_step > widened.step)
        for keeper in keepers:
            keeper.slot.ask_leave(1)
        ended = [keeper.wait(TrainerExited, PATIENCE) for keeper in keepers]
    assert ended[0].step == ended[1].step
    every = {event.record.step: event.record.snapshot_every for event in first.seen if isinstance(event, StepFinished)}
    taken = [_taken(keeper, ended[0].step) for keeper in keepers]
    common = set(taken[0]) & set(taken[1])
    assert all(step in common for one in taken for step in one if step <= max(common))
    later = [step for step in taken[0] if step >= widened.step]
    assert all(after - before >= min(every[before], every[after]) for before, after in itertools.pairwise(later))


def _taken(keeper: Keeper, last: int) -> list[int]:
    """The steps of a keeper's snapshots, but for the one with which its trainer left."""
    return [event.step for event in keeper.seen if isinstance(event, SnapshotTaken) and event.step < last]
