"""The one place that touches gRPC, which has no types: channels, calls and streams, and failures as values.

gRPC does not survive a fork: in the child of a process that has used it nothing is ever answered, and no timeout ever
fires, not even on a new channel (5 of 5 forks hung). Its own support for forks helps only most of the time, and now and
then hangs parent or child, as tried with 1.85 and a watch open; so it stays off. Instead such a child loads gRPC a
second time when it first needs it: another instance of the library, with its own threads and locks, that knows nothing
of the parent's (0 of 200 forks hung beside a busy parent; 0.3 s). The first instance, and everything made by it, is
neither used nor freed there.

`GRPC_VERBOSITY=NONE` keeps each failed connection off the user's terminal, where our own errors say it better. gRPC
reads its settings from the environment, once when it is imported and once when it is first used. They are set for those
two moments only, since workers inherit the environment.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import Any

from elastic3d.errors import ConfigurationError, UsageError
from elastic3d.etcd import messages
from elastic3d.etcd.endpoints import Endpoint
from elastic3d.etcd.tls import Pem, Tls

SETTINGS = {"GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "0"}
"""gRPC's settings in environment variables, unless the user has set them."""


@contextmanager
def _environment() -> Iterator[None]:
    """Have our settings in the environment while gRPC reads them."""
    ours = {name: value for name, value in SETTINGS.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def _load() -> Any:
    """Return gRPC as Python finds it now."""
    with _environment():
        module = importlib.import_module("grpc")
        common = importlib.import_module("grpc._common")
    # A thread that waits for a stream's next answer is woken by it, yet looks ten times a second whether it was: the
    # greater part of an idle stream's cost. That was meant for signals, which Python 3 lets through anyway.
    if hasattr(common, "MAXIMUM_WAIT_TIMEOUT"):
        vars(common)["MAXIMUM_WAIT_TIMEOUT"] = 2.0
    return module


grpc = _load()
_LIBRARY = "grpc._cython.cygrpc"

Metadata = tuple[tuple[str, str], ...]


class _Process:
    """The state of gRPC in this process. used: it has begun, here or before a fork. forked: before a fork.

    library: the file from which the first instance was loaded.
    """

    def __init__(self) -> None:
        self.library = getattr(sys.modules.get(_LIBRARY), "__file__", None) or ""
        self.lock = threading.Lock()
        self.used = self.forked = False

    def after_fork(self) -> None:
        """Take note, in the child, that this is another process now."""
        self.lock = threading.Lock()
        self.forked |= self.used


_process = _Process()
os.register_at_fork(after_in_child=_process.after_fork)


def _begin() -> None:
    """Let gRPC begin, if it has not; load another instance in a child of a process in which it had, or UsageError."""
    global grpc
    with _process.lock:
        if _process.forked:
            try:
                grpc = _load_again()
            except (ImportError, OSError, AttributeError, KeyError) as error:
                raise UsageError(
                    "etcd: this process was forked from one that had used etcd over gRPC, nothing would ever be "
                    f"answered here, and gRPC cannot be loaded a second time ({type(error).__name__}: {error}); trying "
                    'again does not help. Start it with multiprocessing\'s "spawn" or "forkserver", or fork before the '
                    "first use of elastic3d's rendezvous handler or client"
                ) from error
            _process.forked = _process.used = False
        if not _process.used:
            with _environment():
                grpc.insecure_channel("127.0.0.1:1").close()
            _process.used = True


def _load_again() -> Any:
    """Return a new instance of gRPC, which `import grpc` also returns from now on.

    The loader takes one inode for one library, so the second instance is loaded from a copy.
    """
    old = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "grpc"}
    leak(old)
    with open(_process.library, "rb") as source, open(os.memfd_create("grpc"), "wb") as copy:
        shutil.copyfileobj(source, copy, 1 << 20)
        copy.flush()
        finder = _Copy(f"/proc/self/fd/{copy.fileno()}")
        sys.meta_path.insert(0, finder)
        try:
            return _load()
        except BaseException:
            for name in [name for name in sys.modules if name.partition(".")[0] == "grpc"]:
                leak(sys.modules.pop(name))
            sys.modules.update(old)
            raise
        finally:
            sys.meta_path.remove(finder)


class _Copy(MetaPathFinder):
    """Finds gRPC's library in the file at `path`."""

    def __init__(self, path: str) -> None:
        self._path = path

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where the library is; None for all else."""
        if fullname != _LIBRARY:
            return None
        return spec_from_file_location(fullname, self._path, loader=ExtensionFileLoader(fullname, self._path))


def leak(value: object) -> None:
    """Keep a value until the process has ended: freeing it could wait for a lock for ever."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


# A member without a leader then refuses at once and ends its streams, instead of serving an old view in silence.
HAS_LEADER: Metadata = (("hasleader", "true"),)

OPTIONS: tuple[tuple[str, int], ...] = (
    # A listing of thousands of members is larger than gRPC's 4 MB.
    ("grpc.max_receive_message_length", -1),
    # By default a member that was away is dialled again only after up to two minutes. `min` is really the time limit of
    # a dial: room for one lost packet, and for a busy machine.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2500),
    ("grpc.max_reconnect_backoff_ms", 500),
    # A channel of ours ends with us, and no web proxy is used for a member's address.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
)


@dataclass(frozen=True, slots=True)
class Method:
    """One remote procedure of etcd: request and response are names of `messages`."""

    path: str
    request: str
    response: str


def _method(service: str, name: str, message: str = "") -> Method:
    message = message or name
    return Method(f"/etcdserverpb.{service}/{name}", f"{message}Request", f"{message}Response")


RANGE = _method("KV", "Range")
PUT = _method("KV", "Put")
DELETE_RANGE = _method("KV", "DeleteRange")
TXN = _method("KV", "Txn")
COMPACT = _method("KV", "Compact", "Compaction")
WATCH = _method("Watch", "Watch")
LEASE_GRANT = _method("Lease", "LeaseGrant")
LEASE_REVOKE = _method("Lease", "LeaseRevoke")
LEASE_KEEP_ALIVE = _method("Lease", "LeaseKeepAlive")
LEASE_TIME_TO_LIVE = _method("Lease", "LeaseTimeToLive")
LEASE_LEASES = _method("Lease", "LeaseLeases")
STATUS = _method("Maintenance", "Status")
SNAPSHOT = _method("Maintenance", "Snapshot")
MEMBER_LIST = _method("Cluster", "MemberList")
AUTHENTICATE = _method("Auth", "Authenticate")


class RpcFailure(Exception):
    """A call that gave no answer: gRPC's status code by name, and the detail text. Internal to this package.

    NOT_SENT is our own code: the request never left this process.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


def _failure(error: Any) -> RpcFailure:
    return RpcFailure(error.code().name, error.details() or "")


class RpcStream:
    """A stream in both directions; iterate for the answers. Ends in RpcFailure unless the server ended it."""

    def __init__(self, call: Any, channel: EndpointChannel) -> None:
        self._call = call
        self._channel = channel

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._call
        except grpc.RpcError as error:
            raise _failure(error) from None

    def close(self) -> None:
        """End the stream and its connection; a thread that iterates gets RpcFailure CANCELLED. May be called twice."""
        self._call.cancel()
        self._channel.close()


class EndpointChannel:
    """A connection to one member, dialled when first used. Thread-safe.

    RpcFailure if the TLS files cannot be used.
    """

    def __init__(self, endpoint: Endpoint, tls: Tls | None) -> None:
        _begin()
        options: list[tuple[str, Any]] = list(OPTIONS)
        self._tls = tls
        self._pem = Pem()
        if endpoint.tls:
            try:
                self._pem = pem = Pem() if tls is None else tls.read()
            except ConfigurationError as error:
                # It was good when the client was made: the files are being replaced.
                raise RpcFailure("NOT_SENT", str(error)) from None
            if tls is not None and tls.server_name is not None:
                options.append(("grpc.ssl_target_name_override", tls.server_name))
            credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.certificate)
            self._channel = grpc.secure_channel(endpoint.target, credentials, options)
        else:
            self._channel = grpc.insecure_channel(endpoint.target, options)

    def call(self, method: Method, request: Any, *, timeout: float, metadata: Metadata = ()) -> Any:
        """Return the answer to one request; RpcFailure if there is none within `timeout` seconds."""
        try:
            multi = self._channel.unary_unary(
                method.path,
                request_serializer=messages.CLASSES[method.request].SerializeToString,
                response_deserializer=messages.CLASSES[method.response].FromString,
            )
            return multi(request, timeout=timeout, metadata=metadata)
        except grpc.RpcError as error:
            raise _failure(error) from None
        except ValueError as error:  # the channel was closed by another thread before the call was sent
            raise RpcFailure("NOT_SENT", str(error)) from None

    def stream(
        self, method: Method, requests: Iterable[Any], *, metadata: Metadata = (), limit: float | None = None
    ) -> RpcStream:
        """Open a stream; `requests` is consumed by a thread of gRPC's. Closing the stream closes this channel.

        limit: seconds after which it ends in DEADLINE_EXCEEDED.
        """
        multi = self._channel.stream_stream(
            method.path,
            request_serializer=messages.CLASSES[method.request].SerializeToString,
            response_deserializer=messages.CLASSES[method.response].FromString,
        )
        return RpcStream(multi(iter(requests), metadata=metadata, timeout=limit), self)

    def outdated(self) -> bool:
        """Return whether the TLS files have changed: the channel dials with those it was made from."""
        try:
            return self._tls is not None and self._tls.read() != self._pem
        except ConfigurationError:
            return False

    def close(self) -> None:
        """End the connection; calls under way get RpcFailure CANCELLED. May be called twice."""
        self._channel.close()
