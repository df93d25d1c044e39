"""The places a trainer's state may come from: the memory of all keepers, this node's disk, then the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import structlog

from checkpointing import open_checkpoint, read_latest
from checkpointing.errors import CheckpointError, StoreUnfit
from checkpointing.reading.packs import PackSource
from checkpointing.reading.sources import TileSource
from checkpointing.reading.tier import DiskTier
from elastic3d.errors import StateError
from elastic3d.snapshots.client import Inventory, PeerSource, inventories
from elastic3d.storage import open_to_read
from elastic3d.training import restoring
from elastic3d.trust.credentials import Credentials
from elastic3d.values import StoreAt

STORE_SOURCE, DISK_SOURCE = "store", "disk"

log = structlog.get_logger()


class KeepersAndStore:
    """The tiers of a job whose keepers hold snapshots. `credentials`: of the run; None while there are no keepers."""

    def __init__(self, credentials: Credentials | None) -> None:
        self._credentials = credentials

    def inventories(self, servers: Sequence[str]) -> Sequence[Inventory]:
        """Return what the reachable keepers hold, their own trainers' snapshots and replicas."""
        return inventories(servers, self._credentials) if self._credentials is not None else ()

    def checkpoint(self, at: StoreAt) -> restoring.Decision | None:
        """Return the newest checkpoint, None where nothing was committed; StateError where it cannot be trusted."""
        try:
            store = open_to_read(at)
            ref = read_latest(store)
            if ref is None or ref.checkpoint is None:
                return None
            found = open_checkpoint(store, ref)
        except (CheckpointError, OSError) as error:
            raise StateError(
                f"the newest checkpoint under {at.url} cannot be read: {error}. "
                f"`elastic3d ckpt verify {at.url}` says more"
            ) from error
        return restoring.Decision(
            source=restoring.STORE,
            step=found.step,
            generation=found.made_in,
            facts=found.facts,
            offers=tuple(found.offers(STORE_SOURCE)),
        )

    def sources(self, decision: restoring.Decision, at: StoreAt | None) -> Mapping[str, TileSource]:
        """Return one source per keeper that offers a tile, and the store, behind the disk where there is one."""
        names = sorted({offer.source for offer in decision.offers})
        sources: dict[str, TileSource] = {}
        for name in names:
            if name != STORE_SOURCE:
                assert self._credentials is not None, "a tile server offered what nobody could ask it for"
                sources[name] = PeerSource(name, self._credentials)
            elif at is not None:
                sources |= _stored(at)
        return sources


def _stored(at: StoreAt) -> dict[str, TileSource]:
    """Return the store, after the disk that keeps what comes from it where there is one.

    What the tiles are and where is in the offers, so that no checkpoint is opened again.
    """
    packs = PackSource(open_to_read(at), STORE_SOURCE)
    if at.cache:
        try:
            return {DISK_SOURCE: DiskTier(at.cache, at.cache_bytes, behind=packs, name=DISK_SOURCE), packs.name: packs}
        except StoreUnfit as error:
            log.warning("cache.unfit", error=str(error))
    return {packs.name: packs}
