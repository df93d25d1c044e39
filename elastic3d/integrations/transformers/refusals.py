"""What of transformers' Trainer is not taken, by name, and what there is instead."""

from __future__ import annotations

from typing import Any

from torch import nn

from elastic3d.errors import ModelError, UsageError

LOSS = "give compute_loss_func=, which gets the output and the labels, as (outputs, labels, num_items_in_batch)"
LOOP = "the loop is elastic3d's, so that it survives what happens to nodes; callbacks are called where they were"
STORE = "checkpoints are those of train(store=..., every=...), and come back by themselves"
DATA = "give train_dataset= and eval_dataset= as functions that return data sets, and data_collator="
UPDATE = "give optimizer_cls_and_kwargs=, or choose by args.optim and args.lr_scheduler_type"
EVALUATION = "give metrics=, functions of (output, labels) that return a number for each sample, and args.eval_strategy"
EXPORT = "`elastic3d ckpt export STORE out/model.safetensors --prefix model/` writes the model of a checkpoint"

METHODS = {
    "compute_loss": LOSS,
    "training_step": LOOP,
    "prediction_step": EVALUATION,
    "evaluation_loop": EVALUATION,
    "evaluate": EVALUATION,
    "predict": EVALUATION,
    "get_train_dataloader": DATA,
    "get_eval_dataloader": DATA,
    "get_test_dataloader": DATA,
    "get_batch_samples": DATA,
    "create_optimizer": UPDATE,
    "create_scheduler": UPDATE,
    "create_optimizer_and_scheduler": UPDATE,
    "log": "give a callback with on_log, or trackers= to train()",
    "log_metrics": "give a callback with on_log, or trackers= to train()",
    "save_metrics": "give a callback with on_evaluate",
    "save_model": EXPORT,
    "save_state": STORE,
    "push_to_hub": EXPORT,
    "create_model_card": EXPORT,
    "hyperparameter_search": "start a job for each choice, each with a store of its own",
    "is_world_process_zero": "callbacks have state.is_world_process_zero, and run.is_first",
    "is_local_process_zero": "callbacks have state.is_local_process_zero",
}
"""Methods of transformers' Trainer that are neither called nor to be overridden."""

OPTIONS = {
    "model_init": "give it as model=, which is such a function",
    "compute_metrics": EVALUATION,
    "preprocess_logits_for_metrics": EVALUATION,
    "optimizers": UPDATE,
    "tokenizer": "give it as processing_class=",
    "resume_from_checkpoint": STORE,
    "trial": "start a job for each choice, each with a store of its own",
    "ignore_keys_for_eval": EVALUATION,
}
"""Arguments of transformers' Trainer, and of its train(), that are not taken."""


def refuse_overridden(kind: type) -> None:
    """Refuse a subclass that overrides what is never called; UsageError names it and what there is instead."""
    for name in METHODS:
        if name in vars(kind):
            raise UsageError(
                f"{kind.__name__}.{name} would never be called by elastic3d's Trainer: {METHODS[name]}. See "
                "docs/guides/integrations.md"
            )


def refuse_options(where: str, given: dict[str, Any]) -> None:
    """Refuse arguments that are not taken; UsageError names the first."""
    for name, value in given.items():
        if name in OPTIONS:
            if value is None or value == (None, None):
                continue
            raise UsageError(f"{where}: {name}= is not taken: {OPTIONS[name]}")
        raise UsageError(f"{where} has no argument {name!r}")


def function(name: str, given: Any, example: str) -> Any:
    """Return what is a function without arguments; UsageError for an object that was made already."""
    if given is None or isinstance(given, nn.Module) or not callable(given):
        what = "nothing" if given is None else type(given).__name__
        raise UsageError(
            f"elastic3d's Trainer: {name}= takes a function that returns it, such as {example}; it is {what}. It is "
            "called anew in each generation of the job, in a process that has neither device nor peers before"
        )
    return given


def checked_model(model: Any) -> nn.Module:
    """Return a model that can be trained as it is; ModelError for a quantised one."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"model= of elastic3d's Trainer must return an nn.Module; it returned {type(model).__name__}")
    config = getattr(model, "config", None)
    quantised = (
        getattr(model, "is_quantized", False)
        or getattr(model, "hf_quantizer", None) is not None
        or getattr(config, "quantization_config", None) is not None
    )
    if quantised:
        raise ModelError(
            f"{type(model).__name__} is quantised, and quantised weights can neither be cut nor be trained in an order "
            "that keeps the bits: load it without quantization_config, and give TrainingArguments bf16=True"
        )
    return model
