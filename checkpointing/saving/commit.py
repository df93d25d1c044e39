"""The leader's part: it fences off its predecessors, and commits saves (format.md, section 9).

`checkpointing.format.refs` decides what to do about a ref; here it is carried out, in spite of lost responses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from checkpointing.errors import (
    Collecting,
    Fenced,
    Incomplete,
    Inconsistent,
    StoreError,
    StoreNotFound,
    Superseded,
)
from checkpointing.format import names
from checkpointing.format.encoding import hexdigest
from checkpointing.format.manifest import RankManifest, decode_manifest
from checkpointing.format.record import ManifestEntry, Record, Totals, decode_record, encode_record, make_record
from checkpointing.format.refs import (
    Ref,
    Verdict,
    committed_ref,
    decide_commit,
    decide_fence,
    fenced_ref,
    is_superseded,
    spill,
)
from checkpointing.reading.naming import committed, read_versioned
from checkpointing.reading.pending_deletions import condemned
from checkpointing.saving.coverage import check_complete
from checkpointing.saving.ref_update import move, write_history
from checkpointing.stores.protocol import Store, create, decides_creations

_READERS = 8
_CHECKS = 8  # each further one means that a sweep began meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A checkpoint that `latest` points to, or has pointed to."""

    checkpoint: str
    """Its name."""
    root: str
    """Digest over all its tiles, in hex."""
    totals: Totals
    """Its tensors, its distinct tiles and the bytes of these."""
    ref: Ref
    """The ref `latest` as it is now."""
    moved: bool
    """Whether this call moved `latest`."""


def fence(store: Store, generation: int) -> Ref:
    """Put `generation` into `latest`, its target unchanged, and return the ref.

    Each generation's leader calls this before its first step. Fenced if a newer generation was there.
    """
    _check_generation(generation)
    verdict, ref = move(
        store,
        lambda ref: decide_fence(ref, generation),
        lambda ref, write_id: fenced_ref(ref, generation, write_id),
        shadow=True,
    )
    assert ref is not None, "an absent ref refuses nobody"
    if verdict is Verdict.FENCED:
        raise _fenced(store, ref, generation)
    return ref


def commit(store: Store, *, step: int, made_in: int, attempt: int, committed_in: int, world: int) -> Committed:
    """Make a save that all ranks have written the newest checkpoint.

    Incomplete if ranks are still missing; Inconsistent if they disagree; Fenced if a newer generation owns `latest`;
    Superseded if it already points past this save; Collecting if a sweep has condemned objects that it needs. After
    StoreError, call it again.
    """
    _check_generation(committed_in)
    save = names.Save(step=step, made_in=made_in, attempt=attempt)
    for _ in range(_CHECKS):
        verdict, ref, record = _try(store, save, committed_in, world)
        if verdict is Verdict.RECHECK:
            continue
        assert ref is not None, "an absent ref refuses nobody"
        if verdict is Verdict.FENCED:
            raise _fenced(store, ref, committed_in)
        if verdict is Verdict.SUPERSEDED and record.checkpoint not in committed(store, ref):
            raise _superseded(store, ref, save)
        return Committed(
            checkpoint=record.checkpoint, root=record.root, totals=record.totals, ref=ref, moved=verdict is Verdict.MOVE
        )
    raise StoreError(f"store {store.url}: {_CHECKS} sweeps began while save {save} was committed; try again")


def _try(store: Store, save: names.Save, committed_in: int, world: int) -> tuple[Verdict, Ref | None, Record]:
    """Check that everything the save needs is there, then move the ref if no sweep has begun since."""
    # The order matters: what is found after `sweeps` was read stays until it changes (format.md, section 13).
    ref, _ = read_versioned(store)
    checked = ref.sweeps if ref is not None else 0
    if ref is not None and names.checkpoint(save, committed_in) not in ref.committed:
        # This only saves work: what counts is the decision under the swap.
        if ref.generation > committed_in:
            raise _fenced(store, ref, committed_in)
        if is_superseded(ref, save) and names.checkpoint(save, committed_in) not in committed(store, ref):
            raise _superseded(store, ref, save)
    chosen = _manifest_names(store, save, committed_in, world)
    manifests, entries = _read_manifests(store, chosen)
    check_complete(manifests, save, world)
    _check_condemned(store, ref, manifests, entries)
    _check_packs(store, manifests)
    mine = make_record(manifests, entries, committed_in=committed_in, write_id=secrets.token_hex(16))
    data = create(store, mine.name, encode_record(mine))
    if not decides_creations(store) and decode_record(data, mine.name).manifests != mine.manifests:
        # Another commit has just chosen other ones of the manifests that ranks have written twice: its choice counts.
        return Verdict.RECHECK, ref, mine
    record = _same(mine, data)
    digest = hexdigest(data)

    def build(ref: Ref | None, write_id: str) -> Ref:
        moved, old = spill(committed_ref(ref, save, committed_in, digest, write_id))
        return dataclasses.replace(moved, older=write_history(store, old, moved.older)) if old else moved

    verdict, ref = move(store, lambda ref: decide_commit(ref, save, committed_in, digest, checked), build)
    return verdict, ref, record


def _check_condemned(
    store: Store, ref: Ref | None, manifests: list[RankManifest], entries: list[ManifestEntry]
) -> None:
    if ref is None or not ref.condemning:
        return
    needed = {entry.name for entry in entries} | {names.pack(pack) for m in manifests for pack in m.packs}
    going = sorted(needed & condemned(store, ref))
    if going:
        raise Collecting(
            f"store {store.url}: save {manifests[0].save} is not committed: a collection that is under way will delete "
            f"{going[0]} and {len(going) - 1} more of its objects. Save again, or try again when the collection is over"
        )


def _manifest_names(store: Store, save: names.Save, committed_in: int, world: int) -> list[str]:
    """Return the name of each rank's manifest, as far as it is known.

    If names are unique, a rank that came back may have written several, each as good as the others: those of the record
    are taken if it is already there, else the first by name.
    """
    if world < 1:
        raise ValueError(f"a world of {world} has no ranks")
    if decides_creations(store):
        return [names.manifest(save, rank) for rank in range(world)]
    name = names.record(names.checkpoint(save, committed_in))
    with contextlib.suppress(StoreNotFound):
        return [entry.name for entry in decode_record(store.get(name), name).manifests]
    by_rank: dict[int, str] = {}
    for name in store.list(names.manifests(save)):
        parsed = names.parse_manifest(name)
        if parsed is not None and parsed[1] < world:
            by_rank.setdefault(parsed[1], name)
    return [by_rank[rank] for rank in sorted(by_rank)]


def _read_manifests(store: Store, chosen: list[str]) -> tuple[list[RankManifest], list[ManifestEntry]]:
    def read(name: str) -> tuple[RankManifest, ManifestEntry] | None:
        try:
            data = store.get(name)
        except StoreNotFound:
            return None
        return decode_manifest(data, name), ManifestEntry(name=name, digest=hexdigest(data), size=len(data))

    with ThreadPoolExecutor(max(1, min(_READERS, len(chosen))), thread_name_prefix="manifests") as pool:
        pairs = [pair for pair in pool.map(read, chosen) if pair is not None]
    return [manifest for manifest, _ in pairs], [entry for _, entry in pairs]


def _check_packs(store: Store, manifests: list[RankManifest]) -> None:
    def check(item: tuple[str, tuple[int, int]]) -> None:
        pack, (size, rank) = item
        try:
            there = store.size(names.pack(pack))
        except StoreNotFound:
            raise Incomplete(f"{names.pack(pack)} of rank {rank} is not in the store") from None
        if there != size:
            raise Inconsistent(f"{names.pack(pack)} of rank {rank} has {there} bytes, its manifest says {size}")

    packs = {pack: (size, manifest.rank) for manifest in manifests for pack, size in manifest.packs.items()}
    if packs:
        with ThreadPoolExecutor(min(_READERS, len(packs)), thread_name_prefix="packs") as pool:
            list(pool.map(check, packs.items()))


def _same(mine: Record, data: bytes) -> Record:
    there = decode_record(data, mine.name)
    # Encoded as JSON and decoded once, so that tuples in the facts compare as the lists they become.
    if dataclasses.replace(there, write_id="") != dataclasses.replace(
        decode_record(encode_record(mine), mine.name), write_id=""
    ):
        raise Inconsistent(f"{mine.name}: is there already and says something else of this save; use a new attempt")
    return there


def _check_generation(generation: int) -> None:
    if isinstance(generation, bool) or not isinstance(generation, int) or not 0 <= generation < 1 << 63:
        raise ValueError(f"a generation is a whole number from 0, not {generation!r}")


def _fenced(store: Store, ref: Ref, generation: int) -> Fenced:
    return Fenced(
        f"store {store.url}: generation {ref.generation} owns {names.LATEST}; generation {generation} may not move it "
        "any more. A newer leader will commit what is left to commit."
    )


def _superseded(store: Store, ref: Ref, save: names.Save) -> Superseded:
    return Superseded(
        f"store {store.url}: save {save} is not committed: latest is at step {ref.step}, made in generation "
        f"{ref.made_in}, which comes after it"
    )
