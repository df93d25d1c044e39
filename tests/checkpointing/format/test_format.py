"""A reader written from format.md alone, which shares no code with checkpointing."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import blake3
import zstandard

from checkpointing import commit, open_checkpoint, open_store, save_rank
from checkpointing.format import encoding
from checkpointing.format.codecs import Codec
from checkpointing.saving.options import SaveOptions
from tests.checkpointing.encoded import save_encoded, smooth
from tests.checkpointing.states import FACTS, SMALL, make_state, piece, save, save_and_commit, split

BYTES = {"float32": 4, "bfloat16": 2, "int64": 8, "uint8": 1}


def h(data: bytes) -> str:
    return blake3.blake3(data).hexdigest()


def document(data: bytes, kind: str) -> dict[str, Any]:
    frame, skippable = data[:-40], data[-40:]
    assert skippable[:8] == bytes.fromhex("502A4D1820000000")
    assert skippable[8:].hex() == h(frame)
    body = json.loads(zstandard.ZstdDecompressor().decompress(frame))
    assert body["format"] == "elastic3d-checkpoint"
    assert body["version"] == 1
    assert body["kind"] == kind
    return body


def canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def merkle(leaves: set[bytes]) -> str:
    level = [blake3.blake3(b"\0" + leaf).digest() for leaf in sorted(leaves)]
    while len(level) > 1:
        up = []
        for i in range(0, len(level), 2):
            pair = level[i : i + 2]
            up.append(blake3.blake3(b"\1" + pair[0] + pair[1]).digest() if len(pair) == 2 else pair[0])
        level = up
    return level[0].hex()


def place(whole: bytearray, shape: list[int], start: list[int], stop: list[int], data: bytes, size: int) -> None:
    """Put a box's bytes into a whole tensor's, element by element."""
    cells = itertools.product(*(range(a, b) for a, b in zip(start, stop, strict=True)))
    for number, cell in enumerate(cells):
        at = 0
        for n, c in zip(shape, cell, strict=True):
            at = at * n + c
        whole[at * size : (at + 1) * size] = data[number * size : (number + 1) * size]


def planes(stored: bytes, elements: int, size: int) -> bytes:
    """Undo the byte planes: byte 0 of every element, then byte 1, ..."""
    assert zstandard.frame_content_size(stored) == elements * size
    flat = zstandard.ZstdDecompressor().decompress(stored)
    assert len(flat) == elements * size
    return bytes(flat[byte * elements + element] for element in range(elements) for byte in range(size))


def contents(
    root: Path, packs: list[dict[str, Any]], stored: dict[str, Any], tensor: dict[str, Any], tile: dict[str, Any]
) -> bytes:
    """Return the bytes of a tile, or of the base of one, from where `stored` says they lie."""
    pack, dtype = packs[stored["pack"]], tensor["dtype"]
    data = (root / f"packs/{pack['id'][:2]}/{pack['id']}.pack").read_bytes()
    assert len(data) == pack["size"]
    data = data[stored["offset"] : stored["offset"] + stored["length"]]
    dims = [b - a for a, b in zip(tile["start"], tile["stop"], strict=True)]
    elements = 1
    for n in dims:
        elements *= n
    if stored["codec"] != "raw":
        assert h(data) == stored["check"]
        data = planes(data, elements, BYTES[dtype])
    if stored["codec"] == "xor-planes":
        assert stored["base"]["codec"] in ("raw", "planes")
        base = contents(root, packs, stored["base"], tensor, tile)
        data = bytes(a ^ b for a, b in zip(data, base, strict=True))
    assert h(f"{dtype}:{','.join(map(str, dims))}\n".encode() + data) == stored["digest"]
    return data


def read(root: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Restore the newest checkpoint below a directory: every tensor's bytes, and the facts."""
    versions = sorted((root / "versions/refs/latest").glob("*"), key=lambda path: int(path.name))
    ref = document((versions or [root / "refs/latest"])[-1].read_bytes(), "ref")
    stored = (root / f"checkpoints/{ref['checkpoint']}.record").read_bytes()
    assert h(stored) == ref["record_digest"]
    record = document(stored, "checkpoint")
    assert (
        f"{record['step']:012}.{record['made_in']:08}.{record['attempt']:04}.{record['committed_in']:08}"
        == (ref["checkpoint"])
    )
    tensors: dict[str, bytearray] = {}
    leaves = set()
    for entry in record["manifests"]:
        stored = (root / entry["name"]).read_bytes()
        assert (h(stored), len(stored)) == (entry["digest"], entry["size"])
        manifest = document(stored, "rank")
        if manifest["facts"] is not None:
            assert h(canonical(manifest["facts"])) == manifest["facts_digest"]
        leaves.add(canonical(["facts", manifest["facts_digest"]]))
        for tensor in manifest["tensors"]:
            key, dtype, shape = tensor["key"], tensor["dtype"], tensor["shape"]
            total = BYTES[dtype]
            for n in shape:
                total *= n
            whole = tensors.setdefault(key, bytearray(total))
            if total == 0:
                leaves.add(canonical([key, dtype, shape]))
            for tile in tensor["tiles"]:
                data = contents(root, manifest["packs"], tile, tensor, tile)
                leaves.add(canonical([key, dtype, shape, tile["start"], tile["stop"], tile["digest"]]))
                place(whole, shape, tile["start"], tile["stop"], data, BYTES[dtype])
    assert merkle(leaves) == record["root"]
    return {key: bytes(whole) for key, whole in tensors.items()}, record["facts"]


def pack_index(data: bytes) -> tuple[str, list[dict[str, Any]]]:
    """Check a pack by itself; return its id and index."""
    assert data[:8] == bytes.fromhex("453344504143 4B31".replace(" ", ""))
    assert data[-8:] == bytes.fromhex("45334450454E4431")
    tail = data[-56:]
    offset, length = int.from_bytes(tail[:8], "little"), int.from_bytes(tail[8:16], "little")
    index = data[offset : offset + length]
    assert h(index) == tail[16:48].hex()
    tiles = json.loads(zstandard.ZstdDecompressor().decompress(index))["tiles"]
    assert offset + length + 56 == len(data)
    end = 8
    for tile in tiles:
        assert tile["offset"] == end
        end += tile["length"]
    assert end == offset
    return h(index), tiles


def test_a_reader_written_from_the_document_restores_a_checkpoint(tmp_path: Path) -> None:
    """The document is enough to restore every byte and check every digest."""
    store, state = open_store(str(tmp_path)), make_state(SMALL)
    save_and_commit(store, state)
    tensors, facts = read(tmp_path)
    assert tensors == {spec.key: data for spec, data in state.items()}
    assert facts == FACTS


def test_the_same_reader_restores_an_incremental_checkpoint(tmp_path: Path) -> None:
    """Tiles in an older pack need nothing that the document leaves out."""
    store, state = open_store(str(tmp_path)), make_state(SMALL)
    save_and_commit(store, state)
    changed = {**state, **make_state({"model/w": SMALL["model/w"]}, seed=3)}
    save(store, changed, step=2, parent=open_checkpoint(store))
    commit(store, step=2, made_in=1, attempt=0, committed_in=1, world=2)
    assert read(tmp_path)[0] == {spec.key: data for spec, data in changed.items()}


def test_the_same_reader_decodes_every_codec(tmp_path: Path) -> None:
    """Byte planes, and differences to raw and encoded bases, decode as the document describes."""
    store = open_store(str(tmp_path))
    shapes = {"a": ("float32", (40, 8)), "b": ("bfloat16", (300,)), "c": ("int64", (6, 40)), "d": ("uint8", (64,))}
    first, second = smooth(shapes), smooth(shapes, seed=1)
    bases = save_encoded(store, first, lambda spec: Codec.RAW if spec.key == "b" else Codec.PLANES)
    assert read(tmp_path)[0] == {spec.key: data for spec, data in first.items()}
    save_encoded(store, second, lambda _: Codec.XOR_PLANES, step=2, bases=bases, older=first)
    assert read(tmp_path)[0] == {spec.key: data for spec, data in second.items()}
    assert {tile.base.codec for tile in open_checkpoint(store).tiles if tile.base} == {Codec.RAW, Codec.PLANES}
    for path in tmp_path.glob("packs/*/*.pack"):
        for tile in pack_index(path.read_bytes())[1]:
            assert (tile["codec"] == "raw") != ("check" in tile)
            assert (tile["codec"] == "xor-planes") == ("base" in tile)


def test_packs_are_self_checking_as_documented(tmp_path: Path) -> None:
    """A pack's id, index and tile order follow from its own bytes."""
    save_and_commit(open_store(str(tmp_path)), make_state(SMALL))
    packs = list(tmp_path.glob("packs/*/*.pack"))
    assert len(packs) == 2
    for path in packs:
        pack, tiles = pack_index(path.read_bytes())
        assert (path.stem, path.parent.name) == (pack, pack[:2])
        assert tiles == sorted(tiles, key=lambda tile: (tile["key"], tile["start"]))


def test_the_same_reader_restores_what_savers_encode(tmp_path: Path) -> None:
    """With the planes and differences a saver chose, several packs, and a parent."""
    store = open_store(str(tmp_path))
    shapes = {"a": ("float32", (40, 8)), "b": ("bfloat16", (300,)), "c": ("int64", (6, 40))}
    codecs = set()
    for step, seed in ((1, 0), (2, 1)):
        state = smooth(shapes, seed)
        parent = open_checkpoint(store) if step > 1 else None
        pieces = [piece(spec, data, box) for spec, data in state.items() for box in split(spec, (3,))]
        options = SaveOptions(codec="xor" if parent else "planes")
        save_rank(
            store,
            step=step,
            made_in=1,
            attempt=0,
            rank=0,
            world=1,
            pieces=pieces,
            facts=FACTS,
            parent=parent,
            options=options,
        )
        commit(store, step=step, made_in=1, attempt=0, committed_in=1, world=1)
        assert read(tmp_path) == ({spec.key: data for spec, data in state.items()}, FACTS)
        codecs |= {tile.codec for tile in open_checkpoint(store).tiles}
    assert {Codec.PLANES, Codec.XOR_PLANES} <= codecs


def test_a_document_that_compresses_beyond_what_readers_accept_is_read_again() -> None:
    """As with facts of millions of zeros: the same frame as ever, in more blocks."""
    facts = {"mask": "0" * (32 << 20)}
    data = encoding.document("record", {"facts": facts})
    assert encoding.parse(data, "record", "x")["facts"] == facts
    assert document(data, "record")["facts"] == facts
    assert len(data) < 4096
