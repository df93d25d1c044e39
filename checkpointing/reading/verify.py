"""Checks every object of a store: packs by themselves, then each link from refs down to tiles."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from checkpointing.errors import FormatError, StoreError, StoreNotFound
from checkpointing.format import names
from checkpointing.format.encoding import hexdigest
from checkpointing.format.history import History, decode_history
from checkpointing.format.manifest import RankManifest, decode_manifest
from checkpointing.format.record import Record, decode_record
from checkpointing.format.refs import Older, Ref, decode_ref
from checkpointing.format.tombstone import decode_tombstone
from checkpointing.reading.findings import Fault, Finding, from_error
from checkpointing.reading.naming import history, read_versioned
from checkpointing.reading.packcheck import Use, Users, check_pack, users_of, uses
from checkpointing.reading.reader import check_record, read_manifests
from checkpointing.stores.protocol import Store

__all__ = ["Fault", "Finding", "Progress", "verify"]

_THREADS = 4
_RECENT = 8  # manifests whose uses of packs are kept for the findings of packs that are checked next
# Left by probes of the store and by a register's decisions, or there only while a reader or writer is at work.
_IGNORED = (names.PROBE, names.CLAIMS, names.ANNOUNCEMENTS)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a check has come, in bytes."""

    done: int
    total: int


def verify(
    store: Store, progress: Callable[[Progress], None] | None = None, *, threads: int = _THREADS
) -> Iterator[Finding]:
    """Read every byte in the store and yield its faults, those of refs and records first.

    Saves and packs that no committed checkpoint needs are read as well; their presence is no fault. Objects that vanish
    meanwhile are not reported missing unless a committed checkpoint needs them. Each of the `threads` holds a few MiB
    at a time. `progress` may be called from any of them, but by one at a time.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        yield from _Verifier(store, progress or (lambda _: None), pool, threads).run()


class _Verifier:
    def __init__(
        self, store: Store, progress: Callable[[Progress], None], pool: ThreadPoolExecutor, threads: int
    ) -> None:
        self._store = store
        self._progress = progress
        self._pool = pool
        self._threads = threads
        self._lock = threading.Lock()
        self._done = 0
        self._total = 0
        self._sizes: dict[str, int] = {}
        self._refs: dict[str, Ref] = {}
        self._records: dict[str, Record] = {}
        self._manifests: set[str] = set()
        self._digests: dict[str, str] = {}
        self._history: dict[str, History] = {}
        self._committed: set[str] = set()
        self._users: dict[str, Users] = defaultdict(Users)
        self._recent = functools.lru_cache(maxsize=_RECENT)(self._uses)
        self._needed: set[str] | None = None

    def run(self) -> Iterator[Finding]:
        self._sizes = {entry.name: entry.size for entry in self._store.entries("")}
        self._total = sum(self._sizes.values())
        documents = [name for name in self._sizes if _decoder(name)]
        for findings in self._each(self._document, sorted(documents, key=_first)):
            yield from findings
        self._committed = {checkpoint for ref in self._refs.values() for checkpoint in ref.committed}
        yield from self._ref_missing()
        yield from self._lasting(self._chains())
        yield from self._lasting(self._links())
        yield from self._lasting(self._packs_missing())
        for findings in self._each(self._pack, [pack for name in self._sizes if (pack := names.parse_pack(name))]):
            yield from findings
        for name in self._sizes:
            if not (_decoder(name) or names.parse_pack(name)):
                self._step(self._sizes[name])
                if not name.startswith(_IGNORED):
                    yield Finding(object=name, fault=Fault.UNEXPECTED, detail="is no object of this format")

    def _each(self, check: Callable[[str], _T], items: Iterable[str]) -> Iterator[_T]:
        """Yield the results in order, working a few items ahead of the consumer."""
        left = iter(items)
        ahead: deque[Future[_T]] = deque(
            self._pool.submit(check, item) for item in itertools.islice(left, 2 * self._threads)
        )
        try:
            while ahead:
                result = ahead.popleft().result()
                ahead.extend(self._pool.submit(check, item) for item in itertools.islice(left, 1))
                yield result
        finally:
            for future in ahead:
                future.cancel()

    def _step(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            self._progress(Progress(done=self._done, total=max(self._done, self._total)))

    def _document(self, name: str) -> list[Finding]:
        decoder = _decoder(name)
        assert decoder is not None
        try:
            data = self._store.get(name)
            digest, document = hexdigest(data), decoder(data, name)
        except StoreNotFound:
            with self._lock:
                self._total -= self._sizes.pop(name)  # gone since it was listed; whether it is needed is checked later
            return []
        except (FormatError, StoreError) as error:
            self._step(self._sizes[name])
            parsed = names.parse_manifest(name)
            return [from_error(name, error, rank=parsed[1] if parsed else None)]
        self._digests[name] = digest
        if isinstance(document, Ref):
            if name.startswith(names.REFS):  # the shadow may be old: it only has to be whole
                self._refs[name] = document
        elif isinstance(document, History):
            self._history[name] = document
        elif isinstance(document, Record):
            self._records[name] = document
        elif isinstance(document, RankManifest):
            self._keep(name, document)
        self._step(self._sizes[name])
        return []

    def _keep(self, name: str, manifest: RankManifest) -> None:
        users = users_of(manifest)
        with self._lock:
            self._manifests.add(name)
            for pack, own in users.items():
                there = self._users[pack]
                there.manifests.append(name)
                there.sizes |= own.sizes
                there.tiles += own.tiles

    def _uses(self, name: str) -> dict[str, list[Use]]:
        """Return how a manifest uses packs, by id; nothing if it cannot be read any more."""
        by_pack: dict[str, list[Use]] = defaultdict(list)
        try:
            for use in uses(decode_manifest(self._store.get(name), name)):
                by_pack[use.pack].append(use)
        except (FormatError, StoreError):
            pass  # it could be read before: only details of a finding are lacking
        return by_pack

    def _load(self, manifests: Sequence[str], pack: str) -> list[Use]:
        return [use for name in manifests for use in self._recent(name).get(pack, ())]

    def _ref_missing(self) -> Iterator[Finding]:
        """Report that the ref is gone where there are records: without it none of them can be found."""
        # The first commit of all may have made it since the listing.
        if self._records and names.LATEST not in self._sizes and self._store.read(names.LATEST) is None:
            detail = f"there are records of {len(self._records)} checkpoints; `elastic3d ckpt repair` writes it anew"
            yield _missing(names.LATEST, detail, ())

    def _lasting(self, findings: Iterable[Finding]) -> Iterator[Finding]:
        """Yield the findings that still hold: a live run commits and collects after the listing and the ref were read.

        What was written since is not read, and what is no longer committed may be gone.
        """
        for finding in findings:
            if finding.fault is not Fault.MISSING:
                yield finding
            elif not self._is_there(finding.object):
                needing = set(finding.checkpoints) if finding.checkpoints else {finding.object}
                if self._needed is None:
                    self._needed = self._needed_now()
                if not self._needed:
                    yield finding
                elif left := needing & self._needed:
                    yield dataclasses.replace(finding, checkpoints=tuple(sorted(left & set(finding.checkpoints))))

    def _is_there(self, name: str) -> bool:
        try:
            self._store.size(name)
        except StoreError:
            return False
        return True

    def _needed_now(self) -> set[str]:
        """Return what the ref lists by now, and the objects that it links to; nothing if that cannot be read."""
        try:
            ref, _ = read_versioned(self._store)
            if ref is None:
                return set()
            needed = {*ref.committed, *(link.name for link in ref.condemning)}
            older = ref.older
            for part in history(self._store, older):
                assert older is not None, "there is a part"
                needed |= {older.name, *part.checkpoints}
                older = part.older
        except (FormatError, StoreError):
            return set()
        return needed

    def _chains(self) -> Iterator[Finding]:
        """Check the history that refs link to, and their tombstones."""
        for name, ref in self._refs.items():
            for link in ref.condemning:
                yield from self._linked(name, link)
            at, link_to = name, ref.older
            while link_to is not None:
                yield from self._linked(at, link_to)
                part = self._history.get(link_to.name)
                if part is None or self._digests.get(link_to.name) != link_to.digest:
                    break
                self._committed.update(part.checkpoints)
                at, link_to = link_to.name, part.older

    def _linked(self, name: str, link: Older) -> Iterator[Finding]:
        if link.name not in self._sizes:
            yield _missing(link.name, f"{name} names it", ())
        elif self._digests.get(link.name, link.digest) != link.digest:
            yield Finding(object=link.name, fault=Fault.INCONSISTENT, detail=f"is not the one {name} points to")

    def _links(self) -> Iterator[Finding]:
        for checkpoint in sorted(self._committed):
            if names.record(checkpoint) not in self._sizes:
                yield _missing(names.record(checkpoint), "it was committed", (checkpoint,))
        for name, ref in self._refs.items():
            targets = {(target.checkpoint, target.record_digest) for target in ref.tags.values()}
            targets |= {(target.checkpoint, target.record_digest) for target in (ref.verified, ref.vetted) if target}
            if ref.checkpoint is not None and ref.record_digest is not None:
                targets.add((ref.checkpoint, ref.record_digest))
            for checkpoint, digest in sorted(targets):
                if self._digests.get(names.record(checkpoint), digest) != digest:
                    yield Finding(
                        object=names.record(checkpoint),
                        fault=Fault.INCONSISTENT,
                        detail=f"is not the record {name} points to",
                        checkpoints=(checkpoint,),
                    )
        for record_name, record in self._records.items():
            yield from self._record(record_name, record)

    def _record(self, name: str, record: Record) -> Iterator[Finding]:
        damaged = (record.checkpoint,) if record.checkpoint in self._committed else ()
        whole = True
        for rank, entry in enumerate(record.manifests):
            if entry.name not in self._sizes:
                whole = False
                if damaged:
                    yield _missing(entry.name, f"{name} names it", damaged, rank=rank)
            elif entry.name not in self._manifests:
                whole = False  # reported when it was read
            elif self._digests[entry.name] != entry.digest:
                whole = False
                yield Finding(
                    object=entry.name,
                    fault=Fault.INCONSISTENT,
                    detail=f"is not the manifest {name} points to",
                    rank=rank,
                    checkpoints=damaged,
                )
        if whole:
            yield from self._contents(name, record, damaged)

    def _contents(self, name: str, record: Record, damaged: tuple[str, ...]) -> Iterator[Finding]:
        """Check a record against its manifests, which are read once more: those of one checkpoint are in memory."""
        try:
            check_record(record, read_manifests(self._store, record.manifests))
        except StoreError as error:
            yield from_error(name, error, checkpoints=damaged)
        except FormatError as error:
            gone = [entry.name for entry in record.manifests if not self._is_there(entry.name)]
            if not gone:
                yield Finding(object=name, fault=Fault.INCONSISTENT, detail=str(error), checkpoints=damaged)
            elif damaged:
                yield _missing(gone[0], f"{name} names it", damaged)

    def _packs_missing(self) -> Iterator[Finding]:
        for pack, users in self._users.items():
            if names.pack(pack) in self._sizes:
                continue
            hit = self._hit(users.manifests)
            if not hit:
                continue
            first = next(iter(self._load(users.manifests[:1], pack)), None)
            key = first.tile.spec.key if first is not None else None
            detail = f"{users.manifests[0]} keeps {key or 'a tile'} and {len(users.tiles) - 1} more tiles in it"
            rank = first.rank if first is not None else None
            yield _missing(names.pack(pack), detail, hit, rank=rank, pack=pack, tensor=key)

    def _hit(self, manifests: Iterable[str]) -> tuple[str, ...]:
        """Return the committed checkpoints that use any of the manifests."""
        used = set(manifests)
        return tuple(
            sorted(
                record.checkpoint
                for record in self._records.values()
                if record.checkpoint in self._committed and any(entry.name in used for entry in record.manifests)
            )
        )

    def _pack(self, pack: str) -> list[Finding]:
        left = self._sizes[names.pack(pack)]

        def step(nbytes: int) -> None:
            nonlocal left
            left -= nbytes
            self._step(nbytes)

        findings = check_pack(self._store, pack, self._users.get(pack) or Users(), self._load, self._hit, step)
        self._step(max(0, left))
        return findings


def _decoder(name: str) -> Callable[[bytes, str], Any] | None:
    """Return the decoder of the object `name`, None if it is not a document."""
    if name.startswith(names.REFS) or name == names.SHADOW:
        return decode_ref
    if names.is_history(name):
        return decode_history
    if names.is_tombstone(name):
        return decode_tombstone
    if names.parse_record(name):
        return decode_record
    if names.parse_manifest(name):
        return decode_manifest
    return None


def _first(name: str) -> tuple[int, str]:
    """Sort refs before records before manifests."""
    return (0 if name.startswith(names.REFS) else 1 if names.parse_record(name) else 2), name


def _missing(
    name: str,
    detail: str,
    checkpoints: tuple[str, ...],
    *,
    rank: int | None = None,
    pack: str | None = None,
    tensor: str | None = None,
) -> Finding:
    return Finding(
        object=name,
        fault=Fault.MISSING,
        detail=detail,
        rank=rank,
        pack=pack,
        tensor=tensor,
        checkpoints=checkpoints,
    )
