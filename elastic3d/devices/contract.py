"""What a trainer's environment says to a device's libraries before they are loaded: one table, and why each is so.

A library reads its variables when it is first used, so that they are set in the trainer before its device is opened. A
value that the user has set stays, but where another could break a promise: then ours holds, and the user is told.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import torch

from elastic3d import environment
from elastic3d.environment import Variable

_READ = (
    *("CUDA", "CUDNN", "CUBLAS", "NVIDIA", "PYTORCH", "TORCH_", "TRITON"),
    *("HIP", "HSA", "ROC", "MIOPEN", "AMD", "GPU"),
)
"""How the names begin of variables that CUDA, ROCm, torch and Triton read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One variable as a trainer needs it."""

    variable: Variable
    """Which."""
    value: str
    """What it has to say."""
    binding: bool
    """Whether a user's other value is replaced: the run's bits, or an end to a hang, depend on it."""


def settings(kind: str, *, interface: str, tp: int) -> tuple[Setting, ...]:
    """Return what a trainer on this kind of device needs.

    interface: of the network that joins the nodes, "" to leave that to the libraries. tp: size of that mesh axis.
    """
    wanted = [Setting(variable=environment.GLOO_INTERFACE, value=interface, binding=True)] if interface else []
    if kind != "cuda":
        return tuple(wanted)
    wanted += [
        # Products are not the same from call to call while several streams share one workspace.
        Setting(variable=environment.CUBLAS_WORKSPACE, value=":4096:8", binding=True),
        # torch's watchdog would abort the process, which looks like the peer's death to all others; or the
        # communicator, which releases the host with tensors half written.
        Setting(variable=environment.NCCL_ERROR_HANDLING, value="0", binding=True),
        Setting(variable=environment.NCCL_MONITORING, value="0", binding=True),
    ]
    if interface:
        wanted.append(Setting(variable=environment.NCCL_INTERFACE, value=interface, binding=False))
    if tp > 1:
        # Sums made in the switch differ from call to call (https://github.com/NVIDIA/nccl/issues/1497).
        wanted.append(Setting(variable=environment.NCCL_NVLS, value="0", binding=True))
    return tuple(wanted)


def apply(wanted: tuple[Setting, ...], variables: MutableMapping[str, str] = os.environ) -> list[str]:
    """Set them; return the names of those that had another value which does not hold now."""
    replaced = []
    for one in wanted:
        name, had = one.variable.name, variables.get(one.variable.name)
        if had is None or (one.binding and had != one.value):
            variables[name] = one.value
            if had is not None:
                replaced.append(name)
    return replaced


def read_by_libraries(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that a device's libraries read when they are loaded, but for those of communicators."""
    return {name: value for name, value in variables.items() if name.startswith(_READ) and "NCCL" not in name}


def deterministic() -> None:
    """Have torch compute the same bits each time.

    What it would fill freshly allocated memory with is nobody's input: filling costs a pass over each allocation.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
