"""What the leader does: fence off its predecessors, and commit saves (format.md, section 9).

What to do about a ref is decided in `checkpointing.format.refs`; here it is carried out, through lost responses.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from checkpointing.errors import Fenced, Incomplete, Inconsistent, StoreError, StoreNotFound, Superseded
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
    decode_ref,
    encode_ref,
    fenced_ref,
)
from checkpointing.saving.coverage import check_complete
from checkpointing.stores.protocol import Store, create

_READERS = 8
_SWAPS = 32  # each one lost means that somebody else's was not
_LOST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A checkpoint that `latest` points to, or has pointed to. moved: whether this call moved it."""

    checkpoint: str
    root: str
    totals: Totals
    ref: Ref
    moved: bool


def fence(store: Store, generation: int) -> Ref:
    """Put `generation` into `latest`, its target unchanged, and return the ref.

    Each generation's leader calls this before its first step. Fenced when a newer generation was there.
    """
    _check_generation(generation)
    verdict, ref = _move(
        store,
        lambda ref: decide_fence(ref, generation),
        lambda ref, write_id: fenced_ref(ref, generation, write_id),
    )
    if verdict is Verdict.FENCED:
        raise _fenced(store, ref, generation)
    return ref


def commit(store: Store, *, step: int, made_in: int, attempt: int, committed_in: int, world: int) -> Committed:
    """Make a save that all ranks have written the newest checkpoint.

    Incomplete when ranks are still missing; Inconsistent when they disagree; Fenced when a newer generation owns
    `latest`; Superseded when it already points past this save. After StoreError, call it again.
    """
    _check_generation(committed_in)
    save = names.Save(step=step, made_in=made_in, attempt=attempt)
    found = store.read(names.LATEST)
    if found is not None:
        # Only to save work: what counts is the decision under the swap. The record's digest is not known yet.
        ref = decode_ref(found.data, names.LATEST)
        if ref.generation > committed_in and names.checkpoint(save, committed_in) not in ref.committed:
            raise _fenced(store, ref, committed_in)
    manifests, entries = _read_manifests(store, save, world)
    check_complete(manifests, save, world)
    _check_packs(store, manifests)
    mine = make_record(manifests, entries, committed_in=committed_in, write_id=secrets.token_hex(16))
    data = create(store, mine.name, encode_record(mine))
    record = _same(mine, data)
    digest = hexdigest(data)
    verdict, ref = _move(
        store,
        lambda ref: decide_commit(ref, save, committed_in, digest),
        lambda ref, write_id: committed_ref(ref, save, committed_in, digest, write_id),
    )
    if verdict is Verdict.FENCED:
        raise _fenced(store, ref, committed_in)
    if verdict is Verdict.SUPERSEDED:
        raise Superseded(
            f"store {store.url}: save {save} is not committed: latest is at step {ref.step}, made in generation "
            f"{ref.made_in}, which comes after it"
        )
    return Committed(
        checkpoint=record.checkpoint, root=record.root, totals=record.totals, ref=ref, moved=verdict is Verdict.MOVE
    )


def _move(
    store: Store, decide: Callable[[Ref | None], Verdict], build: Callable[[Ref | None, str], Ref]
) -> tuple[Verdict, Ref]:
    """Swap the ref as decided, and return the verdict with the ref that is there because of it."""
    write_id = secrets.token_hex(16)
    lost: list[StoreError] = []
    for _ in range(_SWAPS):
        found = store.read(names.LATEST)
        ref = None if found is None else decode_ref(found.data, names.LATEST)
        if ref is not None and ref.write_id == write_id:
            return Verdict.MOVE, ref  # the swap whose response was lost
        verdict = decide(ref)
        if verdict is not Verdict.MOVE:
            assert ref is not None, "an absent ref refuses nobody"
            return verdict, ref
        moved = build(ref, write_id)
        try:
            if store.compare_and_swap(names.LATEST, found.token if found else None, encode_ref(moved)):
                return verdict, moved
        except StoreError as error:
            lost.append(error)
            if len(lost) == _LOST:
                raise
    raise StoreError(f"store {store.url}: {_SWAPS} swaps of {names.LATEST} lost against others; try again")


def _read_manifests(store: Store, save: names.Save, world: int) -> tuple[list[RankManifest], list[ManifestEntry]]:
    def read(rank: int) -> tuple[RankManifest, ManifestEntry] | None:
        name = names.manifest(save, rank)
        try:
            data = store.get(name)
        except StoreNotFound:
            return None
        return decode_manifest(data, name), ManifestEntry(name=name, digest=hexdigest(data), size=len(data))

    if world < 1:
        raise ValueError(f"a world of {world} has no ranks")
    with ThreadPoolExecutor(min(_READERS, world), thread_name_prefix="manifests") as pool:
        found = [pair for pair in pool.map(read, range(world)) if pair is not None]
    return [manifest for manifest, _ in found], [entry for _, entry in found]


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
    # Through JSON once, so that tuples in the facts compare as the lists they become.
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
