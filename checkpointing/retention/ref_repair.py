"""Writes a damaged or lost `refs/latest` anew, from what the store still has (format.md, section 9)."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
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
from checkpointing.reading.following import place
from checkpointing.reading.naming import committed, history, read_newest
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
    Nothing is deleted. KeepRefused if there is nothing to repair from; NewerFormat if only a newer version may repair;
    ValueError for a generation that no ref can have.
    """
    if not 0 <= generation < 1 << 63:
        raise ValueError(f"a generation is a whole number from 0, below 2**63, not {generation!r}")
    for _ in range(_TRIES):
        try:
            versioned = read_newest(store)
        except Tampered as error:
            # What it was read as stands for nothing; it is swapped all the same.
            versioned = Versioned(data=b"", token=str(error.token))
        ref = _ref(versioned)
        if ref is not None and _is_linked(store, ref):
            return ref
        base = ref or _shadow(store)
        wholes, tombstones = _wholes(store), _tombstones(store)
        if versioned is None and base is None and not wholes:
            raise KeepRefused(f"store {store.url}: there is no ref and no checkpoint here; nothing was changed")
        chosen = _committed(store, base, wholes, newer=ref is None)
        rebuilt = _rebuild(store, base, chosen, tombstones, generation)
        data = encode_ref(rebuilt)
        if store.compare_and_swap(names.LATEST, versioned.token if versioned is not None else None, data):
            leave_shadow(store, data)
            return rebuilt
    raise StoreError(f"store {store.url}: somebody else writes {names.LATEST}; look at it, then try again")


def _ref(versioned: Versioned | None) -> Ref | None:
    """Return the ref if it can be read, though what it links to may not; NewerFormat."""
    try:
        return decode_ref(versioned.data, names.LATEST) if versioned is not None else None
    except NewerFormat:
        raise
    except FormatError:
        return None


def _is_linked(store: Store, ref: Ref) -> bool:
    """Return whether all that a ref links to is intact."""
    try:
        committed(store, ref)
        condemned(store, ref)
    except FormatError:
        return False
    return True


def _shadow(store: Store) -> Ref | None:
    try:
        return decode_ref(store.get(names.SHADOW), names.SHADOW)
    except (FormatError, StoreNotFound):
        return None


def _wholes(store: Store) -> list[_Whole]:
    """Return all whole records."""
    wholes = []
    records = list(store.list(names.CHECKPOINTS))
    # A record is written after its packs, so that a later listing shows them: one request each would take days.
    packs = {entry.name: entry.size for entry in store.entries(names.PACKS)}
    for name in records:
        checkpoint = names.parse_record(name)
        whole = _whole(store, checkpoint, packs) if checkpoint else None
        if whole is not None:
            wholes.append(whole)
    return wholes


def _committed(store: Store, base: Ref | None, wholes: Iterable[_Whole], *, newer: bool) -> list[_Whole]:
    """Return what was committed, as far as `base` says, newest first, one for each step of a generation.

    The rest are records of commits that were refused, or died, and of checkpoints that a collection has dropped. newer:
    later checkpoints than the newest of `base` may have been committed since. Without a base all count.
    """
    listed, cut = list(base.committed) if base is not None else [], False
    try:
        for part in history(store, base.older if base is not None else None):
            listed += part.checkpoints
    except FormatError:
        cut = True
    known = {*listed, *(base.protected if base is not None else ())}

    def may_be_committed(checkpoint: str) -> bool:
        if checkpoint in known or base is None:
            return True
        if not listed or _place(checkpoint) > _place(listed[0]):
            return newer
        return cut and _place(checkpoint) < _place(listed[-1])

    best: dict[tuple[int, int], _Whole] = {}
    for whole in sorted(wholes, key=lambda whole: (whole.record.checkpoint in known, whole.record.committed_in)):
        if may_be_committed(whole.record.checkpoint):
            best[_place(whole.record.checkpoint)] = whole
    return [best[own] for own in sorted(best, reverse=True)]


def _place(checkpoint: str) -> tuple[int, int]:
    """Return (made_in, step), in whose order checkpoints are committed."""
    return place(checkpoint)[:2]


def _whole(store: Store, checkpoint: str, there: Mapping[str, int]) -> _Whole | None:
    try:
        record = read_record(store, checkpoint)
        manifests = read_manifests(store, record.manifests)
        check_record(record, manifests)
        packs = {names.pack(pack): size for manifest in manifests for pack, size in manifest.packs.items()}
        if any(there.get(name) != size for name, size in packs.items()):
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
