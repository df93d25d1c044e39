"""One resolver for all tiers: wanted regions in, verified bytes out.

Whether a tile comes from this host's memory, a peer's memory, local disk or object storage is its source's business.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from checkpointing.errors import MissingTile, SourceError, SpecMismatch, TileLost
from checkpointing.format.tiles import Box, TensorSpec, copy_box, digest, subtract
from checkpointing.reading.sources import Offered, Prefetching, TileSource

__all__ = ["Destination", "Failure", "Offered", "Prefetching", "Resolved", "Tally", "TileSource", "resolve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What came from one source and was good."""

    tiles: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One tile that a source offered and could not give, or gave with wrong bytes."""

    source: str
    key: str
    box: Box
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Where everything came from, by source, and what failed on the way."""

    sources: Mapping[str, Tally]
    failures: tuple[Failure, ...] = ()


Destination = Callable[[TensorSpec, Box], memoryview]

_BATCH_BYTES = 32 << 20
_BATCH_TILES = 256
_GIVEN_UP = 3  # SourceErrors in a row, after which a source is asked no more


def resolve(
    wanted: Iterable[tuple[TensorSpec, Box]],
    offers: Iterable[Offered],
    sources: Mapping[str, TileSource],
    destination: Destination,
    *,
    in_flight: int = 4,
) -> Resolved:
    """Fill `destination(spec, box)`, a writable buffer of the box's bytes, for every wanted region.

    Each region is put together from the offered tiles that meet it; earlier sources are preferred, in the order of
    `sources`, then earlier offers. A needed tile is fetched once, its digest verified, and copied to every region that
    needs it; one that fails is replaced by other offers for what it would have filled. All offers must belong to one
    consistent state: the resolver cannot tell steps apart.

    At most `in_flight` batches of about 32 MiB are under way; destinations are asked for first, in this thread.
    SpecMismatch names the tensors offered with another shape or dtype, MissingTile a region that no source has a good
    copy of (buffers are then partly filled).
    """
    catalogue = _Catalogue(offers, sources)
    regions = [_Region(spec, box) for spec, box in wanted]
    catalogue.check_specs(regions)
    regions = [region for region in regions if region.box.numel]
    failures: list[Failure] = []
    # What is offered nowhere is said before anything is allocated or fetched.
    plan = catalogue.plan(regions, failures)
    for region in regions:
        region.buffer = destination(region.spec, region.box)
    tallies = {name: Tally() for name in sources}
    fetcher = _Fetcher(sources)
    while plan:
        for number, offer, failure in fetcher.run(plan, in_flight):
            if failure is not None:
                failures.append(failure)
                catalogue.withdraw(number)
                continue
            tally = tallies[offer.source]
            tallies[offer.source] = Tally(tiles=tally.tiles + 1, bytes=tally.bytes + _nbytes(offer))
            for region in plan[number][1]:
                region.missing = [rest for part in region.missing for rest in subtract(part, offer.box)]
        plan = catalogue.plan([region for region in regions if region.missing], failures)
    return Resolved(sources=tallies, failures=tuple(failures))


def _nbytes(offer: Offered) -> int:
    return offer.box.numel * offer.spec.itemsize


class _Region:
    """One wanted box, and the parts of it that are still to be filled."""

    __slots__ = ("box", "buffer", "missing", "spec")

    def __init__(self, spec: TensorSpec, box: Box) -> None:
        self.spec = spec
        self.box = box
        self.buffer = memoryview(b"")
        self.missing = [box]


_Plan = dict[int, tuple[Offered, list[_Region]]]


class _Catalogue:
    """What is on offer: numbered, by tensor, preferred offers first."""

    def __init__(self, offers: Iterable[Offered], sources: Mapping[str, TileSource]) -> None:
        order = {name: place for place, name in enumerate(sources)}
        listed = list(offers)
        unknown = {offer.source for offer in listed} - set(order)
        if unknown:
            raise ValueError(f"tiles are offered by sources that were not given: {', '.join(sorted(unknown))}")
        self._by_key: dict[str, dict[int, Offered]] = defaultdict(dict)
        for number, offer in enumerate(sorted(listed, key=lambda offer: order[offer.source])):
            self._by_key[offer.spec.key][number] = offer
        self._key_of = {number: key for key, numbers in self._by_key.items() for number in numbers}

    def check_specs(self, regions: Sequence[_Region]) -> None:
        """Raise SpecMismatch naming every wanted tensor that is offered as something else."""
        wrong = {}
        for region in regions:
            for offer in self._by_key.get(region.spec.key, {}).values():
                if offer.spec != region.spec:
                    wrong[region.spec.key] = (
                        f"{region.spec.key}: saved {offer.spec.dtype} {list(offer.spec.shape)}, "
                        f"wanted {region.spec.dtype} {list(region.spec.shape)}"
                    )
                    break
        if wrong:
            shown = "; ".join(itertools.islice(wrong.values(), 8)) + ("; ..." if len(wrong) > 8 else "")
            raise SpecMismatch(
                f"{len(wrong)} tensors do not fit what was saved; values are never cast or reshaped: {shown}"
            )

    def withdraw(self, number: int) -> None:
        """Forget an offer that failed."""
        del self._by_key[self._key_of[number]][number]

    def plan(self, regions: Sequence[_Region], failures: Sequence[Failure]) -> _Plan:
        """Return which offers to fetch for which regions; MissingTile when the offers left do not suffice."""
        plan: _Plan = {}
        for region in regions:
            todo = region.missing
            for number, offer in self._by_key.get(region.spec.key, {}).items():
                if not any(part.intersect(offer.box) for part in todo):
                    continue
                todo = [rest for part in todo for rest in subtract(part, offer.box)]
                plan.setdefault(number, (offer, []))[1].append(region)
                if not todo:
                    break
            if todo:
                tried = [f"{f.source}: {f.reason}" for f in failures if f.key == region.spec.key]
                raise MissingTile(
                    f"{region.spec.key} {todo[0]}: no source has a good copy"
                    + (f" (tried {'; '.join(tried[:4])})" if tried else " and none was offered")
                )
        return plan


class _Fetcher:
    """Fetches, verifies and copies tiles, several batches at a time."""

    def __init__(self, sources: Mapping[str, TileSource]) -> None:
        self._sources = sources
        self._errors = dict.fromkeys(sources, 0)

    def run(self, plan: _Plan, in_flight: int) -> Iterator[tuple[int, Offered, Failure | None]]:
        """Yield every planned tile once it is in its regions, or has failed."""
        with ThreadPoolExecutor(in_flight, thread_name_prefix="tiles") as pool:
            futures = [pool.submit(self._batch, batch, plan) for batch in _batches(plan)]
            try:
                for future in as_completed(futures):
                    yield from future.result()
            finally:
                for future in futures:
                    future.cancel()

    def _batch(self, batch: Sequence[int], plan: _Plan) -> list[tuple[int, Offered, Failure | None]]:
        source = self._sources[plan[batch[0]][0].source]
        if isinstance(source, Prefetching) and self._errors[plan[batch[0]][0].source] < _GIVEN_UP:
            try:
                source.prefetch([plan[number][0] for number in batch])
            except SourceError:
                pass
        done = []
        for number in batch:
            offer, regions = plan[number]
            reason = self._fill(source, offer, regions)
            failure = Failure(source=offer.source, key=offer.spec.key, box=offer.box, reason=reason) if reason else None
            done.append((number, offer, failure))
        return done

    def _fill(self, source: TileSource, offer: Offered, regions: Sequence[_Region]) -> str:
        """Copy one tile to its regions; return why not, or nothing."""
        if self._errors[offer.source] >= _GIVEN_UP:
            return "given up after several errors in a row"
        try:
            data = source.fetch(offer)
        except TileLost as error:
            return str(error) or "lost"
        except SourceError as error:
            self._errors[offer.source] += 1
            return str(error) or "failed"
        self._errors[offer.source] = 0
        if memoryview(data).nbytes != _nbytes(offer):
            return f"sent {memoryview(data).nbytes} bytes, not {_nbytes(offer)}"
        if digest(offer.spec, offer.box, data) != offer.digest:
            return "its bytes do not have the digest it was offered with"
        for region in regions:
            copy_box(data, offer.box, region.buffer, region.box, offer.spec.itemsize)
        return ""


def _batches(plan: _Plan) -> list[list[int]]:
    """Cut the plan into batches of one source each, sources taking turns."""
    queues: dict[str, list[list[int]]] = {}
    room: dict[str, int] = {}
    for number, (offer, _) in plan.items():
        batches = queues.setdefault(offer.source, [])
        if not batches or room[offer.source] < _nbytes(offer) or len(batches[-1]) >= _BATCH_TILES:
            batches.append([])
            room[offer.source] = _BATCH_BYTES
        batches[-1].append(number)
        room[offer.source] -= _nbytes(offer)
    turns = itertools.zip_longest(*queues.values())
    return [batch for turn in turns for batch in turn if batch is not None]
