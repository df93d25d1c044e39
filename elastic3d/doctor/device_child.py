"""What torch says of this machine's devices, printed as JSON lines by a process of its own.

It makes contexts on the devices, may hang in the driver or crash in a library: `devices` runs it and reads what it said
until then. The first line comes before any device is touched.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main(slots: int) -> None:
    """Print a line about torch, one about the devices it sees, and one about what they compute.

    slots: of this node, 0 for one on each device, or one on a CPU.
    """
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:
        _say(missing=f"{type(error).__name__}: {error}")
        return
    from elastic3d.torch_support import UnsupportedTorch, check_names

    unsupported = ""
    try:
        check_names()
    except UnsupportedTorch as error:
        unsupported = str(error)
    _say(
        torch=str(torch.__version__),
        cuda=torch.version.cuda or "",
        hip=torch.version.hip or "",
        gloo=dist.is_available() and dist.is_gloo_available(),
        nccl=_nccl() if dist.is_available() and dist.is_nccl_available() else "",
        unsupported=unsupported,
    )
    refused = ""
    if torch.version.cuda or torch.version.hip:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as problem:
            refused = str(problem)
    devices = (
        []
        if refused or not torch.cuda.is_available()
        else [_device(index) for index in range(torch.cuda.device_count())]
    )
    other = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    _say(devices=devices, error=refused, other="" if other is None or other.type == "cuda" else other.type)
    from elastic3d.admission.devices import check_devices

    kind, places = ("cuda", len(devices)) if devices else ("cpu", slots or 1)
    _say(broken=[check.detail for check in check_devices(kind, places) if not check.ok])


def _nccl() -> str:
    import torch

    try:
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):
        return "unknown"


def _device(index: int) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return {"name": properties.name, "memory": properties.total_memory}


def _say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
