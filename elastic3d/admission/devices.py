"""Check that the devices are there, and that they multiply correctly.

For a trainer that is about to end: it computes, and may leave a context on every device. A keeper must do neither.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import blake3
import torch

from elastic3d.admission.check import Check, CheckResult, Unfit, run_checks
from elastic3d.devices import device_at

ROWS, INNER = 2048, 256
PRODUCT = "761faad5e0b0623297ef71955a5de2bede5d2ff0c834f757e65f9a125aaa1fd9"
"""BLAKE3 of the product of `_factors`, float32 little-endian.

Every partial sum is a whole number below 2**24, and every factor fits 8 bits of mantissa: any order of summing gives
these bytes on a healthy device, TF32 and bfloat16 passes included.
"""

LIMIT = 20.0
"""Seconds for one device: to create a context on a GPU of a busy machine takes a few."""

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def check_devices(kind: str, places: int) -> tuple[CheckResult, ...]:
    """Check that a node has a device of this kind ("cpu", "cuda") for each place, and that each computes correctly."""
    (there,) = run_checks([Check(name="devices", run=lambda: present(kind, places), limit=LIMIT)])
    if not there.ok:
        return (there,)
    first = device_at(kind, 0)
    devices = [str(device_at(kind, index).torch_device) for index in range(places if first.exclusive else 1)]
    works = [Check(name=f"product {one}", run=partial(product, one), limit=LIMIT) for one in dict.fromkeys(devices)]
    return (there, *run_checks(works))


def present(kind: str, places: int) -> str:
    """Count the devices, which must be alike. Too few CPU cores are only a remark: they are shared, slowly."""
    device = device_at(kind, 0)
    number = device.installed()
    if not device.exclusive:
        return "" if number >= places else f"{number} core(s) for {places} slot(s): trainers will wait for each other"
    if number < places:
        raise Unfit(
            f"{number} {kind} device(s) for {places} slot(s): lower --nproc-per-node, or look at the driver "
            "(nvidia-smi) and at CUDA_VISIBLE_DEVICES"
        )
    unlike = {device_at(kind, index).described() for index in range(places)}
    if len(unlike) > 1:
        raise Unfit(
            f"the devices of this node differ ({'; '.join(sorted(unlike))}): the smallest and slowest would bound all, "
            "and bits would differ. Give the node devices of one model, or slices of one size, by CUDA_VISIBLE_DEVICES"
        )
    return ""


def product(device: str, multiply: Multiply | None = None) -> str:
    """Multiply two matrices of whole numbers on a device and compare the digest; Unfit if it differs."""
    one, other = _factors()
    result = (multiply or _multiply)(one.to(device), other.to(device)).cpu().contiguous()
    digest = blake3.blake3(result.numpy().tobytes()).hexdigest()
    if digest != PRODUCT:
        raise Unfit(
            f"{device} multiplies wrongly: the digest of a known product is {digest[:12]}, not {PRODUCT[:12]}; "
            "take this device out of service"
        )
    return ""


def _factors() -> tuple[torch.Tensor, torch.Tensor]:
    """Return ROWS x INNER and INNER x ROWS, whole numbers from -15 to 15."""
    row = torch.arange(ROWS, dtype=torch.int64, device="cpu")[:, None]
    column = torch.arange(INNER, dtype=torch.int64, device="cpu")[None, :]
    one = (row * 7 + column * 3 + row * column) % 31 - 15
    other = (row * 5 + column * 11 + row * column) % 29 - 14
    return one.to(torch.float32), other.to(torch.float32).T.contiguous()


def _multiply(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Exact in any order. cuBLAS has the workspace that determinism asks for (`devices/contract.py`)."""
    return one @ other
