"""Reading a rank's own state back from its node's memory: where it lies, and through the tile server's TCP.

The snapshot is in another process, as a keeper holds it. Both ways end in the same buffers, every tile verified, and
take turns, so that other load affects both alike; the result is the ratio of consecutive turns. Beside the time that
passed stands what the processors of both processes spent: all trainers of a node restore at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from chaos.bench.spread import spread
from checkpointing.format.tiles import Box, TensorSpec
from checkpointing.reading.resolver import resolve
from elastic3d.clock import SYSTEM
from elastic3d.port import NearMemory
from elastic3d.snapshots import table as tables
from elastic3d.snapshots.arena import Arena
from elastic3d.snapshots.client import inventories
from elastic3d.snapshots.holdings import Mark
from elastic3d.snapshots.lending import Lender
from elastic3d.snapshots.memory import SnapshotMemory
from elastic3d.snapshots.server import TileServer
from elastic3d.training import restoring
from elastic3d.training.tiers import KeepersAndStore
from elastic3d.trust.credentials import Credentials

MEGABYTES = 256
TENSORS = 16
COLUMNS = 1024
TICK = 1 / os.sysconf("SC_CLK_TCK")
"""Seconds in which the kernel counts what processors spend."""
CREDENTIALS = Credentials(secret="5e" * 32, id="0@1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One read of the state. processor: seconds of reader and keeper together."""

    seconds: float
    processor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Restores:
    """Each turn of both ways; turns of one number followed one another."""

    megabytes: int
    mapped: list[Turn]
    tcp: list[Turn]

    def ratios(self) -> list[float]:
        """Return how many times as long each turn over TCP took."""
        return [slow.seconds / fast.seconds for slow, fast in zip(self.tcp, self.mapped, strict=True)]

    def work_ratios(self) -> list[float]:
        """Return how many times as much time of processors each turn over TCP took."""
        return [slow.processor / max(TICK, fast.processor) for slow, fast in zip(self.tcp, self.mapped, strict=True)]


def measure(turns: int, megabytes: int = MEGABYTES, *, say: Callable[[str], None] = lambda text: None) -> Restores:
    """Read a state of so many megabytes in turns."""
    mapped: list[Turn] = []
    tcp: list[Turn] = []
    with _keeper(megabytes) as (near, keeper):
        offers = tuple(offer for one in inventories([near.server], CREDENTIALS) for offer in one.offers())
        decision = restoring.Decision(source=restoring.MEMORY, step=1, generation=1, offers=offers)
        buffers = {offer.spec.key: bytearray(os.urandom(offer.box.numel * 4)) for offer in offers}
        for number in range(turns + 1):
            ways = [(mapped, [near]), (tcp, [])]
            for read, used in ways if number % 2 else reversed(ways):
                turn = _read(decision, buffers, used, keeper)
                if number:  # the first of each finds nothing in its place
                    read.append(turn)
            say(f"restore {number} of {turns}")
    return Restores(megabytes=megabytes, mapped=mapped, tcp=tcp)


def table(restores: Restores) -> Table:
    """Return the table for people."""
    title = f"{restores.megabytes} MB of one's own state, from memory"
    shown = Table("", "time", "ratio", "processors' time", "ratio", title=title)
    compared = (("", ""), (spread(restores.ratios(), "", 1), spread(restores.work_ratios(), "", 1)))
    for name, turns, ratios in zip(
        ("where it lies", "over TCP"), (restores.mapped, restores.tcp), compared, strict=True
    ):
        times = spread([turn.seconds for turn in turns], " s", 3)
        work = spread([turn.processor for turn in turns], " s", 3)
        shown.add_row(name, times, ratios[0], work, ratios[1])
    return shown


def _read(decision: restoring.Decision, buffers: dict[str, bytearray], near: Sequence[NearMemory], keeper: int) -> Turn:
    spent, began = _spent(keeper), SYSTEM.monotonic()
    sources = KeepersAndStore(CREDENTIALS).sources(decision, None, 0, near)
    wanted = [(offer.spec, offer.box) for offer in decision.offers]
    offers = restoring.offers(decision, sources, wanted)
    resolved = resolve(wanted, offers, sources, lambda spec, box: memoryview(buffers[spec.key]))
    restoring.close_sources(sources)
    assert not resolved.failures, resolved.failures
    return Turn(seconds=SYSTEM.monotonic() - began, processor=_spent(keeper) - spent)


def _spent(keeper: int) -> float:
    """Return the seconds that the processors have spent on this process and the keeper."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in (os.getpid(), keeper)]
    return sum(int(user) + int(system) for user, system in (stat[11:13] for stat in fields)) * TICK


@contextmanager
def _keeper(megabytes: int) -> Iterator[tuple[NearMemory, int]]:
    """Hold a snapshot in a process of its own; yield how it is reached, and its pid."""
    command = [sys.executable, "-m", "chaos.bench.restores", str(megabytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin:  # its end is the keeper's
            server, lender = json.loads(process.stdout.readline())
            yield NearMemory(server=server, lender=lender), process.pid


def _hold(megabytes: int) -> None:
    memory = SnapshotMemory()
    server, lender = TileServer(memory, host="127.0.0.1"), Lender(memory)
    server.set_credentials(CREDENTIALS)
    rows = max(1, megabytes * 1_000_000 // (TENSORS * COLUMNS * 4))
    whole = Box(start=(0, 0), stop=(rows, COLUMNS))
    specs = [TensorSpec(key=f"model/{n}", dtype="float32", shape=(rows, COLUMNS)) for n in range(TENSORS)]
    layout = tables.lay_out([(spec, whole) for spec in specs])
    memory.learn(layout)
    buffer = memory.grant()[0]
    arena = Arena(memory.descriptors()[buffer])
    arena.reserve(layout.nbytes)
    data = arena.view(layout.nbytes)
    for at in range(0, layout.nbytes, 1 << 20):
        part = data[at : at + (1 << 20)]
        part[:] = os.urandom(len(part))
    memory.set_generation(1)
    memory.restored(1, None)
    memory.written(buffer, Mark(1, 1), rank=0, world=1, facts={}, table=layout.identity, checkpoint=False)
    memory.offered()
    print(json.dumps([f"127.0.0.1:{server.port}", lender.name]), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _hold(int(sys.argv[1]))
