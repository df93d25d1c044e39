"""Checkpoints of encoded tiles, built from the format's own parts."""

from __future__ import annotations

from collections.abc import Callable

import blake3

from checkpointing import Box, Store, commit
from checkpointing.format import names
from checkpointing.format.codecs import Codec, encode
from checkpointing.format.encoding import FORMAT, VERSION, hexdigest, pack_json
from checkpointing.format.manifest import Base, RankManifest, StoredTile, encode_manifest, facts_digest
from checkpointing.format.tiles import TensorSpec, digest
from tests.checkpointing.states import State, piece, split

Bases = dict[tuple[str, Box], StoredTile]


def save_encoded(
    store: Store,
    state: State,
    choose: Callable[[TensorSpec], Codec],
    *,
    step: int = 1,
    bases: Bases | None = None,
    older: State | None = None,
    cuts: tuple[int, ...] = (2, 4),
) -> Bases:
    """Save and commit a state of one rank under the codecs that `choose` gives; return its tiles by key and box.

    A tile that its codec would not shorten is raw. bases, older: the tiles and the state that differences are to.
    """
    stored, body, offset = [], [b"E3DPACK1"], 8
    for spec, data in sorted(state.items(), key=lambda item: item[0].key):
        for box in split(spec, cuts):
            if not box.numel:
                continue
            raw = bytes(piece(spec, data, box).data)
            base, codec, under = None, choose(spec), None
            if codec is Codec.XOR_PLANES:
                assert bases is not None
                assert older is not None
                b = bases[spec.key, box]
                base = Base(
                    digest=b.digest, pack=b.pack, offset=b.offset, length=b.length, codec=b.codec, check=b.check
                )
                under = bytes(piece(spec, older[spec], box).data)
            encoded = bytes(encode(codec, raw, spec.itemsize, under))
            if len(encoded) >= len(raw):
                codec, encoded, base = Codec.RAW, raw, None
            check = "" if codec is Codec.RAW else hexdigest(encoded)
            stored.append((spec, box, digest(spec, box, raw), offset, len(encoded), codec, check, base))
            body.append(encoded)
            offset += len(encoded)
    index = pack_json(
        {
            "format": FORMAT,
            "version": VERSION,
            "kind": "pack",
            "tiles": [
                {
                    "key": s.key, "dtype": s.dtype, "shape": s.shape, "start": b.start, "stop": b.stop, "digest": d,
                    "offset": at, "length": n, "codec": codec,
                    **({"check": check} if check else {}), **({"base": base.digest} if base else {}),
                }
                for s, b, d, at, n, codec, check, base in stored
            ],
        }
    )  # fmt: skip
    tail = offset.to_bytes(8, "little") + len(index).to_bytes(8, "little") + blake3.blake3(index).digest() + b"E3DPEND1"
    pack = hexdigest(index)
    store.put(names.pack(pack), b"".join([*body, index, tail]))
    tiles = tuple(
        StoredTile(
            spec=s, box=b, digest=d, pack=pack, offset=at, length=n, codec=codec, check=check, base=base, stats=None
        )
        for s, b, d, at, n, codec, check, base in stored
    )
    sizes = {pack: store.size(names.pack(pack))}
    sizes |= {t.base.pack: store.size(names.pack(t.base.pack)) for t in tiles if t.base}
    manifest = RankManifest(
        save=names.Save(step=step, made_in=1, attempt=0),
        rank=0,
        world=1,
        parent=None,
        facts_digest=facts_digest({}),
        facts={},
        packs=dict(sorted(sizes.items())),
        specs=tuple(state),
        tiles=tiles,
    )
    store.put_if_absent(manifest.name, encode_manifest(manifest))
    commit(store, step=step, made_in=1, attempt=0, committed_in=1, world=1)
    return {(tile.spec.key, tile.box): tile for tile in tiles}


def smooth(shapes: dict[str, tuple[str, tuple[int, ...]]], seed: int = 0) -> State:
    """Return tensors that compress: few different bytes."""
    return {
        (spec := TensorSpec(key=key, dtype=dtype, shape=shape)): bytes(
            (seed + n // 7) % 3 for n in range(spec.box.numel * spec.itemsize)
        )
        for key, (dtype, shape) in shapes.items()
    }
