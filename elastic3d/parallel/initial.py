"""Initial weights that do not depend on the layout.

A model whose parameters fit the host is built whole, as a plain script with the same seed builds it, and then cut. A
larger one is built with its parameters on meta and its buffers real. It is then filled module by module, each under a
key of (seed, name), by the module's own `reset_parameters` and then, in models of transformers, by their
`_init_weights`: the numbers differ from the plain script's, but are the same for any layout. Which of the two happens
depends only on the model and a constant, so that every host decides alike. If `build` gives the large model values of
its own, such as pretrained ones, they would be lost: that is refused.

Where a state is to be loaded, neither happens: parameters get room and no values, and everything else is as it would be
(`blank`).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elastic3d import global_random
from elastic3d.devices import ComputeDevice
from elastic3d.errors import ModelError
from elastic3d.parallel.numerics.ties import ties
from elastic3d.parallel.randomness import keyed_seed

Build = Callable[[], nn.Module]
WHOLE_BELOW = 8 << 30
MANAGED = {"_is_fsdp_managed_module": True, "_fsdp_use_orig_params": True}
"""What `fully_shard` sets on modules. Some ask for it, as transformers' that leave layers out by chance but not under
FSDP: so that they compute the same in every layout, it is set in those without FSDP, too."""

INITIALISERS = ("reset_parameters", "_reset_parameters", "_init_weights")
"""Methods that give parameters their initial values, in torch's modules and in models of transformers."""


def whole(build: Build, seed: int) -> nn.Module:
    """Return the model as a plain script builds it after `torch.manual_seed(seed)`, and Python's and numpy's."""
    torch.manual_seed(seed)
    return _built(build, seed)


def outline(build: Build) -> nn.Module:
    """Return the whole model on meta, or real if it cannot be built there; no random number is drawn."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return _built(build, 0)
        except (RuntimeError, NotImplementedError):
            # Some models compute with values while they are built; those are built for real.
            return _built(build, 0)


def skeleton(build: Build, seed: int = 0) -> nn.Module:
    """Return the whole model with its parameters on meta and its buffers real, drawn under `seed`.

    ModelError if `build` gives parameters values that their modules would not give them again, such as loaded weights.
    """
    model, given = _hollow(build, seed)
    if given.names:
        size = nbytes(model)
        raise ModelError(
            f"the function given to run.shard loads weights into the model, or computes them ({given.names[0]}, "
            f"{len(given.names)} in all), and at {size / 2**30:.1f} GiB the model is too large to be built whole in "
            "each process: every module would be initialised anew by its own reset_parameters(), and the loaded "
            "weights lost. Trying again does not help. Where the memory of a host holds the whole model once for each "
            f"of its processes, say run.shard(..., whole_below={_beyond(size)} << 30); else build it from its "
            "configuration alone, and import the weights into the run's store (elastic3d ckpt import), from which the "
            "run then begins"
        )
    return model


def blank(build: Build, seed: int, outline: nn.Module) -> nn.Module | None:
    """Return the model with its parameters on meta and all else as `whole` builds it; None where that is not certain.

    It is certain where nothing of it could depend on a parameter's value: `build` draws no random numbers but for
    parameters on meta, and neither a buffer nor a tensor that a module keeps besides is on meta. outline: as it comes
    from `outline`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as torch's that weights loaded by `build` go nowhere
            model, given = _hollow(build, seed)
    except Exception:  # noqa: BLE001  # what cannot be built without values is built whole, which says what is wrong
        return None
    parameters = dict(model.named_parameters())
    expected = {name: _kind(parameter) for name, parameter in outline.named_parameters()}
    sound = (
        not given.drew
        and not given.hooked
        and {name: _kind(parameter) for name, parameter in parameters.items()} == expected
        and ties(model) == ties(outline)
        and all(parameter.is_meta and not _hooked(parameter) for parameter in parameters.values())
        and not any(tensor.is_meta for module in model.modules() for tensor in _kept(module))
    )
    return model if sound else None


def nbytes(model: nn.Module) -> int:
    """Return the size of the model's parameters in bytes."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def allocate(module: nn.Module, device: ComputeDevice) -> None:
    """Give the parameters on meta below `module` storage that holds no values yet."""
    for inner in module.modules():
        for key, parameter in list(inner.named_parameters(recurse=False)):
            if parameter.is_meta:
                setattr(inner, key, like(parameter, torch.empty_like(parameter, device=device.torch_device)))


def fill(module: nn.Module, prefix: str, seed: int, device: ComputeDevice, *, root: nn.Module | None = None) -> None:
    """Give the parameters on meta below `module` storage, and values keyed by (seed, global name of their module).

    root: the whole model; `module` itself if it is left out. ModelError, naming the module, for parameters that nothing
    initialises.
    """
    for name, inner in module.named_modules():
        if any(parameter.is_meta for parameter in inner.parameters(recurse=False)):
            fill_own(inner, f"{prefix}.{name}".strip("."), seed, device, root=module if root is None else root)


def fill_own(inner: nn.Module, place: str, seed: int, device: ComputeDevice, *, root: nn.Module) -> None:
    """Do as `fill` for one module's own parameters. place: its global name."""
    if _adapts(root, place):
        raise ModelError(
            f"module {place!r} is an adapter of peft in a model too large to be built whole, which would get the "
            "values of a plain layer. Trying again does not help: begin with weights that exist, as in "
            "run.shard(..., weights=...), or raise whole_below= in run.shard"
        )
    ways = _ways(inner, root, place)
    if not ways:
        raise ModelError(
            f"module {place!r} ({type(inner).__name__}) has parameters but no reset_parameters(), by which a model "
            "too large to be built whole is initialised; define it, or raise whole_below= in run.shard"
        )
    before = dict(inner.named_parameters(recurse=False))
    for name, parameter in before.items():
        unknown = torch.nan if parameter.is_floating_point() else 0
        data = torch.full_like(parameter, unknown, device=device.torch_device)
        setattr(inner, name, nn.Parameter(data, requires_grad=parameter.requires_grad))
    key = keyed_seed(seed, place)
    with device.keyed(key), global_random.keyed(key), torch.no_grad():
        for way in ways:
            way()
    for name, parameter in inner.named_parameters(recurse=False):
        if parameter.is_floating_point() and bool(parameter.isnan().any()):
            raise ModelError(
                f"parameter {f'{place}.{name}'!r} is initialised neither by reset_parameters() of its module "
                f"({type(inner).__name__}) nor by _init_weights() of the model; let one of them do it, or raise "
                "whole_below= in run.shard"
            )
        # Not before: transformers marks parameters that its initialisers are to leave alone.
        vars(parameter).update(vars(before[name]))


def like(parameter: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """Return a parameter of other data, with what the model's code has set on this one."""
    made = nn.Parameter(data, requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    return made


def _kind(parameter: nn.Parameter) -> tuple[Any, ...]:
    return tuple(parameter.shape), parameter.dtype, parameter.requires_grad


def _hooked(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _kept(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield a module's buffers, and the tensors among its plain attributes."""
    plain = {key: value for key, value in vars(module).items() if key not in ("_parameters", "_modules")}
    yield from (leaf for leaf in tree_leaves(plain) if isinstance(leaf, torch.Tensor))


def _adapts(root: nn.Module, place: str) -> bool:
    """Return whether a module is within one of those by which peft adapts a layer."""
    names = place.split(".")
    inside = [".".join(names[:depth]) for depth in range(1, len(names))]
    return any(
        names[len(outer.split("."))] in getattr(root.get_submodule(outer), "adapter_layer_names", ())
        for outer in inside
    )


def _ways(module: nn.Module, root: nn.Module, place: str) -> list[Callable[[], Any]]:
    """Return a module's initialisers, in order: its own, and that of the innermost transformers model around it."""
    ways = []
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        ways.append(reset)
    names = place.split(".") if place else []
    for depth in range(len(names), -1, -1):
        around = getattr(root.get_submodule(".".join(names[:depth])), "_init_weights", None)
        if callable(around):
            ways.append(partial(around, module))
            break
    return ways


def _built(build: Build, seed: int) -> nn.Module:
    with global_random.keyed(seed):
        model = build()
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"run.shard needs a function that builds the model, such as lambda: GPT(config); it returned "
            f"{type(model).__name__}"
        )
    for module in model.modules():
        vars(module).update(MANAGED)
    return model


def _beyond(size: int) -> int:
    """Return the whole GiB above `size` bytes."""
    return size // 2**30 + 1


def _hollow(build: Build, seed: int) -> tuple[nn.Module, _Given]:
    given = _Given()
    with torch.random.fork_rng(devices=[]), _parameters_on_meta(given), given:
        torch.manual_seed(seed)
        return _built(build, seed), given


class _Given(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the parameters on meta that get values other than from the initialisers of their module.

    drew: whether random numbers were drawn for anything but such parameters. hooked: whether a parameter had hooks.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.drew = self.hooked = False

    def note(self, name: str) -> None:
        """Take note of a parameter, unless an initialiser is at work: it will give the same values again."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name in INITIALISERS:
                return
            frame = frame.f_back  # type: ignore[assignment]
        self.names.append(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].is_meta and not args[1].is_meta:
            self.note(f"a parameter of shape {tuple(args[0].shape)}")
        made = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drew |= any(not leaf.is_meta for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor))
        return made


@contextmanager
def _parameters_on_meta(given: _Given) -> Iterator[None]:
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            if self._parameters.get(name) is not None:
                given.note(f"{name!r} of {type(self).__name__}")
            given.hooked |= _hooked(param)
            param = like(param, param.to("meta"))
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
