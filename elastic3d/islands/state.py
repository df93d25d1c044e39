"""The state of an island, kept with the run's: outer parameters, their momentum, and how many outer steps were made.

Where deltas are exchanged in the background, the one that was sent last is kept, too: a run that goes on from between
its sending and its outer step has to send the same one, and the parameters that it was made of are gone by then.

Each rank has the part of them that it has of the parameters. They are an object of `run.restore(extra=)`, so that
snapshots and checkpoints have them, and they are cut anew with the parameters.
"""

from __future__ import annotations

from collections.abc import Collection
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
    """See the module. momentum: whether there is one. sends: whether deltas are kept. token: tells its job from others
    of one name. island: "" before it was admitted.
    """

    def __init__(self, model: nn.Module, *, momentum: bool, sends: bool, device: torch.device) -> None:
        self.anchors = {name: _nothing(one, device) for name, one in trained(model).items()}
        self.momenta = {name: _nothing(one, device) for name, one in trained(model).items()} if momentum else {}
        self.sent = {name: _nothing(one, device) for name, one in trained(model).items()} if sends else {}
        self.island, self.outer, self.token = "", 0, ""

    def state_dict(self) -> dict[str, Any]:
        """Return it, the tensors themselves."""
        kept: dict[str, Any] = {"at": {"island": self.island, "outer": self.outer, "token": self.token}}
        if self.anchors:
            kept["anchor"] = dict(self.anchors)
        if self.momenta:
            kept["momentum"] = dict(self.momenta)
        if self.sent:
            kept["sent"] = dict(self.sent)
        return kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it, value by value."""
        at = state["at"]
        self.island, self.outer, self.token = str(at["island"]), int(at["outer"]), str(at["token"])
        for kind, mine in (("anchor", self.anchors), ("momentum", self.momenta), ("sent", self.sent)):
            for name, tensor in mine.items():
                local(tensor).copy_(local(state[kind][name]))

    def begin(self, model: nn.Module) -> None:
        """Begin with the model's own parameters, and no momentum."""
        parameters = dict(model.named_parameters())
        for name, anchor in self.anchors.items():
            local(anchor).copy_(local(parameters[name]))
        for momentum in self.momenta.values():
            local(momentum).zero_()

    def give(self, model: nn.Module, names: Collection[str] | None = None, *, own_share: float = 0.0) -> None:
        """Set the model's parameters to the outer ones: all, or those of these names.

        own_share: of the model's own parameters, which is kept. Each operation rounds once, as in `outer`.
        """
        parameters = dict(model.named_parameters())
        for name in self.anchors if names is None else names:
            mine, anchor = local(parameters[name]), local(self.anchors[name])
            if own_share:
                mine.mul_(own_share).add_(anchor * (1.0 - own_share))
            else:
                mine.copy_(anchor)


def _nothing(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return zeros, cut like a parameter."""
    part = local(parameter)
    return sharded_like(parameter, torch.zeros(part.shape, dtype=part.dtype, device=device))
