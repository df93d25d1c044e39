"""Checks a pack: by itself, and against what manifests say about it."""

from __future__ import annotations

import dataclasses
import functools
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from checkpointing.errors import FormatError, StoreError, StoreNotFound, Tampered
from checkpointing.format import names
from checkpointing.format.manifest import RankManifest, StoredTile
from checkpointing.format.pack import PackTile, read_index, whole
from checkpointing.reading.findings import Fault, Finding, from_error
from checkpointing.stores.protocol import Store

_READ = 8 << 20  # bytes of neighbouring tiles that are read at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What a manifest says about some stored bytes: those of one of its tiles, or of a tile's base (`is_base`)."""

    manifest: str
    rank: int
    pack: str
    tile: PackTile
    is_base: bool = False


def uses(manifest: RankManifest) -> Iterator[Use]:
    """Yield every use of a pack by a manifest."""
    for tile in manifest.tiles:
        own = PackTile(
            spec=tile.spec,
            box=tile.box,
            digest=tile.digest,
            offset=tile.offset,
            length=tile.length,
            codec=tile.codec,
            check=tile.check,
            base=tile.base.digest if tile.base else "",
        )
        yield Use(manifest=manifest.name, rank=manifest.rank, pack=tile.pack, tile=own)
        if tile.base is not None:
            base = _base(tile, own)
            yield Use(manifest=manifest.name, rank=manifest.rank, pack=tile.base.pack, tile=base, is_base=True)


def _base(tile: StoredTile, own: PackTile) -> PackTile:
    assert tile.base is not None
    base = tile.base
    return dataclasses.replace(
        own,
        digest=base.digest,
        offset=base.offset,
        length=base.length,
        codec=base.codec,
        check=base.check,
        base="",
    )


class Users:
    """What manifests say about one pack.

    Their tiles are kept as a hash each: those of all manifests would not fit into memory. Findings need more, and read
    the manifests again.
    """

    __slots__ = ("manifests", "sizes", "tiles")

    def __init__(self) -> None:
        self.manifests: list[str] = []
        self.sizes: set[int] = set()
        self.tiles = array("q")

    def agree(self, index: Sequence[PackTile], size: int) -> bool:
        """Return whether a pack's index and size are what all of the manifests say."""
        return self.sizes <= {size} and {_hash(tile) for tile in index}.issuperset(self.tiles)


def users_of(manifest: RankManifest) -> dict[str, Users]:
    """Return what one manifest says about the packs that it uses, by id."""
    users: dict[str, Users] = defaultdict(Users)
    for use in uses(manifest):
        users[use.pack].tiles.append(_hash(use.tile))
    for pack, own in users.items():
        own.manifests.append(manifest.name)
        own.sizes.add(manifest.packs[pack])
    return users


def _hash(tile: PackTile) -> int:
    """Return what stands for a tile; a manifest may use it at another place: only contents count."""
    return hash((tile.digest, tile.offset, tile.length, tile.codec, tile.check, tile.base))


Load = Callable[[Sequence[str], str], list[Use]]
"""Reads the manifests of these names again, and returns how they use a pack."""
Hit = Callable[[Iterable[str]], tuple[str, ...]]
"""Returns the committed checkpoints that need any of these manifests."""


def check_pack(
    store: Store, pack: str, users: Users, load: Load, hit: Hit, step: Callable[[int], None]
) -> list[Finding]:
    """Read every byte of a pack and return its faults. step: called with the number of bytes as they are done.

    A pack that is gone is no finding here: missing packs are found before.
    """
    name = names.pack(pack)
    loaded = functools.cache(lambda: load(users.manifests, pack))
    try:
        index, size = read_index(store, name, pack)
    except StoreNotFound:
        return []
    except (FormatError, StoreError) as error:
        known = loaded()
        rank = known[0].rank if known else None
        broken = from_error(name, error, rank=rank, pack=pack, checkpoints=hit(users.manifests))
        # The tiles that manifests know may still be restored.
        return [broken, *_check_tiles(store, pack, _known(known), loaded, hit, step)]
    if users.agree(index, size):
        return _check_tiles(store, pack, index, loaded, hit, step)
    places = {tile.offset: tile for tile in index}
    findings = [
        _finding(
            use.manifest,
            pack,
            f"the pack's index has something else where the manifest says {use.tile.spec.key} lies",
            use.tile,
            [use],
            hit,
            Fault.INCONSISTENT,
        )
        for use in loaded()
        if not _same(places.get(use.tile.offset), use.tile)
    ]
    if not users.sizes <= {size}:
        findings.append(Finding(object=name, fault=Fault.INCONSISTENT, detail=f"has {size} bytes, not as recorded"))
    if not findings:
        detail = "its index is not what manifests say, which could not be read again"
        hurt = hit(users.manifests)
        findings.append(Finding(object=name, fault=Fault.INCONSISTENT, detail=detail, pack=pack, checkpoints=hurt))
    return findings + _check_tiles(store, pack, index, loaded, hit, step)


def _known(users: Sequence[Use]) -> list[PackTile]:
    """Return the tiles that are in a pack according to manifests, each place once, in order."""
    return [tile for _, tile in sorted({use.tile.offset: use.tile for use in users}.items())]


def _same(there: PackTile | None, said: PackTile) -> bool:
    return there is not None and _hash(there) == _hash(said)


def _check_tiles(
    store: Store,
    pack: str,
    tiles: Sequence[PackTile],
    users: Callable[[], Sequence[Use]],
    hit: Hit,
    step: Callable[[int], None],
) -> list[Finding]:
    findings: list[Finding] = []
    groups = deque(_groups(tiles))
    while groups:
        group = groups.popleft()
        start, stop = group[0].offset, group[-1].offset + group[-1].length
        try:
            data = memoryview(store.get(names.pack(pack), start, stop))
        except StoreNotFound:
            return findings
        except Tampered:
            # Of an encrypted pack damage takes all that is read with it, so less is read at once.
            if len(group) > 1:
                half = len(group) // 2
                groups.extendleft([group[half:], group[:half]])
                continue
            detail = f"bytes {start} to {stop} are not as they were encrypted"
            findings.append(_finding(names.pack(pack), pack, detail, group[0], _at(start, users()), hit, Fault.CORRUPT))
            step(group[0].length)
            continue
        except StoreError as error:
            held = [use.manifest for use in users() if start <= use.tile.offset < stop]
            findings.append(from_error(names.pack(pack), error, pack=pack, checkpoints=hit(held)))
            continue
        for tile in group:
            if not whole(tile, data[tile.offset - start : tile.offset - start + tile.length]):
                detail = f"bytes {tile.offset} to {tile.offset + tile.length} do not have their digest"
                own = _at(tile.offset, users())
                findings.append(_finding(names.pack(pack), pack, detail, tile, own, hit, Fault.CORRUPT))
        step(data.nbytes)
    return findings


def _at(offset: int, users: Sequence[Use]) -> list[Use]:
    return [use for use in users if use.tile.offset == offset]


def _groups(tiles: Sequence[PackTile]) -> Iterator[list[PackTile]]:
    """Yield groups of tiles that lie back to back, of a bounded size."""
    group: list[PackTile] = []
    for tile in tiles:
        if group and (
            tile.offset != group[-1].offset + group[-1].length or tile.offset + tile.length - group[0].offset > _READ
        ):
            yield group
            group = []
        group.append(tile)
    if group:
        yield group


def _finding(
    name: str, pack: str, detail: str, tile: PackTile, users: Sequence[Use], hit: Hit, fault: Fault
) -> Finding:
    also = sorted({use.tile.spec.key for use in users if not use.is_base} - {tile.spec.key})
    needed = sorted({use.tile.spec.key for use in users if use.is_base})
    if also:
        detail += f"; they are those of {', '.join(also[:4])} too"
    if needed:
        detail += f"; {', '.join(needed[:4])} differs from them"
    return Finding(
        object=name,
        fault=fault,
        detail=detail,
        tensor=tile.spec.key,
        box=str(tile.box),
        rank=users[0].rank if users else None,
        pack=pack,
        checkpoints=hit([use.manifest for use in users]),
    )
