"""Documents: canonical JSON in a zstd frame that carries its own digest (format.md, section 3)."""

from __future__ import annotations

import json
from typing import Any

import blake3
import zstandard

from checkpointing.errors import Corrupt, FormatError, NewerFormat, WrongKey

FORMAT = "elastic3d-checkpoint"
VERSION = 1
LARGEST = 1 << 30  # a document that would unpack to more is refused
_SKIPPABLE = bytes.fromhex("502a4d1820000000")
TRAILER = len(_SKIPPABLE) + 32
_RATIO = 20_000  # a frame that declares so many times its own bytes is refused
_PIECE = 64 << 10  # a block takes 4 bytes or more: with no more text than this in each, no frame is refused
SEALED = b"E3DSEAL2"  # what an encrypted object begins with
SEALED_CHUNK = 64 << 10  # bytes of it that are encrypted together, and lost together if any of them is damaged
SEALED_BEFORE = b"E3DSEAL1"  # the same, in stores whose packs have names that follow from their contents


def canonical(value: Any) -> bytes:
    """Return `value` as canonical JSON; ValueError or TypeError for what JSON cannot say."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def hexdigest(data: bytes | memoryview) -> str:
    """Return the BLAKE3 of `data` in hex."""
    return blake3.blake3(data).hexdigest()


def pack_json(value: Any) -> bytes:
    """Return canonical JSON in one zstd frame with its content size declared; FormatError for more than 1 GiB."""
    text = canonical(value)
    if len(text) > LARGEST:
        raise FormatError(
            f"a document would have {len(text)} bytes, and readers refuse more than {LARGEST}: save what is large as "
            "tensors, or in more parts; trying again does not help"
        )
    compressor = zstandard.ZstdCompressor(level=3, write_content_size=True)
    frame = compressor.compress(text)
    if not _absurd(len(text), frame):
        return frame
    # Millions of the same character: in smaller blocks, so that readers do not take it for a bomb.
    blocks, pieces = compressor.compressobj(size=len(text)), memoryview(text)
    return b"".join(
        blocks.compress(pieces[start : start + _PIECE]) + blocks.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        for start in range(0, len(text), _PIECE)
    ) + blocks.flush(zstandard.COMPRESSOBJ_FLUSH_FINISH)


def unpack_json(frame: bytes, name: str) -> Any:
    """Return the JSON in one zstd frame; FormatError naming the object `name` if it is not one, or is a bomb."""
    try:
        size = zstandard.frame_content_size(frame)
        if not 0 <= size <= LARGEST:
            raise FormatError(f"{name}: declares {size} bytes of content; at most {LARGEST} are accepted")
        # `decompress` allocates what the header declares, so an absurd ratio is refused before it does.
        if _absurd(size, frame):
            raise FormatError(f"{name}: {len(frame)} bytes cannot hold the {size} they declare")
        text = zstandard.ZstdDecompressor().decompress(frame, max_output_size=LARGEST)
        return json.loads(text, parse_constant=_refuse_constant)
    except (zstandard.ZstdError, ValueError, RecursionError) as error:
        raise FormatError(f"{name}: not JSON in a zstd frame: {error}") from error


def _absurd(size: int, frame: bytes) -> bool:
    return size > 4096 + _RATIO * len(frame)


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def document(kind: str, body: dict[str, Any]) -> bytes:
    """Return a document of `kind` as the bytes of its object."""
    frame = pack_json({"format": FORMAT, "version": VERSION, "kind": kind, **body})
    return frame + _SKIPPABLE + blake3.blake3(frame).digest()


def moved(kind: str, where: str) -> bytes:
    """Return a document of the next version, which says only that the object has moved elsewhere."""
    frame = pack_json({"format": FORMAT, "version": VERSION + 1, "kind": kind, "moved": where})
    return frame + _SKIPPABLE + blake3.blake3(frame).digest()


def parse(data: bytes, kind: str, name: str) -> dict[str, Any]:
    """Return the body of a document; Corrupt, NewerFormat or FormatError, each naming the object `name`.

    WrongKey when it is encrypted: the store was opened without a key.
    """
    if data.startswith((SEALED, SEALED_BEFORE)):
        raise WrongKey(f"{name}: is encrypted: open the store with the key it was written with")
    frame, trailer = data[:-TRAILER], data[-TRAILER:]
    if trailer[: len(_SKIPPABLE)] != _SKIPPABLE or trailer[len(_SKIPPABLE) :] != blake3.blake3(frame).digest():
        raise Corrupt(f"{name}: its bytes do not match the digest it ends with: it is damaged or cut short")
    return check_header(unpack_json(frame, name), kind, name)


def check_header(body: Any, kind: str, name: str) -> dict[str, Any]:
    """Return `body` if it is an object of this format, of a version we read, and of `kind`."""
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise FormatError(f"{name}: not part of a checkpoint in the format {FORMAT}")
    version = body.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FormatError(f"{name}: version {version!r} is not a version")
    if version > VERSION:
        raise NewerFormat(f"{name}: written in format version {version}, this reader knows {VERSION}: upgrade to read")
    if body.get("kind") != kind:
        raise FormatError(f"{name}: is a {body.get('kind')!r}, expected a {kind!r}")
    return body
