"""Offers as a table in binary, of which a rank spells out the rows that it wants and no others.

A state of 200,000 tiles that 64 ranks hold twice is 130,000 shards on offer. All ranks get all of them by broadcast,
and each needs one or two of a tensor: as JSON it would parse them all first. Here columns are read where they lie, and
which boxes have something in common with a wanted one is one comparison per tensor.

    head     JSON: tensors (key, dtype, shape), holders (where a row's tiles are, and of which snapshot)
    columns  per row: tensor, holder, offset in the snapshot, number of digests, length of its locator
    dims     start and stop of each row's box, one after the other
    digests  32 bytes each
    where    locators of tiles that are no snapshot's, JSON

All numbers are little-endian. Both ends are processes of one generation and of one version: nothing of this is stored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from operator import eq
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from checkpointing.format.tiles import Box, TensorSpec
from checkpointing.reading.sources import Offered
from elastic3d.snapshots.memory import SnapshotName
from elastic3d.snapshots.offers import OfferedShard

_DIGEST_BYTES = 32
_SIZES = np.dtype("<u8")
_COLUMNS = 5
_TENSOR, _HOLDER, _OFFSET, _DIGESTS, _WHERE = range(_COLUMNS)

Numbers = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
Offer = Offered | OfferedShard


class OfferColumns(Sequence[Offer]):
    """The offers of a decision, spelled out one by one where they are asked for."""

    def __init__(self, head: Mapping[str, Any], columns: Numbers, dims: Numbers, digests: bytes, where: bytes) -> None:
        self._tensors = [TensorSpec(key=key, dtype=dtype, shape=tuple(shape)) for key, dtype, shape in head["tensors"]]
        self._holders: list[list[Any]] = head["holders"]
        self._columns, self._dims, self._digests, self._where = columns, dims, digests, where
        axes = np.array([2 * len(spec.shape) for spec in self._tensors], dtype=np.int64)
        tensors = columns[_TENSOR].astype(np.int64)
        self._dims_at = _starts(axes[tensors] if len(tensors) else tensors)
        self._digests_at = _starts(columns[_DIGESTS].astype(np.int64))
        self._where_at = _starts(columns[_WHERE].astype(np.int64))

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """The tensors of which anything is on offer, by key."""
        return {spec.key: spec for spec in self._tensors}

    @cached_property
    def sources(self) -> frozenset[str]:
        """The names of all sources."""
        return frozenset(name for source, copies, *_ in self._holders for name in (source, *copies))

    @cached_property
    def snapshots(self) -> dict[str, set[SnapshotName]]:
        """The snapshots that hold anything, by server."""
        held: dict[str, set[SnapshotName]] = {}
        for source, copies, *snapshot in self._holders:
            if snapshot:
                for name in (source, *copies):
                    held.setdefault(name, set()).add(SnapshotName(*snapshot[:3]))
        return held

    @cached_property
    def _rows(self) -> dict[str, list[tuple[int, Places]]]:
        """The rows of each tensor, in order, with its number of dims; twice for one that is on offer in two forms."""
        tensors = self._columns[_TENSOR]
        order = np.argsort(tensors, kind="stable")
        ends = np.searchsorted(tensors[order], np.arange(len(self._tensors) + 1))
        rows: dict[str, list[tuple[int, Places]]] = {}
        for number, spec in enumerate(self._tensors):
            rows.setdefault(spec.key, []).append((len(spec.shape), order[ends[number] : ends[number + 1]]))
        return rows

    def meeting(self, wanted: Mapping[str, Sequence[Box]]) -> Iterator[Offer]:
        """Yield the offers that have an element in common with a box that is wanted of their tensor, in order.

        Of a tensor that is wanted with another number of dims all are yielded: the resolver says what is wrong.
        """
        chosen = [
            self._meeting(dims, rows, boxes) for key, boxes in wanted.items() for dims, rows in self._rows.get(key, ())
        ]
        if chosen:
            yield from map(self.__getitem__, np.sort(np.concatenate(chosen)).tolist())

    def _meeting(self, dims: int, rows: Places, boxes: Sequence[Box]) -> Places:
        if any(len(box.start) != dims for box in boxes):
            return rows
        bounds = self._dims[self._dims_at[rows][:, None] + np.arange(2 * dims)]
        start, stop = bounds[:, :dims], bounds[:, dims:]
        meets = np.zeros(len(rows), dtype=bool)
        for box in boxes:
            low = np.maximum(start, np.array(box.start, dtype=np.uint64))
            high = np.minimum(stop, np.array(box.stop, dtype=np.uint64))
            meets |= (low < high).all(axis=1)
        return rows[meets]

    def __len__(self) -> int:
        return int(self._columns.shape[1])

    @overload
    def __getitem__(self, row: int) -> Offer: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[Offer]: ...
    def __getitem__(self, row: int | slice) -> Offer | Sequence[Offer]:
        if isinstance(row, slice):
            return [self[number] for number in range(*row.indices(len(self)))]
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        tensor, holder, offset, _, _ = self._columns[:, row].tolist()
        spec = self._tensors[tensor]
        bounds = self._dims[self._dims_at[row] : self._dims_at[row + 1]].tolist()
        box = Box(start=tuple(bounds[: len(spec.shape)]), stop=tuple(bounds[len(spec.shape) :]))
        at, end = self._digests_at[row : row + 2].tolist()
        digests = self._digests[at * _DIGEST_BYTES : end * _DIGEST_BYTES].hex()
        source, copies, *snapshot = self._holders[holder]
        if not snapshot:
            at, end = self._where_at[row : row + 2].tolist()
            where = json.loads(self._where[at:end])
            return Offered(spec=spec, box=box, digest=digests, source=source, where=where)
        generation, step, rank, tile_bytes = snapshot
        return OfferedShard(
            spec=spec,
            box=box,
            source=source,
            copies=tuple(copies),
            generation=generation,
            step=step,
            rank=rank,
            offset=offset,
            tile_bytes=tile_bytes,
            digests=digests,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    def __hash__(self) -> int:
        return hash((len(self), self._digests))


def encode(offers: Sequence[Offer]) -> list[bytes]:
    """Return offers as parts for `decode`. ValueError for a digest that is not 64 hexadecimal digits."""
    tensors: dict[tuple[str, str, tuple[int, ...]], int] = {}
    holders: dict[tuple[Any, ...], int] = {}
    columns: list[int] = []
    dims: list[int] = []
    digests: list[str] = []
    where: list[bytes] = []
    for offer in offers:
        spec, locator = offer.spec, b""
        if isinstance(offer, OfferedShard):
            texts, offset = offer.digests, offer.offset
            snapshot = (offer.generation, offer.step, offer.rank, offer.tile_bytes)
            holder: tuple[Any, ...] = (offer.source, offer.copies, *snapshot)
        else:
            texts, offset, holder = offer.digest, 0, (offer.source, ())
            locator = json.dumps(offer.where, separators=(",", ":")).encode()
            where.append(locator)
        tensor = tensors.setdefault((spec.key, spec.dtype, spec.shape), len(tensors))
        number = holders.setdefault(holder, len(holders))
        columns += (tensor, number, offset, len(texts) // (2 * _DIGEST_BYTES), len(locator))
        dims += offer.box.start
        dims += offer.box.stop
        digests.append(texts)
    head = json.dumps({"tensors": list(tensors), "holders": list(holders)}, separators=(",", ":")).encode()
    table = np.array(columns, dtype=_SIZES).reshape(-1, _COLUMNS)
    raw = bytes.fromhex("".join(digests))
    if len(raw) != int(table[:, _DIGESTS].sum()) * _DIGEST_BYTES:
        raise ValueError(f"digests of tiles have {2 * _DIGEST_BYTES} hexadecimal digits each; some have others")
    return [head, table.T.tobytes(), np.array(dims, dtype=_SIZES).tobytes(), raw, b"".join(where)]


def decode(parts: Sequence[bytes]) -> OfferColumns:
    """Return the offers that `encode` wrote."""
    head, columns, dims, digests, where = parts
    table = np.frombuffer(columns, dtype=_SIZES).reshape(_COLUMNS, -1)
    return OfferColumns(json.loads(head), table, np.frombuffer(dims, dtype=_SIZES), digests, where)


def _starts(lengths: Places) -> Places:
    """Return where each of things of these lengths begins, and the last one ends."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths)))
