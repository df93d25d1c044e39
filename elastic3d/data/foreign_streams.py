"""Streams of other libraries: whether each rank would read the same, and whether their own state is exact.

Nothing is imported: objects are known by the modules and the names of their classes, so that a library that is not
installed costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from elastic3d.errors import UsageError

SHARDING = {
    ("streaming", "StreamingDataset"): "Mosaic's StreamingDataset",
    ("litdata", "StreamingDataset"): "LitData's StreamingDataset",
    ("litdata", "CombinedStreamingDataset"): "LitData's CombinedStreamingDataset",
    ("nvidia", "DALIGenericIterator"): "DALI's iterator",
}
"""Data sets that choose their samples by rank and world, by their package and class."""

NODE_SPLITTERS = ("split_by_node", "single_node_only")
"""Stages of a WebDataset that look at ranks; the second is there by default, and raises on more than one."""

SEEDED_BELOW = 2**64
"""Seeds that people give are below it; entropy of the system has 128 bits."""


def check_same_everywhere(dataset: Any) -> None:
    """Refuse what gives each rank other samples, or another order: positions would mean nothing; UsageError.

    Every rank reads the whole stream and keeps its own part, so that any world can go on from one position.
    """
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(dataset).__mro__}
    if isinstance(dataset, DataLoader):
        raise UsageError(
            f"run.batches was given a {type(dataset).__name__}, which makes batches of its own: give it the data set, "
            "as run.batches(loader.dataset, collate=loader.collate_fn, workers=loader.num_workers, ...), without a "
            "sampler"
        )
    for kind, name in SHARDING.items():
        if kind in kinds:
            raise _sharding(name, "give the samples by number, as a map-style data set over the same files")
    if ("webdataset", "DataPipeline") in kinds:
        stages = {_name(stage) for stage in getattr(dataset, "pipeline", ())}
        for splitter in NODE_SPLITTERS:
            if splitter in stages:
                raise _sharding(f"{type(dataset).__name__} with nodesplitter={splitter}", "give it nodesplitter=None")
    if ("datasets", "IterableDataset") in kinds:
        if getattr(dataset, "_distributed", None) is not None:
            raise _sharding("a data set of split_dataset_by_node", "leave that call out")
        for part in _parts(getattr(dataset, "_ex_iterable", None)):
            if not _seeded(getattr(part, "generator", None)):
                raise UsageError(
                    "run.batches: the stream is shuffled without a seed, so that each process has another order; give "
                    "one: dataset.shuffle(seed=17)"
                )


def own_state_is_exact(dataset: Any) -> bool:
    """Return whether a stream's `state_dict` leads to the very next sample; all others are passed over samples of.

    The data sets of `datasets` leave out of their state what a shuffle buffer holds.
    """
    if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        return False
    parts = _parts(getattr(dataset, "_ex_iterable", None))
    return not any(type(part).__name__ == "BufferShuffledExamplesIterable" for part in parts)


def _sharding(name: str, instead: str) -> UsageError:
    return UsageError(
        f"run.batches: {name} chooses its samples by rank and world, and a sample's position in the run would not "
        f"outlive a change of the world. Every rank must read the same stream, of which elastic3d keeps each one's "
        f"part: {instead}"
    )


def _name(stage: Any) -> str:
    inner = getattr(stage, "func", stage)
    return str(getattr(inner, "__name__", type(inner).__name__))


def _parts(iterable: Any) -> Iterator[Any]:
    """Yield the nested iterables of a stream of `datasets`."""
    if iterable is None:
        return
    yield iterable
    for part in (getattr(iterable, "ex_iterable", None), *(getattr(iterable, "ex_iterables", None) or ())):
        yield from _parts(part)


def _seeded(generator: Any) -> bool:
    """Return whether a generator of numpy was made with a seed."""
    sequence = getattr(getattr(generator, "bit_generator", None), "seed_seq", None)
    entropy = getattr(sequence, "entropy", 0)
    return not isinstance(entropy, int) or entropy < SEEDED_BELOW
