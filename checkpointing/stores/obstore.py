"""Object stores through obstore: S3 and compatible ones, Google Cloud Storage, Azure Blob Storage.

Its own interface is used, since the one for fsspec drops conditions; but not its `get_ranges`, which panics if an
object is shorter than the range (seen in 0.12.1). A token is the ETag, with the version if there is one. Only data that
fits one request is held in memory; everything else goes in parts, several at once.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from checkpointing.errors import (
    SET_THE_CLOCK,
    SKEWED,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreNotFound,
    StoreUnfit,
    StoreUnreachable,
)
from checkpointing.stores.checking import Sent
from checkpointing.stores.cloud import connect, first_line
from checkpointing.stores.protocol import Data, Entry, Versioned, check_name, chunks

if TYPE_CHECKING:
    from obstore import UpdateVersion

_SINGLE = 64 << 20  # up to here, bytes that are already in memory go in one request
_HELD = 40 << 20  # up to here, other data is collected, which takes less memory than parts under way
_PART = 16 << 20  # S3 accepts 5 MiB to 5 GiB, and 10,000 of them
_PARTS_AT_ONCE = 4

_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_DENIED = ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken")
# Errors that no retry mends. Some 400s are missing on purpose: RequestTimeout, IncompleteBody and BadDigest come from a
# bad connection.
_UNFIT = (
    *("AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "InvalidBucketName", "KeyTooLongError"),
    *("MethodNotAllowed", "NotImplemented", "PermanentRedirect"),
)
_FULL = ("InsufficientStorage", "QuotaExceeded", "XMinioStorageFull")
_BEYOND = re.compile(r"non-2xx status code: 416\b|<Code>InvalidRange</Code>")
_METADATA = ("169.254.169.254", "metadata.google.internal", "fd00:ec2")


# The process whose threads serve obstore, once it has been used. A fork has the client but not the threads, and would
# wait for ever.
_served_by: int | None = None


def usable() -> bool:
    """Return whether obstore works in this process: it does not in one that was forked after it was used."""
    return _served_by in (None, os.getpid())


class ObstoreStore:
    """Objects of a bucket, below a prefix."""

    def __init__(self, url: str, *, options: Mapping[str, Any], patience: float = 0.0) -> None:
        """Make a client, without contacting the store yet. StoreUnfit if URL or options are wrong.

        patience: seconds for which each part of an upload in parts is retried; the caller retries everything else.
        """
        self._url = url
        self._client = connect(url, options)
        # Parts have no conditions and are retried by themselves: one that is refused does not cost the others.
        self._parts = connect(url, options, patience=patience) if patience else self._client
        self._bare = False  # whether ETags are sent without their quotes

    @property
    def url(self) -> str:
        """The URL it was opened with."""
        return self._url

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes [start, stop) of an object."""
        check_name(name)
        empty = stop is not None and stop <= start
        if empty:
            stop = start + 1  # the object must exist all the same
        try:
            with self._errors("read", name):
                if stop is not None:
                    data = self._client.get_range(name, start=start, end=stop).to_bytes()
                elif start:
                    data = self._client.get(name, options={"range": {"offset": start}}).bytes().to_bytes()
                else:
                    data = self._client.get(name).bytes().to_bytes()
        except _BeyondEnd:
            return b""
        return b"" if empty else data

    def read(self, name: str) -> Versioned | None:
        """Return an object with its token, both from one answer; None if it is not there."""
        check_name(name)
        try:
            with self._errors("read", name):
                answer = self._client.get(name)
                return Versioned(data=answer.bytes().to_bytes(), token=_token(answer.meta))
        except StoreNotFound:
            return None

    def size(self, name: str) -> int:
        """Return an object's bytes."""
        check_name(name)
        with self._errors("read", name):
            return int(self._client.head(name)["size"])

    def put(self, name: str, data: Data, *, check: bool = False) -> None:
        """Write an object, replacing what was there; `check` compares the ETag, or reads back without one."""
        check_name(name)
        blocks, rest = _first(chunks(data), in_memory=isinstance(data, bytes | memoryview | Sequence))
        if rest is None:
            with self._errors("write", name):
                answer = self._client.put(name, blocks or b"", use_multipart=False)
            if check and _md5(blocks).hexdigest() != _plain(answer["e_tag"]):
                # In encrypted buckets and other clouds ETags are not checksums.
                sent = Sent(blocks)
                collections.deque(sent, maxlen=0)
                sent.compare(self, name)
            return
        sent = Sent(itertools.chain(blocks, rest))
        summed = _Summed(sent)
        with self._errors("write", name):
            answer = self._parts.put(
                name,
                iter(summed if check else itertools.chain(blocks, rest)),
                use_multipart=True,
                chunk_size=_PART,
                max_concurrency=_PARTS_AT_ONCE,
            )
        if check and summed.etag() != _plain(answer["e_tag"]):
            sent.compare(self, name)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create an object; False if one was there."""
        check_name(name)
        with self._errors("create", name):
            try:
                self._client.put(name, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            return True

    def compare_and_swap(self, name: str, expected: str | None, data: bytes) -> bool:
        """Replace an object if its token is `expected`."""
        if expected is None:
            return self.put_if_absent(name, data)
        check_name(name)
        if self._swap(name, expected, data):
            return True
        if self._bare or '"' not in expected:
            return False
        versioned = self.read(name)
        if versioned is None or versioned.token != expected:
            return False
        # Refused although nothing has changed: Ceph's radosgw wants the ETag without its quotes.
        self._bare = self._swap(name, expected.replace('"', ""), data)
        return self._bare

    def _swap(self, name: str, expected: str, data: bytes) -> bool:
        etag, _, version = (expected.replace('"', "") if self._bare else expected).partition(" ")
        present: UpdateVersion = {"e_tag": etag, "version": version} if version else {"e_tag": etag}
        with self._errors("swap", name):
            try:
                self._client.put(name, data, mode=present, use_multipart=False)
            except PreconditionError as error:
                if _code(str(error)) in _NO_BUCKET:
                    raise
                return False
            return True

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the names that begin with `prefix`, sorted."""
        for entry in self.entries(prefix):
            yield entry.name

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Yield the objects whose names begin with `prefix`, sorted by name."""
        folder = prefix.rpartition("/")[0]  # obstore's prefixes are whole parts of names
        entries = []
        with self._errors("list", prefix or "its objects"):
            for page in self._client.list(folder or None, chunk_size=1000):
                for meta in page:
                    if meta["path"].startswith(prefix):
                        modified = meta["last_modified"].timestamp()
                        entries.append(Entry(name=meta["path"], size=meta["size"], modified=modified))
        yield from sorted(entries, key=lambda entry: entry.name)

    def delete(self, name: str) -> None:
        """Remove an object; nothing happens if it is not there."""
        check_name(name)
        try:
            with self._errors("delete", name):
                self._client.delete(name)
        except StoreNotFound:
            pass

    @contextlib.contextmanager
    def _errors(self, verb: str, name: str) -> Iterator[None]:
        global _served_by
        if not usable():
            raise StoreUnfit(
                f"store {self._url}: obstore was used before this process was forked, and does not work in it. Open "
                "the store again here: it is then spoken to through s3fs."
            )
        _served_by = os.getpid()
        try:
            yield
        except (BaseError, FileNotFoundError, PermissionError, TimeoutError, ConnectionError) as error:
            text = first_line(error)
            said = _said(text)
            where = f"store {self._url}: cannot {verb} {name}: "
            if _BEYOND.search(text):
                raise _BeyondEnd from error
            if _code(text) in _NO_BUCKET:
                raise StoreUnfit(f"{where}there is no such bucket. Make it, or correct the URL.") from error
            if isinstance(error, FileNotFoundError):
                raise StoreNotFound(f"{where}it is not there") from error
            if any(address in text for address in _METADATA):
                raise StoreDenied(
                    f"{where}no credentials were found: none are in the environment, in options or in shared files, "
                    "and this machine has no identity of its own"
                ) from error
            if _code(text) == SKEWED:
                raise StoreDenied(f"{where}{SET_THE_CLOCK}") from error
            refused = (PermissionDeniedError, UnauthenticatedError, PermissionError)
            if isinstance(error, refused) or _code(text) in _DENIED:
                raise StoreDenied(f"{where}{said}. Check the credentials, and what they may do there.") from error
            if _code(text) in _FULL:
                raise StoreFull(f"{where}{said}. Free space or raise the quota.") from error
            if _code(text) in _UNFIT:
                raise StoreUnfit(f"{where}{said}. Correct the URL, the region or the options.") from error
            if "error sending request" in text:
                raise StoreUnreachable(f"{where}{said}") from error
            raise StoreError(f"{where}{said}") from error


class _BeyondEnd(Exception):
    """The range begins at or after the end of the object."""


class _Summed:
    """Data that is hashed part by part, as an S3 server does it for its ETag."""

    def __init__(self, source: Iterable[memoryview]) -> None:
        self._source = source
        self._part, self._filled = _md5(()), 0
        self._parts: list[bytes] = []

    def __iter__(self) -> Iterator[memoryview]:
        for chunk in self._source:
            yield chunk
            rest = chunk
            while rest.nbytes:
                if self._filled == _PART:
                    self._close_part()
                piece = rest[: _PART - self._filled]
                self._part.update(piece)
                self._filled += piece.nbytes
                rest = rest[piece.nbytes :]

    def etag(self) -> str:
        """Return the ETag of all that was yielded."""
        self._close_part()
        return f"{_md5(self._parts).hexdigest()}-{len(self._parts)}"

    def _close_part(self) -> None:
        self._parts.append(self._part.digest())
        self._part, self._filled = _md5(()), 0


def _md5(blocks: Iterable[bytes | memoryview]) -> hashlib._Hash:
    hasher = hashlib.md5(usedforsecurity=False)
    for block in blocks:
        hasher.update(block)
    return hasher


def _first(
    source: Iterator[memoryview], *, in_memory: bool
) -> tuple[list[bytes | memoryview], Iterator[memoryview] | None]:
    """Return what one request carries, and the rest if there is more.

    Data that is already in memory is not copied; all other data is, since its producer may reuse its memory.
    """
    limit = _SINGLE if in_memory else _HELD
    blocks: list[bytes | memoryview] = []
    total = 0
    for chunk in source:
        if chunk.nbytes:
            blocks.append(chunk if in_memory else bytes(chunk))
            total += chunk.nbytes
        if total > limit:
            return blocks, source
    return blocks, None


def _token(meta: Mapping[str, Any]) -> str:
    return f"{meta['e_tag'] or ''} {meta.get('version') or ''}".rstrip()


def _plain(etag: str | None) -> str:
    return (etag or "").strip('"').lower()


def _code(text: str) -> str:
    """Return the error code of a server's answer, empty if there is none; the rest of the answer may say anything."""
    code = re.search(r"<Code>([^<]*)</Code>", text)
    return code[1] if code else ""


def _said(text: str) -> str:
    """Return the server's message, or else obstore's, without the request's URL, which may carry a signature."""
    code, message = re.search(r"<Code>([^<]*)</Code>", text), re.search(r"<Message>([^<]*)</Message>", text)
    if code:
        return f"{code[1]}: {message[1].rstrip('.')}" if message and message[1] else code[1]
    return re.sub(r"\?\S*", "?...", text)
