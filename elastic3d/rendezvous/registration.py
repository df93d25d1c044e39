"""How `--rdzv-backend=etcd` becomes ours.

torch calls the entry points of group `torchrun.handlers` when its rendezvous package is imported, and registers their
results under the entry points' names. A name that torch itself uses is refused there, and the refusal is only logged;
so the entry point is called `etcd-v3`, and replaces torch's own `etcd` in the registry itself. torch's backend speaks
etcd's v2 API, which servers since 3.4 refuse by default and 3.6 no longer has.

`ELASTIC3D_TAKE_OVER_ETCD=0` leaves torch's own `etcd` alone; `etcd-v3` is ours either way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from elastic3d import environment, output

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters

SWITCH = environment.TAKE_OVER_ETCD.name


def register() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Take over the backend name `etcd` and return the creator torch is to register as `etcd-v3`."""
    if environment.TAKE_OVER_ETCD.read() != "0":
        try:
            from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry

            rendezvous_handler_registry._registry["etcd"] = create
        except (ImportError, AttributeError, TypeError) as error:
            _complain(error)
    return create


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return the handler of the chosen mode; errors say what to change on the command line."""
    from elastic3d.rendezvous.settings import from_parameters

    output.checked_verbosity()
    if parameters.backend == "etcd":
        output.say(
            f"elastic3d serves --rdzv-backend=etcd here, with etcd's v3 API; {SWITCH}=0 leaves it to torch's own"
        )
    settings = from_parameters(parameters)
    if settings.mode == "resident":
        from elastic3d.rendezvous.resident import ResidentHandler

        return ResidentHandler(settings, parameters.backend)
    from elastic3d.rendezvous.restart import RestartHandler

    return RestartHandler(settings, parameters.backend)


def _complain(error: Exception) -> None:
    """Report that the takeover failed; end a torchrun that asked for it: torch would silently use its v2 backend."""
    text = (
        f"elastic3d could not take over --rdzv-backend=etcd in this torch ({type(error).__name__}: {error}). "
        f"Use --rdzv-backend=etcd-v3, or set {SWITCH}=0 to keep torch's own backend."
    )
    output.say(text)
    asked = any(a in ("--rdzv-backend=etcd", "--rdzv_backend=etcd") for a in sys.argv) or any(
        a in ("--rdzv-backend", "--rdzv_backend") and b == "etcd" for a, b in zip(sys.argv, sys.argv[1:], strict=False)
    )
    if asked:
        raise SystemExit(1)
