"""Where a run begins with weights that exist: the same on all ranks, once, and known to every state that follows."""

from __future__ import annotations

import json
from collections.abc import Collection

from elastic3d.errors import ConfigurationError, Elastic3dError, StateError, StateUnfit
from elastic3d.parallel.mesh import Mesh
from elastic3d.pretrained.weights import KeptWeights, Weights
from elastic3d.values import from_json, to_json

_ACCEPT = 'run.restore(..., accept="weights")'


def agree(weights: Weights, mesh: Mesh) -> KeptWeights:
    """Return what is known of the weights, on all ranks as on rank 0; a collective.

    ConfigurationError on all ranks where those of some have other weights than rank 0.
    """
    kept = weights.kept()
    weights.match()
    everyone = [from_json(KeptWeights, json.loads(data)) for data in mesh.gather(json.dumps(to_json(kept)).encode())]
    others = [rank for rank, one in enumerate(everyone) if one.fingerprint != everyone[0].fingerprint]
    if others:
        there = everyone[others[0]]
        raise ConfigurationError(
            f"weights={there.named!r} of rank {', '.join(map(str, others))} are others than on the node of rank 0 "
            f"({there.fingerprint} there, {everyone[0].fingerprint} at rank 0): copy one of them to every node"
        )
    return everyone[0]


def check_imported(weights: Weights | None) -> None:
    """Refuse weights for a run whose store has begun with imported ones: one of the two would be ignored."""
    if weights is not None:
        raise StateError(
            f"the store holds weights that were imported, with which the run would begin, and run.shard names others "
            f"(weights={weights.named!r}). Trying again does not help: leave weights= out, or give the run an empty "
            "store"
        )


def change(saved: KeptWeights | None, weights: Weights | None) -> str:
    """Return in words how a script names other weights than its run began with, "" where it does not.

    They are opened only where they are named otherwise; nothing of a tensor but its sample is read.
    """
    if weights is None or (saved is not None and saved.named == weights.named):
        return ""
    began = "with what its seed gave" if saved is None else f"with {saved.named} ({saved.fingerprint})"
    try:
        now = weights.kept()
    except Elastic3dError as error:
        return f"the run began {began}, and it is not known whether {weights.named} is the same: {error}"
    if saved is not None and saved.fingerprint == now.fingerprint:
        return ""
    return f"the run began {began}, and weights={now.named!r} are others ({now.fingerprint})"


def check_resumed(saved: KeptWeights | None, weights: Weights | None, step: int, accept: Collection[str]) -> str:
    """Return the change of weights that is accepted, "" for none; StateUnfit for one that is not."""
    changed = change(saved, weights)
    if changed and "weights" not in accept:
        raise StateUnfit(
            f"the state of step {step} does not come from the weights that run.shard names: {changed}. They would not "
            "be read, since a run goes on from its own state. Trying again does not help: name the old ones, leave "
            f"weights= out, or start a new run with an empty store; to go on all the same: {_ACCEPT}"
        )
    return f"{changed}; they are not read" if changed else ""
