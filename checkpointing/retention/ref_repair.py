"""Writes a damaged or lost `refs/latest` anew, from what the store still has (format.md, section 9)."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from checkpointing.errors import (
    FormatError,
    KeepRefused,
    NewerFormat,
    NoCheckpoint,
    StoreError,
    StoreNotFound,
    Tampered,
)
from checkpointing.format import names
from checkpointing.format.encoding import hexdigest
from checkpointing.format.record import Record
from checkpointing.format.refs import Quarantined, Ref, decode_ref, encode_ref
from checkpointing.format.tombstone import decode_tombstone
from checkpointing.reading.naming import committed
from checkpointing.reading.pending_deletions import condemned
from checkpointing.reading.reader import check_record, read_manifests, read_record
from checkpointing.retention.store_clock import store_time
from checkpointing.retention.sweep import QUARANTINE
from checkpointing.saving.ref_update import leave_shadow, relist
from checkpointing.stores.protocol import Store, Versioned

_TRIES = 8
_SWEEPS = 1 << 20  # more than can have begun since the shadow was written


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    """A record whose manifests and packs are all there, and their names."""

    record: Record
    digest: str
    objects: frozenset[str]


def repair_latest(store: Store, *, generation: int = 0) -> Ref:
    """Write `latest` anew if it, its history or a tombstone cannot be read; return the ref that is then there.

    generation: that of the run that goes on, if known: the fence is set to it, or to a newer one that the store shows.
    Nothing is deleted. KeepRefused if there is nothing to repair from; NewerFormat if only a newer version may repair.
    """
    for _ in range(_TRIES):
        try:
            versioned = store.read(names.LATEST)
        except Tampered as error:
            # What it was read as stands for nothing; it is swapped all the same.
            versioned = Versioned(data=b"", token=str(error.token))
        base, sound = _base(store, versioned)
        if sound and base is not None:
            return base
        wholes, tombstones = _wholes(store), _tombstones(store)
        if versioned is None and base is None and not wholes:
            raise KeepRefused(f"store {store.url}: there is no ref and no checkpoint here; nothing was changed")
        rebuilt = _rebuild(store, base, wholes, tombstones, generation)
        data = encode_ref(rebuilt)
        if store.compare_and_swap(names.LATEST, versioned.token if versioned is not None else None, data):
            leave_shadow(store, data)
            return rebuilt
    raise StoreError(f"store {store.url}: somebody else writes {names.LATEST}; look at it, then try again")


def _base(store: Store, versioned: Versioned | None) -> tuple[Ref | None, bool]:
    """Return the better of ref and shadow, and whether it is the ref and all its links are intact."""
    if versioned is not None:
        try:
            ref = decode_ref(versioned.data, names.LATEST)
        except NewerFormat:
            raise
        except FormatError:
            pass
        else:
            try:
                committed(store, ref)
                condemned(store, ref)
            except FormatError:
                return ref, False
            return ref, True
    try:
        return decode_ref(store.get(names.SHADOW), names.SHADOW), False
    except (FormatError, StoreNotFound):
        return None, False


def _wholes(store: Store) -> list[_Whole]:
    """Return all whole records, newest first, one for each step of a generation."""
    wholes = []
    for name in store.list(names.CHECKPOINTS):
        checkpoint = names.parse_record(name)
        whole = _whole(store, checkpoint) if checkpoint else None
        if whole is not None:
            wholes.append(whole)
    wholes.sort(key=lambda whole: (*_place(whole.record), whole.record.committed_in), reverse=True)
    best: dict[tuple[int, int], _Whole] = {}
    for whole in wholes:
        best.setdefault(_place(whole.record), whole)
    return list(best.values())


def _place(record: Record) -> tuple[int, int]:
    return record.save.made_in, record.save.step


def _whole(store: Store, checkpoint: str) -> _Whole | None:
    try:
        record = read_record(store, checkpoint)
        manifests = read_manifests(store, record.manifests)
        check_record(record, manifests)
        packs = {names.pack(pack): size for manifest in manifests for pack, size in manifest.packs.items()}
        if any(store.size(name) != size for name, size in packs.items()):
            return None
        digest = hexdigest(store.get(record.name))
    except (FormatError, NoCheckpoint, StoreNotFound):
        return None
    return _Whole(record=record, digest=digest, objects=frozenset({record.name, *(m.name for m in manifests), *packs}))


def _tombstones(store: Store) -> dict[str, tuple[str, frozenset[str]]]:
    """Return digest and objects of every tombstone that can be read."""
    tombstones = {}
    for name in filter(names.is_tombstone, store.list(names.SWEEPS)):
        try:
            data = store.get(name)
            objects = frozenset(doomed.name for doomed in decode_tombstone(data, name).objects)
        except (FormatError, StoreNotFound):
            continue
        tombstones[name] = hexdigest(data), objects
    return tombstones


def _rebuild(
    store: Store,
    base: Ref | None,
    wholes: Iterable[_Whole],
    tombstones: dict[str, tuple[str, frozenset[str]]],
    generation: int,
) -> Ref:
    going = {name for _, objects in tombstones.values() for name in objects}
    listed = set(base.committed) if base is not None else set()
    kept = [
        whole
        for whole in wholes
        if whole.record.name not in going and (whole.record.checkpoint in listed or not whole.objects & going)
    ]
    there = {whole.record.checkpoint for whole in kept}
    base = base or Ref(generation=0)
    earlier, older = relist(store, tuple(whole.record.checkpoint for whole in kept[1:]))
    until = store_time(store) + QUARANTINE
    latest = kept[0] if kept else None
    return Ref(
        generation=max(generation, base.generation, *_generations(store), 0),
        checkpoint=latest.record.checkpoint if latest else None,
        record_digest=latest.digest if latest else None,
        step=latest.record.save.step if latest else None,
        made_in=latest.record.save.made_in if latest else None,
        earlier=earlier,
        older=older,
        verified=base.verified if base.verified and base.verified.checkpoint in there else None,
        vetted=base.vetted if base.vetted and base.vetted.checkpoint in there else None,
        distrusted=base.distrusted,
        tags={tag: target for tag, target in base.tags.items() if target.checkpoint in there},
        pins={checkpoint: reason for checkpoint, reason in base.pins.items() if checkpoint in there},
        sweeps=base.sweeps + _SWEEPS,
        quarantined=tuple(
            Quarantined(name=name, digest=digest, until=until) for name, (digest, _) in tombstones.items()
        ),
        write_id=secrets.token_hex(16),
    )


def _generations(store: Store) -> set[int]:
    """Return the generations that occur in names in the store."""
    generations = set()
    for prefix in (names.CHECKPOINTS, names.SAVES):
        for name in store.list(prefix):
            parsed = names.parse_checkpoint(names.parse_record(name)) or names.parse_manifest(name)
            if parsed is not None:
                generations.add(parsed[0].made_in)
                generations.update({parsed[1]} if prefix == names.CHECKPOINTS else ())
    return generations
