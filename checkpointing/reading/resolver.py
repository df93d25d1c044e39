"""One resolver for all tiers: wanted regions in, verified bytes out.

Only its source knows whether a tile comes from this host's memory, a peer's, a local disk or object storage.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from checkpointing.errors import SourceError, TileLost
from checkpointing.format.tiles import Box, TensorSpec, copy_box, digest, subtract
from checkpointing.reading.catalogue import Catalogue, Failure, Job, Plan, Region
from checkpointing.reading.read_repair import ReadRepair
from checkpointing.reading.sources import LITTLE, Distant, Filling, Offered, Prefetching, TileSource

__all__ = ["Destination", "Failure", "Offered", "Prefetching", "Resolved", "Tally", "TileSource", "resolve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """The good tiles of one source."""

    tiles: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The sources of all tiles, and the failures on the way."""

    sources: Mapping[str, Tally]
    """Tiles and bytes by source."""
    failures: tuple[Failure, ...] = ()
    """Copies that could not be read, or were not as they had been written."""
    repaired: int = 0
    """Number of bad copies that were repaired."""
    unrepaired: tuple[Failure, ...] = ()
    """Copies that a source tried to repair and could not."""


Destination = Callable[[TensorSpec, Box], memoryview]

_BATCH_BYTES = 32 << 20
_BATCHES = 64  # at least, so that the batches in flight stay a small part of the whole
_BATCH_TILES = 256
_GIVEN_UP = 3  # SourceErrors in a row, after which a source is no longer asked


def resolve(
    wanted: Iterable[tuple[TensorSpec, Box]],
    offers: Iterable[Offered],
    sources: Mapping[str, TileSource],
    destination: Destination,
    *,
    in_flight: int = 4,
) -> Resolved:
    """Fill `destination(spec, box)`, a writable buffer of the box's bytes, for every wanted region.

    Each region is assembled from the offered tiles that overlap it; earlier sources are preferred, in the order of
    `sources`, then earlier offers, then those that `Sparing` offers keep back. A tile is fetched once, its digest
    verified, and copied to every region that needs it, or read into its place and verified there; one that fails is
    replaced by other offers for the same elements, and `Repairing` sources are then given the good bytes. All offers
    must belong to one consistent state: the resolver cannot tell steps apart.

    At most `in_flight` batches of up to 32 MiB are under way (less for small plans: 1 MiB, or what a `Distant` source
    wants, or one tile); `destination` is called first, in this thread. SpecMismatch names the tensors offered with
    another shape or dtype, MissingTile a region of which no source has a good copy (buffers may then hold anything).
    """
    catalogue = Catalogue(offers, sources)
    regions = [Region(spec, box) for spec, box in wanted]
    catalogue.check_specs(regions)
    regions = [region for region in regions if region.box.numel]
    failures: list[Failure] = []
    # Missing regions are reported before anything is allocated or fetched.
    plan = catalogue.plan(regions, failures)
    for region in regions:
        region.take(destination(region.spec, region.box))
    tallies = {name: Tally() for name in sources}
    repairs = ReadRepair(sources)
    fetcher = _Fetcher(sources, repairs)
    while plan:
        for job, failure in fetcher.run(plan, in_flight):
            if failure is not None:
                failures.append(failure)
                catalogue.withdraw(job.number)
                continue
            tally = tallies[job.offer.source]
            tallies[job.offer.source] = Tally(tiles=tally.tiles + 1, bytes=tally.bytes + job.offer.nbytes)
            for region in job.regions:
                region.missing = [rest for part in region.missing for rest in subtract(part, job.offer.box)]
        plan = catalogue.plan([region for region in regions if region.missing], failures)
    repairs.finish(regions)
    return Resolved(
        sources=tallies,
        failures=tuple(failures),
        repaired=repairs.repaired,
        unrepaired=tuple(repairs.unrepaired),
    )


_Done = Iterator[tuple[Job, Failure | None]]


class _Fetcher:
    """Fetches, verifies and copies tiles, several batches at a time."""

    def __init__(self, sources: Mapping[str, TileSource], repairs: ReadRepair) -> None:
        self._sources = sources
        self._repairs = repairs
        self._errors = dict.fromkeys(sources, 0)
        self._unreached: set[int] = set()

    def run(self, plan: Plan, in_flight: int) -> _Done:
        """Yield every planned tile once it is in its regions, or has failed."""
        with ThreadPoolExecutor(in_flight, thread_name_prefix="tiles") as pool:
            futures = [pool.submit(self._batch, batch) for batch in _batches(plan, self._sources)]
            try:
                for future in as_completed(futures):
                    yield from future.result()
            finally:
                for future in futures:
                    future.cancel()

    def _batch(self, batch: Sequence[Job]) -> list[tuple[Job, Failure | None]]:
        source = self._sources[batch[0].offer.source]
        run = self._fill(source, batch) if isinstance(source, Filling) else self._fetch(source, batch)
        done = []
        for job, reason in run:
            offer = job.offer
            unreached = job.number in self._unreached
            failure = (
                Failure(source=offer.source, key=offer.spec.key, box=offer.box, reason=reason, unreachable=unreached)
                if reason
                else None
            )
            done.append((job, failure))
        return done

    def _fetch(self, source: TileSource, batch: Sequence[Job]) -> Iterator[tuple[Job, str]]:
        """Yield each tile with the reason why it failed, or ""."""
        if isinstance(source, Prefetching) and self._errors[batch[0].offer.source] < _GIVEN_UP:
            try:
                source.prefetch([job.offer for job in batch])
            except SourceError:
                pass
        for job in batch:
            if self._errors[job.offer.source] >= _GIVEN_UP:
                yield job, self._given_up(job)
                continue
            try:
                data = memoryview(source.fetch(job.offer))
            except SourceError as error:
                yield job, self._failed(job, error)
                continue
            yield job, self._got(job, data, None)

    def _fill(self, source: Filling, batch: Sequence[Job]) -> Iterator[tuple[Job, str]]:
        """Have the source write tiles into their places, if their bytes are contiguous there."""
        if self._errors[batch[0].offer.source] >= _GIVEN_UP:
            yield from ((job, self._given_up(job)) for job in batch)
            return
        buffers, straight = [], []
        for job in batch:
            view = job.straight.view(job.offer.box) if job.straight is not None else None
            straight.append(job.straight if view is not None else None)
            buffers.append(memoryview(bytearray(job.offer.nbytes)) if view is None else view)
        for place, error in source.fill([(job.offer, buffer) for job, buffer in zip(batch, buffers, strict=True)]):
            job = batch[place]
            yield job, self._got(job, buffers[place], straight[place]) if error is None else self._failed(job, error)
            buffers[place] = memoryview(b"")

    def _failed(self, job: Job, error: SourceError) -> str:
        if isinstance(error, TileLost):
            self._repairs.bad(job.offer)
        else:
            self._errors[job.offer.source] += 1
            self._unreached.add(job.number)
        return str(error) or "failed"

    def _given_up(self, job: Job) -> str:
        self._unreached.add(job.number)
        return "given up after several errors in a row"

    def _got(self, job: Job, data: memoryview, already: Region | None) -> str:
        """Verify a tile and copy it to its regions, except the one it is already in; return why it failed, or ""."""
        offer = job.offer
        self._errors[offer.source] = 0
        if data.nbytes != offer.nbytes:
            self._repairs.bad(offer)
            return f"sent {data.nbytes} bytes, not {offer.nbytes}"
        if digest(offer.spec, offer.box, data) != offer.digest:
            self._repairs.bad(offer)
            return "its bytes do not have the digest it was offered with"
        for region in job.regions:
            if region is not already:
                copy_box(data, offer.box, region.buffer, region.box, offer.spec.itemsize)
        self._repairs.good(offer, data)
        return ""


def _batches(plan: Plan, sources: Mapping[str, TileSource]) -> list[list[Job]]:
    """Cut the plan into batches of one source each, with sources taking turns; neighbours in a tensor stay together."""
    part = sum(job.offer.nbytes for job in plan.values()) // _BATCHES
    limits = {}
    for name, asked in sources.items():
        little = asked.little if isinstance(asked, Distant) else LITTLE
        limits[name] = min(_BATCH_BYTES, max(little, part))
    queues: dict[str, list[list[Job]]] = {}
    room: dict[str, int] = {}
    for job in sorted(plan.values(), key=lambda job: (job.offer.spec.key, job.offer.box.start)):
        source, nbytes = job.offer.source, job.offer.nbytes
        batches = queues.setdefault(source, [])
        if not batches or room[source] < nbytes or len(batches[-1]) >= _BATCH_TILES:
            batches.append([])
            room[source] = limits[source]
        batches[-1].append(job)
        room[source] -= nbytes
    turns = itertools.zip_longest(*queues.values())
    return [batch for turn in turns for batch in turn if batch is not None]
