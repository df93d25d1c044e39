"""Files of safetensors: a single one, or the shards that Hugging Face puts beside a `model.safetensors.index.json`.

The format is eight bytes, a JSON header and the tensors' bytes; it is read and written here by ranges. The package
would add a dependency and cannot write a tensor piece by piece; the tests use it to read these files.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpointing.errors import ForeignFormat, NotExportable
from checkpointing.format.manifest import facts_digest
from checkpointing.format.tiles import Box, TensorSpec
from checkpointing.interchange import objects
from checkpointing.interchange.contents import Contents
from checkpointing.interchange.foreign import Foreign, Progress, Stored, read_range
from checkpointing.interchange.tensors import shortened, shown

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
"""Bytes of a shard after which a new one is begun, as Hugging Face does."""

_INDEX = ".safetensors.index.json"
_FACTS = "elastic3d.facts"
_SHARD = re.compile(r"(?:shard-\d+-)?(?P<stem>.+)-(?P<number>\d+)-of-(?P<all>\d+)\.safetensors")
_SHARDING = "DCP_SHARDING_INFO"  # the part of its tensor that each entry is, in torch's files per rank
_LARGEST_HEADER = 100_000_000  # the format's own limit
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
    "F4": "float4_e2m1fn_x2",  # counted there in values; an element here is two of them, next to each other
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PAIRS = "float4_e2m1fn_x2"


def read(source: Path) -> Foreign:
    """Return where the tensors of a file, an index, or a folder of shards lie; ForeignFormat if it is none of these."""
    files = _files(source) if source.is_dir() or source.name.endswith(_INDEX) else {source: None}
    tensors: dict[str, Stored] = {}
    parts: list[tuple[Stored, tuple[int, ...]]] = []
    facts = None
    for file, expected in files.items():
        in_file, metadata = read_file(file)
        if expected is not None and expected - in_file.keys():
            missing = ", ".join(sorted(expected - in_file.keys())[:8])
            raise ForeignFormat(f"{file}: its index says it holds {missing}, and it does not")
        offsets = _offsets(metadata, file)
        parts.extend((stored, offsets[name]) for name, stored in in_file.items() if name in offsets)
        whole = {name: stored for name, stored in in_file.items() if name not in offsets}
        twice = sorted(whole.keys() & tensors.keys())
        if twice:
            raise ForeignFormat(f"{file}: {', '.join(twice[:8])}: in another shard, too")
        tensors |= whole
        facts = _facts(metadata, file) or facts
    joined = _joined(parts, source)
    twice = sorted(tensors.keys() & {stored.spec.key for stored in joined})
    if twice:
        raise ForeignFormat(f"{source}: {', '.join(twice[:8])}: whole in one shard, and in parts in others")
    # Our objects were exported as the tensors that hold them.
    held = {name: stored for name, stored in tensors.items() if objects.is_object(name)}
    return Foreign(
        tensors=(*(stored for name, stored in tensors.items() if name not in held), *joined),
        objects={
            name: bytes(read_range(stored.file, stored.offset, stored.spec.box.numel * stored.spec.itemsize))
            for name, stored in held.items()
        },
        facts=facts,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """A tensor as a file is to have it: a box of one of the checkpoint's, in the shape that it has there."""

    spec: TensorSpec
    box: Box
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, spec: TensorSpec) -> FileTensor:
        """Return one of the checkpoint's tensors as it is."""
        return cls(spec=spec, box=spec.box, shape=spec.shape)

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.box.numel * self.spec.itemsize


def write(contents: Contents, specs: Mapping[str, TensorSpec], target: Path, progress: Progress) -> None:
    """Write tensors, by the name they are to have, to the file or folder `target`."""
    check(specs)
    if target.suffix != ".safetensors":
        # A folder is a Hugging Face model, whose readers know only tensors.
        target.mkdir()
        write_shards(contents, {name: FileTensor.whole(spec) for name, spec in specs.items()}, target, progress)
        return
    facts = {}
    if all(name == contents.name(spec.key) for name, spec in specs.items()):
        specs = {**specs, **{key: contents.checkpoint.specs[key] for key in _object_keys(contents)}}
        facts = {_FACTS: objects.to_json(contents.checkpoint.facts).decode()}
    tensors = {name: FileTensor.whole(spec) for name, spec in specs.items()}
    _write_file(contents, tensors, target, facts, 0, sum(one.nbytes for one in tensors.values()), progress)


def write_shards(
    contents: Contents,
    tensors: Mapping[str, FileTensor],
    folder: Path,
    progress: Progress,
    *,
    shard_bytes: int | None = None,
) -> None:
    """Write tensors into a folder as Hugging Face has them: one `model.safetensors`, or shards and their index.

    shard_bytes: most of a shard, unless one tensor alone is larger; None for 5 GB.
    """
    sizes = {name: one.nbytes for name, one in tensors.items()}
    total, done = sum(sizes.values()), 0
    shards = _shards(sizes, SHARD_BYTES if shard_bytes is None else shard_bytes)
    where: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        name = "model" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}"
        file = folder / f"{name}.safetensors"
        where |= dict.fromkeys(names, file.name)
        done = _write_file(contents, {name: tensors[name] for name in names}, file, {}, done, total, progress)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def check(specs: Mapping[str, TensorSpec]) -> None:
    """Raise NotExportable naming every tensor whose dtype safetensors does not have."""
    wrong = [
        f"{name}: {spec.dtype} {list(spec.shape)}"
        for name, spec in specs.items()
        if spec.dtype not in _NAMES or (spec.dtype == _PAIRS and not spec.shape)
    ]
    if wrong:
        raise NotExportable(f"safetensors has no dtype for {len(wrong)} tensors, and none is cast: {shortened(wrong)}")
    texts = [name for name in specs if not objects.encodable(name)]
    if texts:
        raise NotExportable(f"safetensors has names in UTF-8, which these are not: {shortened([*map(shown, texts)])}")
    if "__metadata__" in specs:
        raise NotExportable("safetensors cannot hold a tensor called __metadata__")


def _object_keys(contents: Contents) -> list[str]:
    return [key for key in sorted(contents.checkpoint.specs) if objects.is_object(key)]


def _shards(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if shards[-1] and held + size > most:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    return shards


def _write_file(
    contents: Contents,
    tensors: Mapping[str, FileTensor],
    file: Path,
    metadata: Mapping[str, str],
    done: int,
    total: int,
    progress: Progress,
) -> int:
    """Write one file; return the bytes written so far in all files."""
    # The widest elements come first, so that every tensor lies at a multiple of its own element.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].spec.itemsize, item[0])))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, one in ordered.items():
        begin, end = end, end + one.nbytes
        shape = _counted(one.spec.dtype, one.shape)
        header[name] = {"dtype": _NAMES[one.spec.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LARGEST_HEADER:
        raise NotExportable(f"safetensors limits its header to {_LARGEST_HEADER} bytes; this one takes {len(text)}")
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for _, _, data in contents.slabs_of((one.spec, one.box) for one in ordered.values()):
            opened.write(data)
            done += data.nbytes
            progress(done, total)
        opened.flush()
        os.fsync(opened.fileno())
    return done


def _files(source: Path) -> dict[Path, set[str] | None]:
    """Return the shards of a folder or an index, and the tensors that each holds according to the index."""
    folder, index = (source, _index(source)) if source.is_dir() else (source.parent, source)
    if index is None:
        return dict.fromkeys(_without_index(folder))
    held: dict[str, set[str]] = {}
    try:
        for name, file in json.loads(index.read_bytes())["weight_map"].items():
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise ForeignFormat(f"{index}: {file!r} is not a file beside it")
            held.setdefault(file, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ForeignFormat(f"{index}: is no index of shards: {error}") from error
    missing = [file for file in held if not (folder / file).is_file()]
    if missing:
        raise ForeignFormat(f"{folder}: shards are missing: {', '.join(missing[:8])}")
    return {folder / file: names for file, names in held.items()}


def _without_index(folder: Path) -> list[Path]:
    """Return the only file of a folder, or the shards of one set that is complete; ForeignFormat for anything more.

    Unrelated files, such as an adapter beside a model, would silently become one model.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ForeignFormat(f"{folder}: has no {INDEX} and no file *.safetensors")
    if len(files) == 1:
        return files
    shards = [_SHARD.fullmatch(file.name) for file in files]
    sets = {(match["stem"], int(match["all"])) for match in shards if match}
    if all(shards) and len(sets) == 1:
        ((_, count),) = sets
        if {int(match["number"]) for match in shards if match} == set(range(1, count + 1)):
            return files
        raise ForeignFormat(f"{folder}: has {len(files)} shards of {count}, and no index: some are missing")
    raise ForeignFormat(
        f"{folder}: has {len(files)} files of safetensors and no index that says which belong together; nothing was "
        f"imported. Give the one to import: {shortened([file.name for file in files])}"
    )


def _index(folder: Path) -> Path | None:
    """Return the index in a folder: the usual one, or the only one, such as that of a variant."""
    indexes = [folder / INDEX] if (folder / INDEX).exists() else sorted(folder.glob("*" + _INDEX))
    if len(indexes) > 1:
        raise ForeignFormat(
            f"{folder}: has {len(indexes)} indexes; give one of them: {', '.join(f.name for f in indexes)}"
        )
    return indexes[0] if indexes else None


def read_file(file: Path, base: int = 0) -> tuple[dict[str, Stored], dict[str, Any]]:
    """Return where the tensors of a file of safetensors lie, which begins at byte `base`, and its metadata."""
    size = file.stat().st_size - base
    length = int.from_bytes(bytes(read_range(file, base, 8)), "little") if size >= 8 else -1
    if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
        raise ForeignFormat(f"{file}: is no safetensors file, or is cut short")
    end = base + 8 + length
    try:
        header = json.loads(bytes(read_range(file, base + 8, length)), object_pairs_hook=_once)
        if not isinstance(header, dict):
            raise ValueError("its header is no object")
        metadata = header.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict):
            raise ValueError("its __metadata__ is no object")
        tensors = {name: _stored(name, entry, file, end) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ForeignFormat(f"{file}: its header is damaged: {error}") from error
    # The format's own rule: bytes that belong to no tensor, or to two, could hide something.
    for stored in sorted(tensors.values(), key=lambda item: (item.offset, item.spec.box.numel)):
        if stored.offset != end:
            raise ForeignFormat(f"{file}: {stored.spec.key} does not begin where the tensor before it ends")
        end += stored.spec.box.numel * stored.spec.itemsize
    if end != base + size:
        raise ForeignFormat(
            f"{file}: has {base + size} bytes where its header says {end}: it is cut short, or has a tail"
        )
    return tensors, metadata


def _offsets(metadata: Mapping[str, Any], file: Path) -> dict[str, tuple[int, ...]]:
    """Return where in its tensor each part begins, for files that hold parts."""
    if _SHARDING not in metadata:
        return {}
    try:
        offsets = {name: tuple(entry["saved_offsets"]) for name, entry in json.loads(metadata[_SHARDING]).items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ForeignFormat(f"{file}: its {_SHARDING} is damaged: {error}") from error
    if not all(type(n) is int and 0 <= n < 1 << 63 for offset in offsets.values() for n in offset):
        raise ForeignFormat(f"{file}: its {_SHARDING} has an offset that is no number from 0")
    return offsets


def _joined(parts: Sequence[tuple[Stored, tuple[int, ...]]], source: Path) -> list[Stored]:
    """Return parts as boxes of their tensors. The parts' extent gives the shapes, which are not written down."""
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for part, offset in parts:
        key, shape = part.spec.key, part.spec.shape
        reach = tuple(a + n for a, n in zip(offset, shape, strict=False))
        before = shapes.get(key, reach)
        if not len(offset) == len(shape) == len(before) or dtypes.setdefault(key, part.spec.dtype) != part.spec.dtype:
            raise ForeignFormat(f"{source}: {key}: its parts do not fit one another")
        shapes[key] = tuple(map(max, before, reach))
    joined: dict[tuple[str, Box], Stored] = {}
    for part, offset in parts:
        spec = TensorSpec(key=part.spec.key, dtype=part.spec.dtype, shape=shapes[part.spec.key])
        box = Box(start=offset, stop=tuple(a + n for a, n in zip(offset, part.spec.shape, strict=True)))
        # Tensors that every rank has whole are in each rank's file.
        joined.setdefault((spec.key, box), Stored(spec=spec, box=box, file=part.file, offset=part.offset))
    return list(joined.values())


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("names something twice")
    return entries


def _counted(dtype: str, shape: tuple[int, ...]) -> list[int]:
    """Return a shape as safetensors counts it."""
    return [*shape[:-1], 2 * shape[-1]] if dtype == _PAIRS else list(shape)


def _stored(name: str, entry: Any, file: Path, base: int) -> Stored:
    shape, (begin, end) = entry["shape"], entry["data_offsets"]
    if entry["dtype"] not in _DTYPES:
        raise ForeignFormat(f"{file}: {name}: dtype {entry['dtype']} {shape} cannot be kept")
    if not all(type(n) is int and n >= 0 for n in [*shape, begin, end]):
        raise ValueError(f"{name} has a shape or an offset that is no number from 0")
    if _DTYPES[entry["dtype"]] == _PAIRS:
        if not shape or shape[-1] % 2:
            raise ForeignFormat(f"{file}: {name}: dtype {entry['dtype']} {shape} cannot be kept: not pairs of values")
        shape = [*shape[:-1], shape[-1] // 2]
    spec = TensorSpec(key=name, dtype=_DTYPES[entry["dtype"]], shape=tuple(shape))
    if end - begin != math.prod(shape) * spec.itemsize:
        raise ValueError(f"{name}: {end - begin} bytes are not those of {spec.dtype} {shape}")
    return Stored(spec=spec, box=spec.box, file=file, offset=base + begin)


def _facts(metadata: Mapping[str, Any], file: Path) -> dict[str, Any] | None:
    if _FACTS not in metadata:
        return None
    try:
        facts = json.loads(metadata[_FACTS])
        if not isinstance(facts, dict):
            return None
        facts_digest(facts)
    except (ValueError, TypeError, RecursionError) as error:
        raise ForeignFormat(f"{file}: its facts are no JSON: {error}") from error
    return facts
