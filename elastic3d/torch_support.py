"""The supported versions of torch, and every private name of torch that is imported here.

torch promises nothing about private names, so the upper bound is the newest version that was tested. It is checked when
elastic3d is imported, against the installed package's metadata, since torch itself takes seconds to import. The names
are checked before the first of them is used.
"""

from __future__ import annotations

import importlib
import importlib.metadata

from elastic3d.errors import Elastic3dError

OLDEST = (2, 10)
BEYOND = (2, 16)
"""The first version that was not tested; pyproject.toml has the same bounds. Pipelines of 2.9 lack `return_outputs`."""

PRIVATE = {
    "torch._C._distributed_c10d": (
        "FileStore", "HashStore", "PrefixStore", "Store", "TCPStore", "set_debug_level_from_env",
    ),
    "torch.distributed.elastic.rendezvous.utils": ("_parse_rendezvous_config",),
    "torch.distributed.pipelining._backward": ("stage_backward", "stage_backward_input", "stage_backward_weight"),
    "torch.distributed.pipelining.schedules": ("_batch_p2p", "_wait_batch_p2p"),
    "torch.distributed.tensor.placement_types": ("_StridedShard",),
    "torch.utils.data._utils": ("worker",),
    "torch.utils._python_dispatch": ("TorchDispatchMode", "_get_current_dispatch_mode"),
    "torch.utils._pytree": ("TreeSpec", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"),
}  # fmt: skip
"""The private names that the runtime imports, by module; a test checks that none is missing."""

PRIVATE_TO_INTERCHANGE = {
    "torch._subclasses.fake_tensor": ("FakeTensorMode",),
    "torch.distributed.checkpoint.default_planner": ("_EmptyStateDictLoadPlanner",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.state_dict": ("_get_fqns",),
    "torch.distributed.checkpoint.state_dict_loader": ("_load_state_dict",),
}
"""The names that `checkpointing.interchange` and `integrations` import besides, for other tools' checkpoints."""


class UnsupportedTorch(Elastic3dError, ImportError):
    """The installed torch is older or newer than elastic3d supports; the message says what to install."""


def check_version(version: str | None = None) -> None:
    """Raise UnsupportedTorch for a torch outside the bounds; version: of the installed package by default."""
    if version is None:
        try:
            version = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            return  # an import of torch will fail; commands that only read etcd or a store do without
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        return  # a custom build with a custom version: the private names decide
    if not OLDEST <= (major, minor) < BEYOND:
        raise UnsupportedTorch(f"elastic3d was tested with {_bounds()}, and torch {version} is installed: {_advice()}")


def check_names() -> None:
    """Raise UnsupportedTorch naming every private name of the runtime that this torch lacks; imports the modules."""
    missing = []
    for module, wanted in PRIVATE.items():
        try:
            imported = importlib.import_module(module)
        except ImportError:
            missing.append(module)
        else:
            missing.extend(f"{module}.{name}" for name in wanted if not hasattr(imported, name))
    if missing:
        import torch

        raise UnsupportedTorch(
            f"elastic3d was tested with {_bounds()}, and torch {torch.__version__} does not have what it needs: "
            f"{', '.join(missing)}. {_advice()[0].upper()}{_advice()[1:]}"
        )


def _bounds() -> str:
    return f"torch {OLDEST[0]}.{OLDEST[1]} to {BEYOND[0]}.{BEYOND[1] - 1}"


def _advice() -> str:
    low, high = (f"{major}.{minor}" for major, minor in (OLDEST, BEYOND))
    return f'trying again does not help; pip install "torch>={low},<{high}", or an elastic3d for this torch'
