"""From settings to a checked etcd client."""

from __future__ import annotations

from elastic3d import output
from elastic3d.clock import SYSTEM
from elastic3d.errors import ConfigurationError, EtcdUnavailable
from elastic3d.etcd import EtcdClient, Impaired, PasswordRefused, Tls, parse_endpoints, password_warning
from elastic3d.rendezvous.settings import Settings
from elastic3d.trust.encryption import Encryption, load


def encryption(settings: Settings) -> Encryption | None:
    """Return how connections between nodes are encrypted; ConfigurationError if the files cannot be used for that."""
    try:
        return load(settings.cert, settings.key)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"--rdzv-conf: cert={settings.cert} and key={settings.key} cannot be used between nodes ({error}): "
            "give PEM files that this node can read, a certificate and its key without a passphrase"
        ) from error


def client(settings: Settings) -> EtcdClient:
    """Return a client for the settings' cluster; nothing is connected yet."""
    tls = Tls.of(settings.ca, settings.cert, settings.key)
    password = None
    if settings.password_file:
        # Read each time etcd asks, so that the password can be changed while the job runs; now to report what is wrong.
        password = settings.password
        password()
        warning = password_warning(settings.user, parse_endpoints(settings.endpoints, tls=tls is not None))
        if warning:
            output.say(warning)
    return EtcdClient(settings.endpoints, user=settings.user or None, password=password, tls=tls)


PATIENCE = 30.0
"""Seconds that a starting node waits for an etcd that is not there yet, or is overloaded, or for its new password."""

_POLL = 0.5


def connect(settings: Settings, *, patience: float | None = None) -> EtcdClient:
    """Return a client after checking that etcd is there, new enough, and lets us in; errors say what to do.

    patience: seconds for which to go on if the first tries get no answer, or the password of a file is refused, which
    somebody may be changing; 0 for not at all. By default `PATIENCE`, or the time that the job waits for its other
    nodes if that is shorter.
    """
    if patience is None:
        patience = min(PATIENCE, settings.policy.below_minimum)
    made = client(settings)
    try:
        try:
            made.check(settings.root)
        except EtcdUnavailable as error:
            if isinstance(error, Impaired) or not patience:
                raise
            output.say(f"{error}; trying for {patience:g} s more")
            made.check(settings.root, budget=patience)
        except PasswordRefused as error:
            if not settings.password_file or not patience:
                raise
            output.say(f"{error}; trying for {patience:g} s more, should somebody be changing it")
            _check_login(made, settings.root, patience)
    except BaseException:
        made.close()
        raise
    return made


def _check_login(made: EtcdClient, root: str, patience: float) -> None:
    """Check until the password, which is read from its file each time, is the one that etcd has."""
    until = SYSTEM.monotonic() + patience
    while True:
        SYSTEM.sleep(_POLL)
        try:
            made.check(root)
        except PasswordRefused:
            if SYSTEM.monotonic() >= until:
                raise
        else:
            return
