"""Gives good bytes to the sources whose copies were found bad."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from checkpointing.errors import SourceError
from checkpointing.format.tiles import Box, copy_box, digest
from checkpointing.reading.catalogue import Failure, Region
from checkpointing.reading.sources import Offered, Repairing, TileSource


class ReadRepair:
    """Remembers bad copies, and has them repaired as soon as good bytes are at hand.

    A copy is repaired from a tile of the same box when that arrives, else from a whole region once all are filled.
    """

    def __init__(self, sources: Mapping[str, TileSource]) -> None:
        self._sources = sources
        self._lock = threading.Lock()
        self._bad: dict[tuple[str, Box, str], list[Offered]] = {}
        self.repaired = 0
        self.unrepaired: list[Failure] = []

    def bad(self, offer: Offered) -> None:
        """Remember a copy that is missing or damaged, if its source can repair it."""
        if isinstance(self._sources[offer.source], Repairing):
            with self._lock:
                self._bad.setdefault((offer.spec.key, offer.box, offer.digest), []).append(offer)

    def good(self, offer: Offered, data: memoryview) -> None:
        """Repair all bad copies of a tile that has just been verified."""
        with self._lock:
            bad = self._bad.pop((offer.spec.key, offer.box, offer.digest), ()) if self._bad else ()
        self._repair(bad, data)

    def finish(self, regions: Iterable[Region]) -> None:
        """Repair the copies that lie whole in a region, all regions being filled."""
        for offers in self._bad.values():
            offer = offers[0]
            for region in regions:
                if region.spec == offer.spec and region.box.contains(offer.box):
                    data = bytearray(offer.nbytes)
                    copy_box(region.buffer, region.box, data, offer.box, offer.spec.itemsize)
                    if digest(offer.spec, offer.box, data) == offer.digest:
                        self._repair(offers, memoryview(data))
                    break
        self._bad.clear()

    def _repair(self, offers: Iterable[Offered], data: memoryview) -> None:
        for offer in offers:
            source = self._sources[offer.source]
            assert isinstance(source, Repairing)
            reason = ""
            try:
                source.repair(offer, data)
            except SourceError as error:
                reason = str(error)
            with self._lock:
                if reason:
                    self.unrepaired.append(
                        Failure(source=offer.source, key=offer.spec.key, box=offer.box, reason=reason)
                    )
                else:
                    self.repaired += 1
