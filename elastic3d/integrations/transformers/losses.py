"""The loss as transformers computes it, for `run.backward`: a sum over the tokens of a micro-batch, and their number.

transformers divides a micro-batch's sum by the number of tokens of the whole step, `num_items_in_batch`. Here the sum
is divided once, after the vote of the step, so that every token weighs the same in every layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from elastic3d.errors import ModelError, UsageError
from elastic3d.integrations.transformers.columns import base_of

IGNORED = -100
"""The label of a token that does not count, in transformers and in torch's cross entropy."""

LossFunc = Callable[..., torch.Tensor]
"""compute_loss_func(outputs, labels, num_items_in_batch=...), as transformers' Trainer takes it."""


class TokenLoss:
    """The loss of a micro-batch as (sum, count), and that of each of its samples.

    func: the script's compute_loss_func, None for the model's own. It must divide by num_items_in_batch.
    """

    def __init__(self, model: nn.Module, func: LossFunc | None) -> None:
        base = base_of(model)
        kind = str(getattr(base, "loss_type", None))
        self._shifts = kind == "ForCausalLM"
        self._func, self._checked = func, func is None
        if func is None:
            if not self._shifts:
                raise ModelError(
                    f"{type(base).__name__} has a loss of the kind {kind}, and elastic3d's Trainer knows ForCausalLM: "
                    "give compute_loss_func=, a function of (outputs, labels, num_items_in_batch)"
                )
            self._own, self._vocabulary = base.loss_function, base.config.get_text_config().vocab_size

    def __call__(self, output: Any, labels: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses of a micro-batch's tokens, and their number."""
        count = self._count(labels)
        if not self._checked:
            self._check(output, labels, count)
        return self._sum(output, labels), count

    def samples(self, output: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums and the counts of each sample, for `run.evaluate`."""
        parts = [(_row(output, row), labels[row : row + 1]) for row in range(len(labels))]
        sums = torch.stack([self._sum(one, label).float() for one, label in parts])
        return sums, torch.stack([self._count(label) for _, label in parts])

    def _count(self, labels: Any) -> torch.Tensor:
        if not isinstance(labels, torch.Tensor):
            raise UsageError(f"labels are {type(labels).__name__}; elastic3d's Trainer counts the tokens of a tensor")
        return (labels[..., 1:] if self._shifts and labels.dim() > 1 else labels).ne(IGNORED).sum()

    def _sum(self, output: Any, labels: torch.Tensor, items: int = 1) -> torch.Tensor:
        if self._func is not None:
            return self._func(output, labels, num_items_in_batch=torch.tensor(items, device=labels.device))
        logits = output["logits"] if isinstance(output, dict) else output.logits
        loss: torch.Tensor = self._own(
            logits=logits, labels=labels, vocab_size=self._vocabulary, num_items_in_batch=items
        )
        return loss

    def _check(self, output: Any, labels: torch.Tensor, count: torch.Tensor) -> None:
        """Refuse a function that does not divide by the number it is given: its gradients would be of another size."""
        if not count:
            return
        with torch.no_grad():
            one, four = (float(self._sum(output, labels, items)) for items in (1, 4))
        if one:
            if abs(4 * four - one) > 1e-3 * abs(one):
                raise UsageError(
                    f"compute_loss_func returned {one:.6g} for num_items_in_batch=1 and {four:.6g} for 4: it must "
                    "return the sum over the tokens of a micro-batch divided by num_items_in_batch, such as "
                    'cross_entropy(..., reduction="sum") / num_items_in_batch'
                )
            self._checked = True


def _row(output: Any, row: int) -> Any:
    """Return what a model put out for one sample of a micro-batch."""
    if isinstance(output, torch.Tensor):
        return output[row : row + 1] if output.dim() else output
    if isinstance(output, dict):
        kept = {name: _row(value, row) for name, value in output.items() if isinstance(value, torch.Tensor)}
        return type(output)(kept)
    if isinstance(output, tuple | list):
        return type(output)(_row(one, row) for one in output)
    return output
