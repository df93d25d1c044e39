"""What every training uses of a device, used once, so that the first step of a trainer finds it loaded.

A device's libraries and kernels are loaded where they are first called, which takes a second in all: as long as all the
rest of a restart. None of it depends on the model or the layout. A small transformer's step calls most of it.

Nothing of it shows afterwards: random numbers, torch's flags and statistics of memory are as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from elastic3d.devices import ComputeDevice, DeviceLoad
from elastic3d.devices.contract import deterministic
from elastic3d.parallel.norms import row_squares, scale

BATCH, LENGTH, WIDTH, HEADS, WORDS = 2, 64, 128, 2, 256
NUMBERS = (torch.bfloat16, torch.float32)


def warm(device: ComputeDevice) -> None:
    """Use an open device as a training does, and give its memory back; torch.OutOfMemoryError where there is none."""
    # torch's generator on the host is seeded by `keyed`, too, and so is given back.
    with device.keyed(0), _as_in_a_run(), torch.enable_grad():
        for dtype in NUMBERS:
            _step(device, dtype)
        device.begin_reading([torch.zeros(1, device=device.torch_device)]).wait()
    device.release()


@contextlib.contextmanager
def _as_in_a_run() -> Iterator[None]:
    """Compute as a run does for a while: other flags choose other kernels."""
    flagged = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    deterministic()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(flagged, warn_only=only_warned)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def _step(device: ComputeDevice, dtype: torch.dtype) -> None:
    weights = _weights(device.torch_device, dtype)
    loss = _loss(weights, torch.zeros(BATCH, LENGTH, dtype=torch.int64, device=device.torch_device))
    loss.backward()  # type: ignore[no-untyped-call]
    parameters = list(weights.values())
    gradients = [weight.grad for weight in parameters if weight.grad is not None]
    assert len(gradients) == len(parameters)
    with torch.no_grad():
        _reduce(device, gradients)
        squares = row_squares(gradients, device)
        finite = torch.stack([torch.isfinite(gradient).all() for gradient in gradients])
        device.begin_reading([squares, finite, loss]).wait()
        scale(gradients, 0.5)
    torch.optim.AdamW(parameters, lr=0.0, foreach=True).step()
    torch.optim.AdamW(parameters, lr=0.0, fused=True).step()


def _weights(where: torch.device, dtype: torch.dtype) -> Mapping[str, Tensor]:
    shapes = {
        "words": (WORDS, WIDTH),
        "places": (LENGTH, WIDTH),
        "norm": (WIDTH,),
        "shift": (WIDTH,),
        "qkv": (3 * WIDTH, WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (4 * WIDTH, WIDTH),
        "bias": (4 * WIDTH,),
        "down": (WIDTH, 4 * WIDTH),
    }
    return {
        name: torch.full(shape, 0.01, dtype=dtype, device=where).normal_(std=0.02).requires_grad_()
        for name, shape in shapes.items()
    }


def _loss(weights: Mapping[str, Tensor], text: Tensor) -> Tensor:
    places = torch.arange(LENGTH, device=text.device)
    x = functional.embedding(text, weights["words"]) + functional.embedding(places, weights["places"])
    shape = (BATCH, LENGTH, HEADS, WIDTH // HEADS)
    normed = functional.layer_norm(x, (WIDTH,), weights["norm"], weights["shift"])
    q, k, v = (part.view(shape).transpose(1, 2) for part in functional.linear(normed, weights["qkv"]).chunk(3, dim=-1))
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
    x = x + functional.dropout(functional.linear(mixed, weights["out"]), 0.1)
    inner = functional.linear(functional.rms_norm(x, (WIDTH,), weights["norm"]), weights["up"], weights["bias"])
    inner = functional.gelu(inner) + functional.silu(inner)
    x = x + functional.dropout(functional.linear(inner, weights["down"]), 0.1)
    logits = functional.linear(x, weights["words"]).flatten(0, 1)
    lost = functional.cross_entropy(logits, text.flatten())
    return lost + functional.cross_entropy(logits.float(), text.flatten()).to(lost.dtype)


def _reduce(device: ComputeDevice, gradients: list[Tensor]) -> None:
    """Pack gradients as FSDP does, add pieces of them to a sum in their order, and copy from the host."""
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    packed = torch.empty(1, flat.numel(), dtype=flat.dtype, device=flat.device)
    torch._chunk_cat(gradients, dim=0, num_chunks=1, out=packed)
    torch.split_with_sizes_copy(packed, [one.numel() for one in gradients], dim=1, out=_rows(gradients))
    # Gradients of one dtype are added up in another, and weights copied from one to the other.
    for dtype in NUMBERS:
        sums = [torch.empty_like(one, dtype=dtype) for one in gradients]
        torch._foreach_copy_(sums, gradients)
        torch._foreach_add_(sums, gradients)
    total = torch.empty(WIDTH, dtype=torch.float32, device=flat.device)
    pieces = flat[: 4 * WIDTH].view(4, WIDTH)
    for begins in (True, False):
        # A kernel is made for one row, and another for more.
        device.add_rows(total, pieces, begins)
        device.add_rows(total, pieces[: 1 + begins], begins)
    device.load([DeviceLoad(source=torch.zeros(WIDTH, dtype=torch.float32, device="cpu"), target=total)])


def _rows(gradients: list[Tensor]) -> list[Tensor]:
    return [torch.empty(1, one.numel(), dtype=one.dtype, device=one.device) for one in gradients]
