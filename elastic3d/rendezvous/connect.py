"""From settings to a checked etcd client."""

from __future__ import annotations

from pathlib import Path

from elastic3d.etcd import EtcdClient, Tls
from elastic3d.rendezvous.settings import Settings


def client(settings: Settings) -> EtcdClient:
    """Return a client for the settings' cluster; nothing is connected yet."""
    tls = None
    if settings.ca or settings.cert or settings.key:
        tls = Tls(
            ca=Path(settings.ca) if settings.ca else None,
            certificate=Path(settings.cert) if settings.cert else None,
            key=Path(settings.key) if settings.key else None,
        )
    return EtcdClient(settings.endpoints, user=settings.user or None, password=settings.password(), tls=tls)


def connect(settings: Settings) -> EtcdClient:
    """Return a client that has proved etcd is there, new enough, and lets us in; errors say what to do."""
    made = client(settings)
    try:
        made.check(settings.root)
    except BaseException:
        made.close()
        raise
    return made
