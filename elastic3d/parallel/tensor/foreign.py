"""The tensor-parallel plans that come with Hugging Face models, in our words.

A model's `_tp_plan`, and its configuration's `base_model_tp_plan`, give a style for patterns of module names; the
latter are relative to the base model, whose place in the model is `base_model_prefix`.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from elastic3d.errors import ModelError
from elastic3d.parallel.tensor.styles import Style

WORDS = {
    "colwise": Style.COLUMN,
    "colwise_rep": Style.COLUMN_GATHERED,
    "colwise_gather_output": Style.COLUMN_GATHERED,
    "rowwise": Style.ROW,
    "rowwise_rep": Style.ROW,
    "rowwise_split_input": Style.ROW_SPLIT,
    "embedding_rowwise": Style.ROW,
    "embedding_colwise": Style.COLUMN_GATHERED,
    "sequence_parallel": Style.SEQUENCE,
    "replicate": Style.REPLICATED,
    "replicated_with_grad_allreduce": Style.SUMMED,
}


def own_plan(model: nn.Module) -> dict[str, str]:
    """Return the plan that comes with a Hugging Face model; ModelError if it has none, or one with unknown words."""
    words: dict[str, str] = {}
    for prefix, module in model.named_modules():
        if type(module).__module__.startswith("peft."):
            continue  # it shows the attributes of the model that it wraps as its own
        if words := {f"{prefix}.{pattern}".lstrip("."): word for pattern, word in _words(module).items()}:
            break
    if not words:
        raise ModelError(
            f'tensor="auto" is for models with a plan of their own, in _tp_plan or config.base_model_tp_plan; '
            f"{type(model).__name__} has none: give one, as in tensor={{'blocks.*.up': 'column', ...}}"
        )
    names = [name for name, _ in model.named_modules()]
    plan: dict[str, str] = {}
    for pattern, word in words.items():
        if word not in WORDS:
            raise ModelError(
                f"the plan of {type(model).__name__} has {word!r} for {pattern!r}, which is not supported; supported "
                f"are {', '.join(WORDS)}. Give a plan of your own as tensor=, without it"
            )
        if any(fnmatchcase(name, pattern) for name in names):
            plan[pattern] = WORDS[word]
    return plan


def _words(model: nn.Module) -> dict[str, str]:
    plan: dict[str, str] = {}
    own: Any = getattr(model, "_tp_plan", None)
    if isinstance(own, Mapping):
        plan.update(own)
    base: Any = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if isinstance(base, Mapping):
        prefix = getattr(model, "base_model_prefix", "")
        inside = f"{prefix}." if prefix and hasattr(model, prefix) else ""
        plan.update({f"{inside}{pattern}": word for pattern, word in base.items()})
    return plan
