"""Initial weights that do not depend on the layout.

A model whose parameters fit the host is built whole, as a plain script with the same seed builds it, and cut after. A
larger one is built with its parameters on meta and its buffers real, and filled module by module, each under a key of
(seed, name), by the module's own `reset_parameters`: other numbers than the plain script's, but the same for any
layout. Which of the two happens depends on the model and a constant alone, so that every host decides alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from elastic3d.errors import ModelError
from elastic3d.parallel.randomness import keyed_seed

Build = Callable[[], nn.Module]
WHOLE_BELOW = 8 << 30


def whole(build: Build, seed: int) -> nn.Module:
    """Return the model as a plain script builds it after `torch.manual_seed(seed)`."""
    torch.manual_seed(seed)
    return _built(build)


def outline(build: Build) -> nn.Module:
    """Return the whole model on meta, or real where it cannot be built there; no random number is drawn."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return _built(build)
        except (RuntimeError, NotImplementedError):
            # Some models compute with values while they are built; those are built for real to be looked at.
            return _built(build)


def skeleton(build: Build) -> nn.Module:
    """Return the whole model with its parameters on meta and its buffers real."""
    with torch.random.fork_rng(devices=[]), _parameters_on_meta():
        return _built(build)


def nbytes(model: nn.Module) -> int:
    """Return the size of the model's parameters in bytes."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def fill(module: nn.Module, prefix: str, seed: int, device: torch.device) -> None:
    """Give the parameters on meta below `module` storage, and values keyed by (seed, global name of their module)."""
    for name, inner in module.named_modules():
        own = dict(inner.named_parameters(recurse=False))
        if not any(parameter.is_meta for parameter in own.values()):
            continue
        place = f"{prefix}.{name}".strip(".")
        reset = getattr(inner, "reset_parameters", None) or getattr(inner, "_reset_parameters", None)
        if not callable(reset):
            raise ModelError(
                f"module {place!r} ({type(inner).__name__}) has parameters but no reset_parameters(), by which a model "
                "too large to be built whole is initialised; define it, or raise whole_below= in run.shard"
            )
        for key, parameter in own.items():
            empty = torch.empty_like(parameter, device=device)
            setattr(inner, key, nn.Parameter(empty, requires_grad=parameter.requires_grad))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(keyed_seed(seed, place))
            reset()


def _built(build: Build) -> nn.Module:
    model = build()
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"run.shard needs a function that builds the model, such as lambda: GPT(config); it returned "
            f"{type(model).__name__}"
        )
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
