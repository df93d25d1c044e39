"""Errors of a handler, each both ours and of the class that torch's contract for rendezvous handlers names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousConnectionError

from elastic3d.errors import EtcdError, EtcdRefused, EtcdUnavailable, JobEnded


class RendezvousEnded(JobEnded, RendezvousClosedError):
    """The job under this run id is over; trying again does not help."""


class EtcdAway(EtcdUnavailable, RendezvousConnectionError):
    """No endpoint answered in time; trying again may help."""


class EtcdRefusedUs(EtcdRefused, RendezvousConnectionError):
    """etcd will never take this node's requests as they are; trying again does not help."""


@contextmanager
def as_torchs() -> Iterator[None]:
    """Raise etcd's errors as the classes that torch expects, with the same text."""
    try:
        yield
    except EtcdUnavailable as error:
        raise EtcdAway(str(error)) from error
    except EtcdError as error:
        raise EtcdRefusedUs(str(error)) from error
