"""The processor time of a restore before the first byte moves, for a state of many tiles that two servers hold each.

`python -m chaos.bench.restore_plans [TILES [RANKS]]` prints the best of some turns for each part. No byte of such a
state exists: tables, digests and addresses are made up.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from checkpointing.format.tiles import Box, TensorSpec
from checkpointing.reading.catalogue import Catalogue, Region
from elastic3d.snapshots import table as tables
from elastic3d.snapshots.client import Inventory, merged
from elastic3d.snapshots.table import DIGEST_DIGITS
from elastic3d.training import restoring
from elastic3d.training.restoring import Decision, Known
from elastic3d.training.tiers import KeepersAndStore

TILES, RANKS = 200_000, 16
COLUMNS = 4096
TILES_OF_A_TENSOR = 96
TURNS = 3

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Processor seconds. decide, dump: on rank 0. load, plan: on each rank, of the broadcast and of its own tiles."""

    tiles: int
    ranks: int
    nbytes: int
    decide: float
    dump: float
    load: float
    plan: float


class _Held(KeepersAndStore):
    """Keepers that hold what they are said to hold."""

    def __init__(self, held: Sequence[Inventory]) -> None:
        super().__init__(None)
        self._held = held

    def inventories(self, servers: Sequence[str]) -> Sequence[Inventory]:
        """Return it."""
        return merged(self._held)


def measure(tiles: int = TILES, ranks: int = RANKS, turns: int = TURNS) -> Parts:
    """Plan the restore of a state under the layout that saved it, in turns."""
    held, specs = state(tiles, ranks)
    known = Known(generation=2, newest=1)
    decided, decide = _best(turns, lambda: restoring.decide(_Held(_again(held)), ["any"], None, specs, known))
    sent, dump = _best(turns, lambda: restoring.dump(decided))
    wanted = [(entry.spec, entry.box) for entry in held[0].table.entries]

    loaded, load = _best(turns, lambda: restoring.load(sent))
    _, plan = _best(turns, lambda: planned(loaded, wanted))
    return Parts(
        tiles=sum(sum(one.table.counts) for one in held[::2]),
        ranks=ranks,
        nbytes=len(sent),
        decide=decide,
        dump=dump,
        load=load,
        plan=plan,
    )


def planned(decision: Decision, wanted: Sequence[tuple[TensorSpec, Box]]) -> int:
    """Plan what a rank wants, as `resolve` does; return how many tiles that are."""
    sources = {name: _NoSource(name) for name in decision.sources()}
    catalogue = Catalogue(restoring.offers(decision, sources, wanted), sources)
    regions = [Region(spec, box) for spec, box in wanted]
    catalogue.check_specs(regions)
    return len(catalogue.plan(regions, []))


class _NoSource:
    def __init__(self, name: str) -> None:
        self.name = name

    def fetch(self, tile: object) -> bytes:
        raise AssertionError("nothing is read here")


def state(tiles: int, ranks: int) -> tuple[list[Inventory], list[TensorSpec]]:
    """Return a state of about so many tiles, cut by rows into each rank's part, which two servers hold."""
    rows = TILES_OF_A_TENSOR * 256 // ranks * ranks  # a tile of 4 MiB has 256 rows
    count = max(1, tiles // TILES_OF_A_TENSOR)
    specs = [TensorSpec(key=f"model/layers.{n}.weight", dtype="float32", shape=(rows, COLUMNS)) for n in range(count)]
    part = rows // ranks
    held = []
    for rank in range(ranks):
        box = Box(start=(rank * part, 0), stop=((rank + 1) * part, COLUMNS))
        table = tables.lay_out([(spec, box) for spec in specs])
        digests = tables.split_digests(table, f"{rank:064x}" * sum(table.counts))
        for server in (rank, (rank + 1) % ranks):
            held.append(
                Inventory(
                    server=f"10.0.0.{server}:7000",
                    generation=1,
                    step=1,
                    rank=rank,
                    world=ranks,
                    facts={},
                    table=table,
                    digests=digests,
                )
            )
    assert all(len(one.digests[0]) % DIGEST_DIGITS == 0 for one in held)
    return held, specs


def _again(held: Sequence[Inventory]) -> list[Inventory]:
    """Return them without what they have worked out already."""
    return [Inventory(**{name: getattr(one, name) for name in one.__dataclass_fields__}) for one in held]


def _best(turns: int, act: Callable[[], T]) -> tuple[T, float]:
    times = []
    for _ in range(turns):
        began = time.process_time()
        result = act()
        times.append(time.process_time() - began)
    return result, min(times)


def main(given: Sequence[str]) -> None:
    """Print the parts."""
    numbers = [int(number) for number in given]
    parts = measure(*numbers)
    shown = Table("part", "processor time", title=f"{parts.tiles} tiles held twice, {parts.ranks} ranks")
    for name in ("decide", "dump", "load", "plan"):
        shown.add_row(name, f"{getattr(parts, name):.3f} s")
    shown.add_row("broadcast", f"{parts.nbytes / 1e6:.1f} MB")
    Console().print(shown)


if __name__ == "__main__":
    main(sys.argv[1:])
