"""TrainingArguments in a trainer: how they are made, and which of them are taken.

Three kinds of fields: those that are taken; those that say how something is done that is done otherwise here, so that
any value is right; and all others, which are refused unless they are as they come. A field that a later version of
transformers adds is of the third kind until it is listed here.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from elastic3d import environment
from elastic3d.errors import UsageError
from elastic3d.integrations.packages import need
from elastic3d.integrations.transformers.refusals import EVALUATION, STORE

TAKEN = frozenset(
    (
        "output_dir",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "num_train_epochs",
        "max_steps",
        "learning_rate",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "optim",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
        "bf16",
        "fp16",
        "activation_checkpointing",
        "gradient_checkpointing",
        "logging_strategy",
        "logging_steps",
        "logging_first_step",
        "eval_strategy",
        "eval_steps",
        "eval_delay",
        "eval_on_start",
        "metric_for_best_model",
        "greater_is_better",
        "seed",
        "data_seed",
        "dataloader_num_workers",
        "remove_unused_columns",
        "save_strategy",
    )
)

WITHOUT_EFFECT = frozenset(
    (
        "per_device_eval_batch_size",
        "use_cpu",
        "use_cache",
        "torch_empty_cache_steps",
        "full_determinism",
        "do_train",
        "do_eval",
        "do_predict",
        "dataloader_drop_last",
        "dataloader_pin_memory",
        "dataloader_persistent_workers",
        "dataloader_prefetch_factor",
        "dataloader_multiprocessing_context",
        "dataloader_in_order",
        "length_column_name",
        "disable_tqdm",
        "run_name",
        "log_level",
        "log_level_replica",
        "log_on_each_node",
        "logging_nan_inf_filter",
        "prediction_loss_only",
        "eval_accumulation_steps",
        "eval_do_concat_batches",
        "eval_use_gather_object",
        "skip_memory_metrics",
        "local_rank",
        "save_on_each_node",
        "ignore_data_skip",
        "restore_callback_states_from_checkpoint",
        "ddp_find_unused_parameters",
        "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers",
        "ddp_static_graph",
        "ddp_backend",
        "ddp_timeout",
        "hub_token",
        "hub_private_repo",
        "hub_model_id",
        "hub_strategy",
        "hub_always_push",
        "hub_revision",
        "project",
        "trackio_space_id",
        "trackio_bucket_id",
        "trackio_static_space_id",
        "logging_dir",
    )
)
"""Devices, processes, loaders and DDP are elastic3d's, determinism and the state of callbacks are always kept."""

LAYOUT = "the layout is planned, or fixed by train(layout=...); precision and recomputation have arguments of their own"
COMPILE = "compile blocks where the model is made, or leave it out"

REASONS = {
    "save_steps": STORE,
    "save_total_limit": "give train(checkpointing=elastic3d.Checkpointing(keep=...))",
    "save_only_model": STORE,
    "enable_jit_checkpoint": "a node that is told to leave hands its state on by itself",
    "load_best_model_at_end": "the last state is the run's; export the checkpoint of the best step",
    "resume_from_checkpoint": STORE,
    "auto_find_batch_size": "where memory runs out, the next generation needs less, with the same bits",
    "deepspeed": LAYOUT,
    "fsdp": LAYOUT,
    "fsdp_config": LAYOUT,
    "parallelism_config": LAYOUT,
    "accelerator_config": LAYOUT,
    "average_tokens_across_devices": "every token of the global batch weighs the same, whatever device it was on",
    "torch_compile": COMPILE,
    "torch_compile_backend": COMPILE,
    "torch_compile_mode": COMPILE,
    "use_liger_kernel": "its kernels were not tried under the promise of equal bits",
    "liger_kernel_config": "its kernels were not tried under the promise of equal bits",
    "neftune_noise_alpha": "add the noise in the model's own embedding",
    "label_smoothing_factor": "smooth in compute_loss_func=",
    "tf32": "elastic3d sets how devices compute, and was not tried with it",
    "bf16_full_eval": "evaluation computes as training does",
    "fp16_full_eval": "evaluation computes as training does",
    "report_to": "give train(trackers=[...]), which write each step once whatever dies, as 'wandb:PROJECT'",
    "push_to_hub": "export a checkpoint, and push that",
    "include_num_input_tokens_seen": "the metrics of a node count tokens (train(metrics=...))",
    "include_for_metrics": EVALUATION,
    "batch_eval_metrics": EVALUATION,
    "train_sampling_strategy": "the order is a keyed permutation; give a data set that is ordered, or elastic3d.Packed",
    "optim_args": "give optimizer_cls_and_kwargs=",
    "optim_target_modules": "give optimizer_cls_and_kwargs=",
    "activation_checkpointing_kwargs": "recomputation has no options here",
    "gradient_checkpointing_kwargs": "recomputation has no options here",
    "label_names": "name the target `labels`",
    "debug": "elastic3d finds numbers that are not finite by health=",
}
"""Why a field that is not taken is not, or what there is instead."""

HIDDEN = (
    environment.RANK,
    environment.WORLD_SIZE,
    environment.LOCAL_RANK,
    environment.LOCAL_WORLD_SIZE,
    environment.PMI_SIZE,
    environment.OPEN_MPI_SIZE,
    environment.MVAPICH_SIZE,
)


@contextmanager
def alone_for_accelerate() -> Iterator[None]:
    """Hide from Accelerate that there are other ranks, and devices: it would open both.

    TrainingArguments make its state, which forms a process group and takes the host's first device.
    """
    before = {one.name: one.take() for one in (*HIDDEN, environment.ACCELERATE_CPU)}
    os.environ[environment.ACCELERATE_CPU.name] = "true"
    try:
        yield
    finally:
        environment.ACCELERATE_CPU.take()
        os.environ.update({name: value for name, value in before.items() if value is not None})


def arguments_of(make: Callable[[], Any]) -> Any:
    """Return the TrainingArguments that a script's function makes; UsageError names all that is not taken."""
    transformers = need("transformers", install="elastic3d[transformers]", why="elastic3d's Trainer")
    need("accelerate", install="elastic3d[transformers]", why="TrainingArguments")
    with alone_for_accelerate():
        plain, given = transformers.TrainingArguments(), make()
    if not isinstance(given, transformers.TrainingArguments):
        raise UsageError(f"args= of elastic3d's Trainer must return TrainingArguments, not {type(given).__name__}")
    check_arguments(_fields(given), _fields(plain))
    return given


def check_arguments(given: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
    """Refuse what is not taken; UsageError names each field, its value and what there is instead.

    given, plain: all fields, as they were given and as they come.
    """
    wrong = [
        f"{name}={_shown(given[name])} is not taken: {REASONS.get(name, 'elastic3d does not know it')}"
        for name in given
        if name not in TAKEN | WITHOUT_EFFECT and given[name] != plain.get(name)
    ]
    strategy = str(getattr(given.get("save_strategy"), "value", given.get("save_strategy")))
    if strategy not in ("no", "steps"):
        wrong.append(f"save_strategy={strategy!r} is not taken: {STORE}")
    schedule = str(getattr(given.get("lr_scheduler_type"), "value", given.get("lr_scheduler_type")))
    if schedule in ("reduce_lr_on_plateau", "greedy"):
        wrong.append(f"lr_scheduler_type={schedule!r} is not taken: a schedule here is a function of the step")
    if wrong:
        raise UsageError("TrainingArguments: " + "; ".join(wrong))


def _fields(given: Any) -> dict[str, Any]:
    return {field.name: getattr(given, field.name) for field in dataclasses.fields(given) if field.init}


def _shown(value: Any) -> str:
    text = repr(getattr(value, "value", value))
    return text if len(text) <= 60 else f"{text[:57]}..."
