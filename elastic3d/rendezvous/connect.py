"""From settings to a checked etcd client."""

from __future__ import annotations

from elastic3d.etcd import EtcdClient, Tls
from elastic3d.rendezvous.settings import Settings


def client(settings: Settings) -> EtcdClient:
    """Return a client for the settings' cluster; nothing is connected yet."""
    tls = Tls.of(settings.ca, settings.cert, settings.key)
    password = None
    if settings.password_file:
        # Read each time etcd asks, so that the password can be changed while the job runs; now, to tell what is wrong.
        password = settings.password
        password()
    return EtcdClient(settings.endpoints, user=settings.user or None, password=password, tls=tls)


def connect(settings: Settings) -> EtcdClient:
    """Return a client that has proved etcd is there, new enough, and lets us in; errors say what to do."""
    made = client(settings)
    try:
        made.check(settings.root)
    except BaseException:
        made.close()
        raise
    return made
