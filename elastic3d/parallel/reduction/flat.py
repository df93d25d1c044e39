"""The gradients of one FSDP unit as one vector, in the layout that FSDP itself reduces.

For each shard a chunk: the rows of dim 0 that this shard holds of each parameter, padded to the same number for every
shard, one parameter after the other. Reads FSDP's parameter groups, which torch does not call public.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any

import torch

from elastic3d.errors import ModelError
from elastic3d.parallel.tensor.copies import settle


class Flat:
    """The trainable parameters of one FSDP parameter group of module `unit`. names: by id of the sharded parameter.

    rows: the shards that FSDP cuts them into. shards: those that are summed together, for all of these. Which are
    trainable may change from step to step (`follow`).
    """

    def __init__(self, group: Any, names: dict[int, str], unit: str) -> None:
        self.group, self.unit = group, unit
        self._held = [(names[id(p.sharded_param)], p) for p in group.fsdp_params]
        self.rows: int = group.mesh_info.shard_mesh_size
        self.shards = self.rows
        self.seen: set[str] = set()
        self.notes = True
        self._take_up(self._trained)

    @property
    def _trained(self) -> list[tuple[str, Any]]:
        return [(name, parameter) for name, parameter in self._held if parameter.sharded_param.requires_grad]

    def _take_up(self, trained: list[tuple[str, Any]]) -> None:
        self.names = [name for name, _ in trained]
        self._parameters = [parameter for _, parameter in trained]
        self.chunk = sum(parameter.padded_sharded_param_size.numel() for parameter in self._parameters)

    def follow(self) -> bool:
        """Take up what the script has frozen or unfrozen since; return whether it has. To be called between steps.

        ModelError for one of another dtype than those that it would be reduced with.
        """
        trained = self._trained
        if [name for name, _ in trained] == self.names:
            return False
        dtypes = {parameter.sharded_param.dtype: name for name, parameter in trained}
        if len(dtypes) > 1:
            (one, first), (other, second) = list(dtypes.items())[:2]
            raise ModelError(
                f"parameters {first!r} ({one}) and {second!r} ({other}) are both trained from here on, and are reduced "
                "together, which needs one dtype; convert one of them before run.shard, or leave it frozen"
            )
        self._take_up(trained)
        # FSDP has looked at what is trained in its first pass, once.
        self.group._init_mp_dtypes()
        return True

    @property
    def name(self) -> str:
        """What people call the unit: the longest path that all its parameters are below, or the first of them."""
        paths = [name.split(".")[:-1] for name in self.names]
        common = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
        return ".".join(common) or (self.names[0] if self.names else "")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which gradients are summed; known from the first forward pass on."""
        first = self._parameters[0]
        dtype: torch.dtype = first.reduce_dtype or first.param_dtype or first.orig_dtype
        return dtype

    @property
    def computed(self) -> torch.dtype:
        """In which one backward pass leaves gradients: that of the parameters as they are computed with."""
        first = self._parameters[0]
        dtype: torch.dtype = first.param_dtype or first.orig_dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Where the gradients are."""
        device: torch.device = self.group.device
        return device

    @property
    def reached(self) -> bool:
        """Whether a gradient has come to what the module returned; to be asked where its backward pass ends."""
        state: str = self.group._training_state.name
        return state == "PRE_BACKWARD"

    def look(self) -> None:
        """Note in `seen` which parameters have a gradient of this rank's, reduced neither now nor before.

        Not while `notes` is off: what gets one then is not added up.
        """
        if not self.notes:
            return
        for name, parameter in zip(self.names, self._parameters, strict=True):
            if name not in self.seen and _has_gradient(parameter):
                self.seen.add(name)

    def holds_any(self) -> bool:
        """Return whether a parameter has such a gradient."""
        return any(map(_has_gradient, self._parameters))

    def settle(self) -> None:
        """Have each gradient of what tensor-parallel ranks hold whole summed over them before it is added to others.

        As where there is no FSDP, in the order in which autograd comes to the parameters, which is one on all of these
        ranks. To be called when parameters have been gathered, once. Sums in a wider dtype, for which there always is
        FSDP, are made of the parts in every layout.
        """
        for _, parameter in self._held:
            if parameter.is_dtensor and parameter.reduce_dtype in (None, parameter.param_dtype or parameter.orig_dtype):
                settle(parameter._unsharded_param)

    @property
    def is_cut(self) -> bool:
        """Whether tensor parallelism has cut the parameters before FSDP does."""
        return any(parameter.is_dtensor for _, parameter in self._held)

    def complete(self) -> None:
        """Give zeros to the parameters that have no gradient, if FSDP is about to reduce those that have one."""
        for parameter in self._parameters if self.group.reduce_grads else ():
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None and not _has_gradient(parameter):
                whole.grad = torch.zeros_like(whole)

    def take(self, wire: torch.dtype, *, rounds: bool = False) -> list[torch.Tensor]:
        """Take the gradients from the parameters and return them, one for each, to be sent in the dtype `wire`.

        A parameter without one contributes -0.0, the one number that addition leaves no trace of. rounds: `wire` need
        not hold every gradient exactly.
        """
        self.look()
        gradients = []
        for parameter in self._parameters:
            parameter.accumulate_unsharded_grad_if_needed()
            if parameter.unsharded_accumulated_grad is not None:
                gradients.append(parameter.unsharded_accumulated_grad_data)
                parameter.unsharded_accumulated_grad = None
            elif _has_gradient(parameter):
                gradients.append(parameter.unsharded_grad_data)
                parameter.unsharded_param.grad = None
            else:
                gradients.append(torch.full(parameter._orig_size, -0.0, dtype=wire, device=self.device))
        dtypes = {gradient.dtype for gradient in gradients}
        assert rounds or all(torch.promote_types(dtype, wire) == wire for dtype in dtypes), (dtypes, wire)
        return gradients if len(dtypes) == 1 else [gradient.to(wire) for gradient in gradients]

    def add_chunk(self) -> None:
        """Take the gradients of one chunk of a micro-batch's sequence that others follow."""
        raise AssertionError("no sequence is cut into chunks here")

    def drop(self) -> None:
        """Forget what was taken of chunks; here nothing was."""

    def fill(self, into: torch.Tensor, gradients: Sequence[torch.Tensor], start: int, stop: int) -> None:
        """Write the numbers [start, stop) of every shard's chunk, one shard after the other, converted to into's dtype.

        gradients: of `take`. What pads a chunk is 0.
        """
        rows = into.view(self.rows, stop - start)
        if stop - start == self.chunk:
            torch.ops.fsdp.chunk_cat(gradients, dim=0, num_chunks=self.rows, out=rows)
            return
        sizes = [parameter.padded_sharded_param_size.numel() for parameter in self._parameters]
        cut(gradients, sizes, start, into=rows)

    def put(self, chunk: torch.Tensor) -> None:
        """Make this rank's chunk the gradients of its shards: views of it, where no dtype is to be converted."""
        if self.group._orig_dtype is not None:
            chunk = chunk.to(self.group._orig_dtype)
        for parameter, rows in zip(self._parameters, self.split(chunk), strict=True):
            parameter.sharded_param.grad = parameter.to_sharded_dtensor(rows)

    def split(self, chunk: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield each parameter's rows of a chunk, without padding."""
        at = 0
        for parameter in self._parameters:
            size = parameter.padded_sharded_param_size
            yield chunk[at : at + size.numel()].view(size)[: parameter.sharded_size[0]]
            at += size.numel()


def cut(gradients: Sequence[torch.Tensor], sizes: Sequence[int], start: int, into: torch.Tensor) -> None:
    """Write a part of every shard's chunk into a row of `into`: as many numbers as it has columns, from `start` on.

    A shard has `sizes[i]` numbers of gradient i, in order; the last shards may have fewer, or none, and zeros for them.
    """
    stop, at = start + into.shape[1], 0
    for gradient, size in zip(gradients, sizes, strict=True):
        first, last = max(start, at), min(stop, at + size)
        if first < last:
            _rows(gradient.reshape(-1), size, first - at, into[:, first - start : last - start])
        at += size


def _rows(numbers: torch.Tensor, size: int, first: int, into: torch.Tensor) -> None:
    full, rest = divmod(numbers.numel(), size)
    into[:full] = numbers[: full * size].view(full, size)[:, first : first + into.shape[1]]
    if full < into.shape[0]:
        into[full:] = 0
        known = numbers[full * size :][first : min(first + into.shape[1], rest)]
        into[full, : known.numel()] = known


def intercept(group: Any, before: Callable[[], bool]) -> None:
    """Have `before` called whenever FSDP is done with a unit's backward pass; where it is true FSDP does not reduce."""
    original = group.post_backward

    def post_backward(*args: Any) -> None:
        if not before():
            original(*args)
            return
        reduces, group.reduce_grads = group.reduce_grads, False
        try:
            original(*args)
        finally:
            group.reduce_grads = reduces

    group.post_backward = post_backward


def _has_gradient(parameter: Any) -> bool:
    if parameter.unsharded_accumulated_grad is not None:
        return True
    whole = getattr(parameter, "_unsharded_param", None)
    return whole is not None and whole.grad is not None
