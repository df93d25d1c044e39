"""The objects that checkpoints and saves under way need: the mark of a collection (format.md, section 13)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from checkpointing.errors import Corrupt, FormatError, NoCheckpoint, StoreNotFound
from checkpointing.format import names
from checkpointing.format.manifest import decode_manifest
from checkpointing.format.refs import Ref, is_superseded
from checkpointing.format.tombstone import Doomed
from checkpointing.reading.naming import history
from checkpointing.reading.reader import read_record
from checkpointing.stores.protocol import Entry, Store

_READERS = 8
_PROBES = 3600.0


class Reach:
    """Finds what is needed; immutable objects are read once and their contents remembered."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._checkpoints: dict[str, dict[str, int]] = {}
        self._saves: dict[str, frozenset[str]] = {}

    def needed(self, ref: Ref, kept: Iterable[str], listed: Iterable[str], *, relisted: bool = False) -> set[str]:
        """Return the names of all objects that must stay: those of `kept` and of saves that may still be committed.

        listed: the names that a listing has shown. relisted: the history will be written anew, so that its present
        parts are not needed. FormatError if a kept checkpoint cannot be read.
        """
        needed = {link.name for link in ref.condemning}
        older = None if relisted else ref.older
        for part in history(self._store, older):
            assert older is not None, "there is a part"
            needed.add(older.name)
            older = part.older
        with ThreadPoolExecutor(_READERS, thread_name_prefix="reach") as pool:
            for sizes in pool.map(self.objects, kept):
                needed.update(sizes)
            for objects in pool.map(self._save, _open(ref, listed)):
                needed |= objects
        return needed

    def of_dropped(self, checkpoints: Iterable[str]) -> set[str]:
        """Return the objects of checkpoints that may no longer be committed, as far as they exist."""
        needed: set[str] = set()
        for name in checkpoints:
            with contextlib.suppress(FormatError, NoCheckpoint):
                needed.update(self.objects(name))
        return needed

    def objects(self, checkpoint: str) -> dict[str, int]:
        """Return the bytes of every object that a checkpoint needs, by name; FormatError if it cannot be read.

        The record itself, which is small beside the rest, counts as 0 bytes.
        """
        if checkpoint not in self._checkpoints:
            record = read_record(self._store, checkpoint)
            sizes = {record.name: 0}
            for entry in record.manifests:
                sizes[entry.name] = entry.size
                sizes |= self._packs(entry.name)
            self._checkpoints[checkpoint] = sizes
        return self._checkpoints[checkpoint]

    def _save(self, name: str) -> frozenset[str]:
        """Return a save's record or manifest and its packs, as far as can be known: its commit will check again."""
        if name not in self._saves:
            packs: Iterable[str] = ()
            if names.parse_manifest(name):
                try:
                    packs = self._packs(name)
                except FormatError:
                    pass  # it can never be committed
            self._saves[name] = frozenset({name, *packs})
        return self._saves[name]

    def _packs(self, manifest: str) -> dict[str, int]:
        try:
            data = self._store.get(manifest)
        except StoreNotFound as error:
            raise Corrupt(f"{manifest}: is missing") from error
        packs = decode_manifest(data, manifest).packs
        return {names.pack(pack): size for pack, size in packs.items()}


def _open(ref: Ref, listed: Iterable[str]) -> Iterator[str]:
    """Yield the records and manifests of saves that the ref has not superseded."""
    for name in listed:
        record = names.parse_record(name)
        parsed = names.parse_checkpoint(record) if record else names.parse_manifest(name)
        if parsed is not None and not is_superseded(ref, parsed[0]):
            yield name


def condemn(
    entries: Mapping[str, Entry], needed: set[str], *, now: float, grace: float, writing_since: float | None = None
) -> tuple[Doomed, ...]:
    """Return what may be deleted at `now` by the store's clock, in the order of deletion.

    writing_since: when the first of the present writers began, None if there is none; later packs may be theirs.
    """
    doomed = [
        entry
        for entry in entries.values()
        if names.is_collectable(entry.name)
        and entry.name not in needed
        and not is_being_written(entry, writing_since)
        # Probes are kept for an hour at least: a process that opens the store reads its own.
        and now - entry.modified >= (max(grace, _PROBES) if entry.name.startswith(names.PROBE) else grace)
    ]
    doomed.sort(key=lambda entry: (_rank(entry.name), entry.name))
    return tuple(Doomed(name=entry.name, size=entry.size) for entry in doomed)


def is_being_written(entry: Entry, writing_since: float | None) -> bool:
    """Return whether an object may be a pack of a save that is under way and has no manifest yet."""
    return writing_since is not None and entry.modified >= writing_since and names.parse_pack(entry.name) is not None


def _rank(name: str) -> int:
    """Sort records before the objects they name, so that no record is left that looks whole and is not."""
    order = (names.CHECKPOINTS, names.SAVES, names.HISTORY, names.SWEEPS, names.PROBE, names.PACKS)
    return next(place for place, prefix in enumerate(order) if name.startswith(prefix))
