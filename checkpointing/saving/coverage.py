"""Whether rank manifests make up a checkpoint: the leader's check before a commit (format.md, section 9)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from checkpointing.errors import Incomplete, Inconsistent
from checkpointing.format.manifest import RankManifest
from checkpointing.format.names import Save
from checkpointing.format.tiles import Box, TensorSpec, uncovered


def check_complete(manifests: Sequence[RankManifest], save: Save, world: int) -> None:
    """Raise Incomplete if something is missing, Inconsistent if ranks disagree; else the manifests are complete.

    Several ranks may hold the same box, if its contents are the same.
    """
    ranks = {manifest.rank: manifest for manifest in manifests}
    absent = [rank for rank in range(world) if rank not in ranks]
    if absent:
        raise Incomplete(f"save {save}: no manifest from {_ranks(absent)} of {world}")
    for manifest in manifests:
        if manifest.save != save or manifest.world != world:
            raise Inconsistent(
                f"save {save}: rank {manifest.rank} saved {manifest.save} in a world of {manifest.world}, not {world}"
            )
    if ranks[0].facts is None:
        raise Incomplete(f"save {save}: rank 0 saved no facts")
    other = [rank for rank, manifest in ranks.items() if manifest.facts_digest != ranks[0].facts_digest]
    if other:
        raise Inconsistent(f"save {save}: the facts of {_ranks(other)} are not those of rank 0")
    specs = _specs(manifests, save)
    boxes = _boxes(manifests, save)
    for key, spec in specs.items():
        missing = uncovered(spec, boxes[key])
        if missing is not None:
            raise Incomplete(f"save {save}: no rank saved {key} {missing}, and maybe more of it")


def _specs(manifests: Sequence[RankManifest], save: Save) -> dict[str, TensorSpec]:
    specs: dict[str, tuple[TensorSpec, int]] = {}
    for manifest in manifests:
        for spec in manifest.specs:
            known, rank = specs.setdefault(spec.key, (spec, manifest.rank))
            if known != spec:
                raise Inconsistent(
                    f"save {save}: {spec.key} is {spec.dtype} {list(spec.shape)} on rank {manifest.rank}, "
                    f"{known.dtype} {list(known.shape)} on rank {rank}"
                )
    return {key: spec for key, (spec, _) in specs.items()}


def _boxes(manifests: Sequence[RankManifest], save: Save) -> dict[str, list[Box]]:
    holders: dict[tuple[str, Box], tuple[str, int]] = {}
    boxes = defaultdict(list)
    for manifest in manifests:
        for tile in manifest.tiles:
            digest, rank = holders.setdefault((tile.spec.key, tile.box), (tile.digest, manifest.rank))
            if digest != tile.digest:
                raise Inconsistent(
                    f"save {save}: ranks {rank} and {manifest.rank} hold different contents of {tile.spec.key} "
                    f"{tile.box}: one of the two replicas is wrong"
                )
            boxes[tile.spec.key].append(tile.box)
    return boxes


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
