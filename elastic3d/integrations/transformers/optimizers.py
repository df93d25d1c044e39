"""The optimizer and the schedule that TrainingArguments ask for, over this rank's part of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elastic3d.errors import UsageError
from elastic3d.integrations.packages import need

FUSED = ("adamw_torch", "adamw_torch_fused")

UNDECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Names of parameters without weight decay, as in transformers' Trainer.get_decay_parameter_names."""


def optimizer_of(args: Any, model: nn.Module, own: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None) -> Any:
    """Return the optimizer that args.optim names, with weight decay where transformers' Trainer has it.

    own: the class and its arguments that a script asks for in its place. Always two groups, either of which may be
    empty on a pipeline stage. UsageError for an optimizer that is not one of torch's that work on shards.
    """
    names = need("transformers.trainer_pt_utils", install="elastic3d[transformers]", why="elastic3d's Trainer")
    decayed = set(names.get_parameter_names(model, [nn.LayerNorm], UNDECAYED))
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    groups = [
        {"params": [one for name, one in trained if name in decayed], "weight_decay": args.weight_decay},
        {"params": [one for name, one in trained if name not in decayed], "weight_decay": 0.0},
    ]
    kind, options = (
        own if own is not None else _named(args, on_cpu=all(one.device.type != "cuda" for _, one in trained))
    )
    return kind(groups, **options)


def _named(args: Any, *, on_cpu: bool) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    name = str(getattr(args.optim, "value", args.optim))
    rate: dict[str, Any] = {"lr": args.learning_rate}
    if name in FUSED:
        # On a CPU, fused vectors give other bits than the rest of a shard.
        fused = {"fused": True} if name == "adamw_torch_fused" and not on_cpu else {}
        betas = args.adam_beta1, args.adam_beta2
        return torch.optim.AdamW, {**rate, "betas": betas, "eps": args.adam_epsilon, **fused}
    others = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop}
    if name in others:
        return others[name], rate
    raise UsageError(
        f"TrainingArguments: optim={name!r} is not taken; those that work on the shards of every layout are "
        f"{', '.join((*FUSED, *others))}. Another one of torch's kind can be given as optimizer_cls_and_kwargs="
    )


def schedule_of(args: Any, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """Return the learning-rate schedule of the arguments over so many steps."""
    optimization = need("transformers.optimization", install="elastic3d[transformers]", why="elastic3d's Trainer")
    return optimization.get_scheduler(
        args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.get_warmup_steps(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
