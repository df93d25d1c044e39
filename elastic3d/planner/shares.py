"""The part of each tensor that a rank of a mesh holds, from names and shapes alone.

A run's own model says exactly where its stages are cut; a checkpoint only has names. Blocks are found as the numbered
modules that hold most of the bytes (`blocks.0`, `blocks.1`, ...); other tensors belong to the first stage or to the
last. If there are no blocks to cut stages from, every tensor is cut evenly over the whole world.
"""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from checkpointing.format.tiles import Box, TensorSpec
from elastic3d.errors import LayoutError
from elastic3d.planner.placement import place_of

_OPTIMIZER, _MODEL, _EXTRA = "optimizer/", "model/", "extra/"
_AXIS = re.compile(r"(pp|dp|tp)=([0-9]{1,6})")
_MOST = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSizes:
    """The sizes of a mesh that somebody asks about; unlike a `Layout`, it need not be one that a run can use."""

    pp: int = 1
    dp: int = 1
    tp: int = 1

    @property
    def cp(self) -> int:
        """1: how state is cut depends on the product of dp and cp alone, so that dp stands for both."""
        return 1

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp

    def __str__(self) -> str:
        return f"pp {self.pp} x dp {self.dp} x tp {self.tp}"

    @classmethod
    def parse(cls, text: str) -> MeshSizes:
        """Return the target of `pp=2,dp=3,tp=2`; an axis left out is 1. LayoutError for anything else."""
        sizes: dict[str, int] = {}
        for item in text.split(","):
            match = _AXIS.fullmatch(item.strip())
            if match is None or match[1] in sizes or not int(match[2]):
                raise LayoutError(f"{text!r} is not a mesh: give each axis once and at least 1, as in pp=2,dp=3,tp=2")
            sizes[match[1]] = int(match[2])
        target = cls(**sizes)
        if target.world > _MOST:
            raise LayoutError(f"{text!r} is a mesh of {target.world} ranks; at most {_MOST} can be planned")
        return target


@dataclass(frozen=True, slots=True, kw_only=True)
class Homes:
    """Where tensors live. blocks: path of the numbered modules, "" for none; count: how many there are.

    last: those of the last stage; whole: those not cut; guessed: those outside the blocks that are assigned to the
    first stage for want of better knowledge. All by parameter, which an optimizer's tensors follow.
    """

    blocks: str = ""
    count: int = 0
    last: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    guessed: frozenset[str] = field(default_factory=frozenset)


def stage_of_block(block: int, blocks: int, stages: int) -> int:
    """Return the stage of a block: stages are contiguous runs whose lengths differ by at most one."""
    return block * stages // blocks


def run_of(length: int, ranks: int, index: int) -> tuple[int, int]:
    """Return the half-open run of a dim that one of `ranks` holds: of equal length, the last ones shorter or empty."""
    run = -(-length // ranks)
    return min(index * run, length), min((index + 1) * run, length)


def parameter_of(key: str) -> str:
    """Return the parameter or buffer that a tensor of the state belongs to, by its name in the model.

    An averaged model that a script keeps has the model's own names; of other things it keeps the last key is the name.
    """
    if key.startswith(_OPTIMIZER):
        return key.removeprefix(_OPTIMIZER).rpartition("/")[0]
    if key.startswith(_EXTRA):
        return key.rpartition("/")[2].removeprefix("module.")
    return key.removeprefix(_MODEL)


def find_homes(
    specs: Iterable[TensorSpec],
    *,
    blocks: str | None = None,
    last: Sequence[str] = (),
    stages: Sequence[Collection[str]] = (),
    whole: Collection[str] = (),
) -> Homes:
    """Return where tensors live.

    blocks: the path of the blocks, None to find it. last: patterns of names that come after the blocks. stages: the
    keys that each stage of the mesh that wrote the state held, if it had several; whole: keys that it did not cut.
    LayoutError for a path without numbered modules.
    """
    sizes: dict[str, int] = defaultdict(int)
    for spec in specs:
        sizes[parameter_of(spec.key)] += spec.box.numel * spec.itemsize
    path, count = _blocks(sizes, blocks)
    outside = [name for name in sizes if block_of(name, path) is None] if path else []
    after = {name for name in outside if any(fnmatch.fnmatchcase(name, pattern) for pattern in last)}
    known: set[str] = set(after)
    if len(stages) > 1:
        first_held, last_held = ({parameter_of(key) for key in held} for held in (stages[0], stages[-1]))
        known |= first_held | last_held
        after |= {name for name in outside if name in last_held and name not in first_held}
    return Homes(
        blocks=path,
        count=count,
        last=frozenset(after),
        whole=frozenset(parameter_of(key) for key in whole),
        guessed=frozenset(name for name in outside if name not in known),
    )


def block_of(name: str, path: str) -> int | None:
    """Return the number of the block that a parameter is in, None if it is in none."""
    if not path or not name.startswith(f"{path}."):
        return None
    number = name[len(path) + 1 :].partition(".")[0]
    return int(number) if number.isdecimal() and number.isascii() and len(number) < 10 else None


def _blocks(sizes: Mapping[str, int], path: str | None) -> tuple[str, int]:
    numbers: dict[str, set[int]] = defaultdict(set)
    held: dict[str, int] = defaultdict(int)
    for name, nbytes in sizes.items():
        parts = name.split(".")
        for place in range(1, len(parts)):
            prefix = ".".join(parts[:place])
            number = block_of(name, prefix)
            if number is not None:
                numbers[prefix].add(number)
                held[prefix] += nbytes
    runs = {prefix: len(seen) for prefix, seen in numbers.items() if seen == set(range(len(seen)))}
    if path is not None:
        if path not in runs:
            there = ", ".join(sorted(runs, key=lambda prefix: -held[prefix])[:5]) or "none"
            raise LayoutError(f"blocks {path!r}: no modules are numbered from 0 there; found: {there}")
        return path, runs[path]
    several = [prefix for prefix, count in runs.items() if count > 1]
    best = min(several, key=lambda prefix: (-held[prefix], len(prefix)), default="")
    return best, runs.get(best, 0)


def boxes_of(
    specs: Iterable[TensorSpec], rank: int, target: MeshSizes, homes: Homes, parameters: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[TensorSpec, Box]]:
    """Yield the part of each tensor that one rank of a mesh holds.

    `parameters` has the shapes of parameters by name: an optimizer's tensor whose shape differs from its parameter's is
    held whole. Within a stage dim 0 is cut into runs over tp, and each of them into runs over dp.
    """
    place = place_of(rank, target)
    staged = bool(homes.blocks) and target.pp > 1
    for spec in specs:
        name = parameter_of(spec.key)
        if staged and _stage(name, homes, target.pp) != place.pp:
            continue
        cuts = [(target.tp, place.tp), (target.dp, place.dp)]
        if not staged and target.pp > 1:
            cuts.insert(0, (target.pp, place.pp))
        box = spec.box
        if spec.shape and name not in homes.whole and parameters.get(name, spec.shape) == spec.shape:
            low, high = 0, spec.shape[0]
            for ranks, index in cuts:
                start, stop = run_of(high - low, ranks, index)
                low, high = low + start, low + stop
            box = Box(start=(low, *box.start[1:]), stop=(high, *box.stop[1:]))
        if box.numel:
            yield spec, box


def check_target(target: MeshSizes, homes: Homes) -> None:
    """Raise LayoutError for more stages than there are blocks."""
    if homes.blocks and target.pp > homes.count:
        raise LayoutError(f"{target}: {target.pp} stages need as many blocks; {homes.blocks!r} has {homes.count}")


def _stage(name: str, homes: Homes, stages: int) -> int:
    block = block_of(name, homes.blocks)
    if block is not None:
        return stage_of_block(block, homes.count, stages)
    return stages - 1 if name in homes.last else 0
