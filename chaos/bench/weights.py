"""What four processes of a node read when a run begins with weights that exist: of the files, and of the disk.

The kernel counts for each process the bytes that it asks for, and those that come from a disk for it. Before each run
the files are put out of the page cache: what two ranks both ask for then comes from the disk once, if the kernel keeps
it for the second.
"""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from safetensors.torch import save_file

from chaos.bench.gpt import GPT
from chaos.bench.spread import spread
from chaos.machine.cluster import Cluster, Launch
from chaos.servers.etcd import EtcdServer

RANKS = 4
LAYOUTS = ("pp=1,dp=4", "pp=2,dp=2", "pp=1,dp=4,replicas=2")
SCRIPT = Path(__file__).parents[1] / "scripts" / "begin_with_weights.py"
PATIENCE = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of the model: 12 * width ** 2 parameters a block and a few. The default has 1.06 billion, 2.1 GB in bf16."""

    width: int = 2048
    depth: int = 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """One run's beginning. asked, fetched: bytes that all ranks read, and that came from disks for them.

    seconds: of the slowest rank, from before the model is built. peak: most bytes of memory of one rank. nbytes: of the
    files.
    """

    asked: int
    fetched: int
    seconds: float
    peak: int
    nbytes: int


Weights = dict[str, list[Begun]]
"""The beginnings in each layout."""


def measure(repeats: int, size: Size = Size(), *, say: Callable[[str], None] = lambda text: None) -> Weights:
    """Begin a run in each layout, `repeats` times."""
    begun: Weights = {layout: [] for layout in LAYOUTS}
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "weights"
        files.mkdir()
        write(files, size)
        for number in range(repeats):
            for layout in LAYOUTS:
                begun[layout].append(begin(files, size, layout, Path(folder) / f"{number} {layout}"))
                say(f"weights, {layout}, {number + 1} of {repeats}")
    return begun


def table(weights: Weights) -> Table:
    """Return the table for people."""
    nbytes = next(one.nbytes for begun in weights.values() for one in begun)
    title = f"{nbytes / 1e9:.2f} GB of bf16 into fp32 masters by {RANKS} processes of one node"
    shown = Table("layout", "asked of the files", "from the disk", "time", "most memory of a rank", title=title)
    for layout, begun in weights.items():
        asked, fetched = ([getattr(one, name) / nbytes for one in begun] for name in ("asked", "fetched"))
        seconds, peaks = [one.seconds for one in begun], [one.peak / 1e9 for one in begun]
        shown.add_row(layout, spread(asked, ""), spread(fetched, ""), spread(seconds), spread(peaks, " GB"))
    return shown


def write(folder: Path, size: Size) -> None:
    """Write the model's weights, in shards as transformers writes them: one for each block, one for the rest."""
    with torch.device("meta"):
        state = GPT(width=size.width, depth=size.depth).state_dict()
    shards: dict[str, list[str]] = {}
    for name in state:
        shards.setdefault(".".join(name.split(".")[:2]) if name.startswith("blocks.") else "rest", []).append(name)
    generator = torch.Generator().manual_seed(7)
    index: dict[str, str] = {}
    for number, names in enumerate(shards.values(), start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        # Any bits below those of 1.0 are a number from 0 to 1.
        bits = {
            name: torch.randint(0x3F80, state[name].shape, generator=generator, dtype=torch.int16) for name in names
        }
        save_file({name: each.view(torch.bfloat16) for name, each in bits.items()}, folder / file)
        index |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def begin(files: Path, size: Size, layout: str, folder: Path) -> Begun:
    """Begin a run on one node of four slots; RuntimeError with what it printed where it does not end well."""
    out = folder / "out"
    out.mkdir(parents=True)
    nbytes = sum(file.stat().st_size for file in _uncached(files))
    with EtcdServer() as etcd:
        launch = Launch(
            run_id=f"weights-{uuid.uuid4().hex[:8]}",
            endpoint=etcd.endpoint,
            script=SCRIPT,
            script_args=(str(files), str(size.width), str(size.depth), str(out), layout),
            min_nodes=1,
            max_nodes=1,
            slots=RANKS,
            conf={"mode": "resident"},
        )
        with Cluster(launch, folder / "nodes") as cluster:
            cluster.start_node("node0")
            codes = cluster.wait(PATIENCE)
            if set(codes.values()) != {0}:
                raise RuntimeError(f"{layout}: the run ended with {codes}:\n{cluster.tail('node0')}")
    ranks = [json.loads(file.read_text()) for file in out.glob("*.json")]
    assert len(ranks) == RANKS
    return Begun(
        asked=sum(rank["asked"] for rank in ranks),
        fetched=sum(rank["fetched"] for rank in ranks),
        seconds=max(rank["seconds"] for rank in ranks),
        peak=max(rank["peak"] for rank in ranks),
        nbytes=nbytes,
    )


def _uncached(folder: Path) -> Iterator[Path]:
    """Put a folder's files out of the page cache, and yield them."""
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        yield file
