"""Chooses which of the tiles on offer to fetch for the wanted regions: preferred sources first, no element twice."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from checkpointing.errors import MissingTile, SpecMismatch
from checkpointing.format.tiles import Box, TensorSpec, subtract
from checkpointing.reading.sources import Offered, Sparing, TileSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A tile that a source offered and could not deliver, or delivered with wrong bytes.

    unreachable: the source could not be reached, which says nothing about the tile.
    """

    source: str
    key: str
    box: Box
    reason: str
    unreachable: bool = False


class Region:
    """One wanted box, its bytes, and the parts of it that are still to be filled."""

    __slots__ = ("box", "buffer", "missing", "spec")

    def __init__(self, spec: TensorSpec, box: Box) -> None:
        self.spec = spec
        self.box = box
        self.buffer = memoryview(b"")
        self.missing = [box]

    def take(self, buffer: memoryview) -> None:
        """Fill this buffer from now on; ValueError if it does not have the size of the box."""
        nbytes = self.box.numel * self.spec.itemsize
        if buffer.nbytes != nbytes or not buffer.c_contiguous or buffer.readonly:
            raise ValueError(f"{self.spec.key} {self.box}: its destination is not {nbytes} contiguous writable bytes")
        self.buffer = buffer.cast("B")

    def view(self, box: Box) -> memoryview | None:
        """Return the bytes of an inner box, None if they are not contiguous."""
        start, size = _range(self.box, box)
        if size < 0:
            return None
        return self.buffer[start * self.spec.itemsize : (start + size) * self.spec.itemsize]


def _range(outer: Box, inner: Box) -> tuple[int, int]:
    """Return first element and number of elements of `inner` within `outer`, (0, -1) if they are not contiguous."""
    whole, part = outer.shape, inner.shape
    cut = next((dim for dim, n in enumerate(part) if n != 1), len(part))
    if part[cut + 1 :] != whole[cut + 1 :]:
        return 0, -1
    place = 0
    for offset, low, n in zip(inner.start, outer.start, whole, strict=True):
        place = place * n + offset - low
    return place, math.prod(part)


@dataclass(slots=True, kw_only=True)
class Job:
    """A tile to be fetched, and the regions that need it.

    straight: the region that it may be written to before it is verified, as no other tile of the plan touches that
    place.
    """

    number: int
    offer: Offered
    regions: list[Region] = field(default_factory=list)
    straight: Region | None = None


Plan = dict[int, Job]


class Catalogue:
    """The offers: numbered, by tensor, preferred ones first."""

    def __init__(self, offers: Iterable[Offered], sources: Mapping[str, TileSource]) -> None:
        order = {name: place for place, name in enumerate(sources)}
        self._spare = offers.spare if isinstance(offers, Sparing) else None
        listed = list(offers)
        unknown = {offer.source for offer in listed} - set(order)
        if unknown:
            raise ValueError(f"tiles are offered by sources that were not given: {', '.join(sorted(unknown))}")
        self._by_key: dict[str, dict[int, Offered]] = defaultdict(dict)
        for number, offer in enumerate(sorted(listed, key=lambda offer: order[offer.source])):
            self._by_key[offer.spec.key][number] = offer
        self._key_of = {number: key for key, numbers in self._by_key.items() for number in numbers}
        self._spent: set[str] = set()

    def check_specs(self, regions: Sequence[Region]) -> None:
        """Raise SpecMismatch naming every wanted tensor that is offered with another shape or dtype."""
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

    def _of(self, key: str) -> Iterator[tuple[int, Offered]]:
        """Yield the offers of a tensor, and spare ones where the reader goes on behind those."""
        yield from self._by_key.get(key, {}).items()
        if self._spare is None or key in self._spent:
            return
        self._spent.add(key)
        spare = dict(enumerate(self._spare(key), start=len(self._key_of)))
        self._key_of |= dict.fromkeys(spare, key)
        self._by_key[key] |= spare
        yield from spare.items()

    def plan(self, regions: Sequence[Region], failures: Sequence[Failure]) -> Plan:
        """Return which offers to fetch for which regions; MissingTile if the remaining offers do not suffice."""
        plan: Plan = {}
        for region in regions:
            todo = region.missing
            taken: list[Job] = []
            for number, offer in self._of(region.spec.key):
                fresh = [common for part in todo if (common := part.intersect(offer.box))]
                if not fresh:
                    continue
                todo = [rest for part in todo for rest in subtract(part, offer.box)]
                job = plan.setdefault(number, Job(number=number, offer=offer))
                job.regions.append(region)
                if sum(part.numel for part in fresh) < offer.box.numel:
                    # It reaches into what other tiles fill: unverified bytes must not replace verified ones.
                    for other in taken:
                        if other.straight is region and other.offer.box.intersect(offer.box):
                            other.straight = None
                elif job.straight is None:
                    job.straight = region
                taken.append(job)
                if not todo:
                    break
            if todo:
                failed = [f for f in failures if f.key == region.spec.key and f.box.intersect(todo[0])]
                tried = [f"{f.source}: {f.reason}" for f in failed]
                raise MissingTile(
                    f"{region.spec.key} {todo[0]}: no source has a good copy"
                    + (f" (tried {'; '.join(tried[:4])})" if tried else " and none was offered"),
                    damaged=bool(failed) and not any(f.unreachable for f in failed),
                    key=region.spec.key,
                )
        return plan
