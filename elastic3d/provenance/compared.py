"""What the nodes of a job compare of the code that their models are made of, besides shapes and the script's own file.

Nodes get their checkouts, packages and configurations each for itself, and one that lags behind trains something else
of the same shapes: nothing would show it but bits, which audits would take for a device's.
"""

from __future__ import annotations

import json
import re
from importlib import metadata

from blake3 import blake3
from torch import nn

from elastic3d.provenance import code
from elastic3d.provenance.model import record_of

_ADDRESS = re.compile("0x[0-9a-f]+")
_OWN = ("elastic3d", "torch")  # compared by themselves, or no part of what is computed


def digest_of(model: nn.Module) -> str:
    """Return a digest of the files that were imported from the script's folder, and of what a model says of itself.

    That is how it is printed, its configuration if it has one, and the versions of the packages its modules are from.
    """
    record = record_of(model)
    words = [
        *(f"{name} {digest}" for name, digest in code.imported_files().items()),
        _ADDRESS.sub("0x", repr(model)),
        "" if record is None else json.dumps([record.architecture, record.config], sort_keys=True),
        *_versions(model),
    ]
    return blake3("\0".join(words).encode("utf-8", "replace")).hexdigest()[:32]


def _versions(model: nn.Module) -> list[str]:
    packages = sorted({type(module).__module__.partition(".")[0] for module in model.modules()}.difference(_OWN))
    said = []
    for package in packages:
        try:
            said.append(f"{package} {metadata.version(package)}")
        except (metadata.PackageNotFoundError, ValueError):
            continue  # the script's own
    return said
