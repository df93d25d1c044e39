"""The state of an island, kept with the run's: outer parameters, their momentum, and how many outer steps were made.

Each rank has the part of them that it has of the parameters. They are an object of `run.restore(extra=)`, so that
snapshots and checkpoints have them, and they are cut anew with the parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elastic3d.parallel.state import local, sharded_like

NAME = "islands"
"""Of the object among those of `run.restore(extra=)`."""


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that islands merge: those that are trained."""
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


class IslandState:
    """See the module. momentum: whether there is one. island: "" before it was admitted. token: tells its job from
    others of one name.
    """

    def __init__(self, model: nn.Module, *, momentum: bool, device: torch.device) -> None:
        self.anchors = {name: _nothing(one, device) for name, one in trained(model).items()}
        self.momenta = {name: _nothing(one, device) for name, one in trained(model).items()} if momentum else {}
        self.island, self.outer, self.token = "", 0, ""

    def state_dict(self) -> dict[str, Any]:
        """Return it, the tensors themselves."""
        kept: dict[str, Any] = {"at": {"island": self.island, "outer": self.outer, "token": self.token}}
        if self.anchors:
            kept["anchor"] = dict(self.anchors)
        if self.momenta:
            kept["momentum"] = dict(self.momenta)
        return kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it, value by value."""
        at = state["at"]
        self.island, self.outer, self.token = str(at["island"]), int(at["outer"]), str(at["token"])
        for mine, saved in ((self.anchors, state.get("anchor", {})), (self.momenta, state.get("momentum", {}))):
            for name, tensor in mine.items():
                local(tensor).copy_(local(saved[name]))

    def begin(self, model: nn.Module) -> None:
        """Begin with the model's own parameters, and no momentum."""
        parameters = dict(model.named_parameters())
        for name, anchor in self.anchors.items():
            local(anchor).copy_(local(parameters[name]))
        for momentum in self.momenta.values():
            local(momentum).zero_()

    def give(self, model: nn.Module, names: set[str] | None = None) -> None:
        """Set the model's parameters to the outer ones: all, or those of these names."""
        parameters = dict(model.named_parameters())
        for name, anchor in self.anchors.items():
            if names is None or name in names:
                local(parameters[name]).copy_(local(anchor))


def _nothing(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return zeros, cut like a parameter."""
    part = local(parameter)
    return sharded_like(parameter, torch.zeros(part.shape, dtype=part.dtype, device=device))
