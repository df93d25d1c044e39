"""elastic3d: fault-tolerant elastic 3D training for PyTorch.

    import elastic3d

    def main(run: elastic3d.Run) -> None: ...

    elastic3d.run(main, store="s3://bucket/my-run")

Names are loaded when first used: the package is imported in every process that imports torch's rendezvous.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic3d.torch_support import check_version

if TYPE_CHECKING:
    from elastic3d.data import Adaptive, Cached, Growing, Mixture, Packed, Remote, Stratified, TokenBudget, TokenFile
    from elastic3d.entry import run
    from elastic3d.errors import Elastic3dError
    from elastic3d.health.options import Health
    from elastic3d.islands import Islands
    from elastic3d.trackers import Tracker
    from elastic3d.training import Run
    from elastic3d.values import Layout
    from elastic3d.worker.options import Checkpointing

__all__ = [
    "run",
    "Run",
    "Checkpointing",
    "Health",
    "Islands",
    "Layout",
    "Growing",
    "Adaptive",
    "TokenBudget",
    "TokenFile",
    "Packed",
    "Stratified",
    "Mixture",
    "Cached",
    "Remote",
    "Tracker",
    "Elastic3dError",
]

check_version()

_HOMES = {
    "run": "elastic3d.entry",
    "Run": "elastic3d.training",
    "Checkpointing": "elastic3d.worker.options",
    "Health": "elastic3d.health.options",
    "Islands": "elastic3d.islands",
    "Layout": "elastic3d.values",
    "Growing": "elastic3d.data",
    "Adaptive": "elastic3d.data",
    "TokenBudget": "elastic3d.data",
    "TokenFile": "elastic3d.data",
    "Packed": "elastic3d.data",
    "Stratified": "elastic3d.data",
    "Mixture": "elastic3d.data",
    "Cached": "elastic3d.data",
    "Remote": "elastic3d.data",
    "Tracker": "elastic3d.trackers",
    "Elastic3dError": "elastic3d.errors",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
