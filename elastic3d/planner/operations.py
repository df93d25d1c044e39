"""How many operations a model takes, and how many a node's devices could make: what its utilisation is computed from.

Model FLOPs utilisation (Chowdhery et al. 2022, "PaLM", arXiv 2204.02311, appendix B) is the operations of a forward and
a backward pass, without what is computed again, over those that the devices could make in the same time at their peak.
Operations are those that torch counts (`parallel.costs`): products, convolutions, attention; a kernel that it does not
know is not among them. All samples are taken to have the shape of the one that was looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic3d.planner.devices import peak_of
from elastic3d.values import DeviceFacts, ModelProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOperations:
    """sample: FLOPs of a forward and a backward pass over one sample. peak: FLOP/s of a node's devices.

    Each is None where it is not known, which `why` says.
    """

    sample: float | None
    peak: float | None
    why: str = ""


def operations(profile: ModelProfile, device: DeviceFacts | None, slots: int) -> ModelOperations:
    """Return what is known of a model on a node with that many devices of one kind."""
    forward = profile.first.flops + profile.blocks * profile.block.flops + profile.last.flops
    # Twice the forward is the backward: see `ModelPart`. Without a block's operations none were counted.
    known = profile.block.flops > 0 and not profile.experts
    sample = 3.0 * forward / profile.micro_batch if known else None
    peak = peak_of(device, profile.compute_bytes) if device is not None else None
    reasons = []
    if profile.experts:
        reasons.append("what a sample takes depends on the experts that its tokens go to")
    elif sample is None:
        reasons.append("the model does not run on meta, where operations are counted")
    if peak is None:
        name = device.name if device is not None else "the device"
        reasons.append(f"no data sheet of {name} says how fast it could be")
    return ModelOperations(sample=sample, peak=None if peak is None else slots * peak, why="; ".join(reasons))
