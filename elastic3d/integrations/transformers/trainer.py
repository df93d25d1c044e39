"""A trainer in the shape of Hugging Face's: what people give to theirs, trained by a `Run`.

    from elastic3d.integrations.transformers import Trainer

    trainer = Trainer(
        model=lambda: LlamaForCausalLM(config),
        args=lambda: TrainingArguments("out", max_steps=20_000, per_device_train_batch_size=2),
        train_dataset=lambda: load_from_disk("data"),
        global_batch=512,
        blocks="model.layers",
    )
    if __name__ == "__main__":
        trainer.train(store="s3://bucket/llama")

It is no subclass of transformers' Trainer, whose constructor builds an Accelerator and a whole model on a device.
Model, arguments and data are functions, since `main` is entered anew in each generation, in a fresh process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from elastic3d.data.collating import Collate
from elastic3d.data.dataset_facts import is_numbered
from elastic3d.entry import run as run_job
from elastic3d.errors import UsageError
from elastic3d.integrations.packages import need
from elastic3d.integrations.transformers import refusals
from elastic3d.integrations.transformers.arguments import arguments_of
from elastic3d.integrations.transformers.columns import KnownColumns
from elastic3d.integrations.transformers.flow import CallbackFlow
from elastic3d.integrations.transformers.losses import LossFunc, TokenLoss
from elastic3d.integrations.transformers.optimizers import optimizer_of, schedule_of
from elastic3d.training.evaluating import Metric
from elastic3d.training.run import Run

USED = ("transformers.trainer_callback", "transformers.trainer_pt_utils", "transformers.optimization", "accelerate")


class Trainer:
    """What transformers' Trainer is given, trained by elastic3d; see docs/guides/integrations.md for what is not taken.

    Args:
        model: Returns the model, a PreTrainedModel or a PEFT model over one.
        args: Returns the TrainingArguments. What is not taken of them is refused by name.
        train_dataset: Returns the data set, map-style or a stream, of dictionaries with `labels`.
        eval_dataset: Returns the data set of evaluations, or a mapping of several; map-style. None for none.
        data_collator: Makes samples into a micro-batch. None, the default: tensors of one shape are stacked, or, with a
            processing_class, padded by transformers' DataCollatorWithPadding.
        processing_class: The tokenizer, for callbacks and for padding. None, the default, for none.
        compute_loss_func: A function of (outputs, labels, num_items_in_batch) that returns a sum divided by the last.
            None, the default, for the loss of a causal language model.
        metrics: By name, functions of (output, labels) that return a number for each sample, as `run.evaluate` takes
            them; each is a pass of its own over the data set. Beside them there is always `eval_loss`.
        callbacks: Classes and objects of TrainerCallback; each call has `run=` beside the arguments of transformers.
        optimizer_cls_and_kwargs: A class of optimizers and its arguments, in place of args.optim.
        global_batch: Samples of a step over all devices, whatever their number is. None, the default:
            per_device_train_batch_size * gradient_accumulation_steps, as on one device.
        blocks: As `run.shard` takes it, such as "model.layers"; None, the default, for no pipeline stages.
        tensor: As `run.shard` takes it; "auto" for the model's own plan, None, the default, for tp 1.
        reduction: As `run.shard` takes it, "ordered" by default.
        leaf: As `run.shard` takes it, 1 by default.
        one_shape: Whether data_collator makes all micro-batches of one shape; inner stages load no inputs then.
        accept: As `run.restore` takes it.
        others: Arguments of transformers' Trainer that are not taken, to be refused by name.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refusals.refuse_overridden(cls)

    def __init__(
        self,
        model: Callable[[], nn.Module],
        args: Callable[[], Any],
        data_collator: Collate | None = None,
        train_dataset: Callable[[], Any] | None = None,
        eval_dataset: Callable[[], Any] | None = None,
        processing_class: Any = None,
        *,
        compute_loss_func: LossFunc | None = None,
        metrics: Mapping[str, Metric] | None = None,
        callbacks: Iterable[Any] = (),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        global_batch: int | None = None,
        blocks: str | None = None,
        tensor: Any = None,
        reduction: str = "ordered",
        leaf: int = 1,
        one_shape: bool = False,
        accept: str | Iterable[str] = (),
        **others: Any,
    ) -> None:
        refusals.refuse_options("elastic3d's Trainer", others)
        self._model = refusals.function("model", model, "lambda: LlamaForCausalLM(config)")
        self._args = refusals.function("args", args, "lambda: TrainingArguments(...)")
        self._train = refusals.function("train_dataset", train_dataset, "lambda: load_from_disk(folder)")
        self._held_out = (
            None
            if eval_dataset is None
            else refusals.function("eval_dataset", eval_dataset, "lambda: load_from_disk(folder)")
        )
        self._collator, self._processing, self._loss = data_collator, processing_class, compute_loss_func
        self._metrics, self._callbacks = dict(metrics or {}), list(callbacks or ())
        self._optimizer, self._global_batch, self._one_shape = optimizer_cls_and_kwargs, global_batch, one_shape
        self._shard = {"blocks": blocks, "tensor": tensor, "reduction": reduction, "leaf": leaf}
        self._accept = accept
        # Here, and not in each generation: trainers are forked from a process that has imported it.
        for module in USED:
            need(module, install="elastic3d[transformers]", why="elastic3d's Trainer")

    def __getattr__(self, name: str) -> Any:
        if name in refusals.METHODS:
            raise AttributeError(f"elastic3d's Trainer has no {name}: {refusals.METHODS[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def train(self, resume_from_checkpoint: object = None, **options: Any) -> None:
        """Train on whatever nodes are there, and return when the job is over.

        options: as `elastic3d.run` takes them: store=, every=, layout=, trackers= and so on.
        """
        taken = dict(options)
        unknown = {name: taken.pop(name) for name in list(taken) if name in refusals.OPTIONS}
        refusals.refuse_options("Trainer.train", {"resume_from_checkpoint": resume_from_checkpoint, **unknown})
        run_job(self.main, **taken)

    def main(self, run: Run) -> None:
        """Train one generation; what `elastic3d.run` enters."""
        args = arguments_of(self._args)
        model = run.shard(
            lambda: refusals.checked_model(self._model()),
            seed=args.seed,
            precision="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
            recompute="full" if args.activation_checkpointing else "none",
            **self._shard,
        )
        optimizer = optimizer_of(args, model, self._optimizer)
        collate, one_shape = self._collate(args, model)
        dataset = self._train()
        micro_batch = args.per_device_train_batch_size
        batch = self._global_batch or micro_batch * args.gradient_accumulation_steps
        batches = run.batches(
            dataset,
            global_batch=batch,
            micro_batch=micro_batch,
            seed=args.seed if args.data_seed is None else args.data_seed,
            workers=args.dataloader_num_workers,
            collate=collate,
            one_shape=one_shape,
        )
        size = len(dataset) if is_numbered(dataset) else 0
        steps = _steps(args, size, batch)
        schedule = schedule_of(args, optimizer, steps)
        loss_fn = TokenLoss(model, self._loss)
        flow = CallbackFlow(
            run,
            args,
            self._callbacks,
            model=model,
            processing_class=self._processing,
            optimizer=optimizer,
            schedule=schedule,
            steps=steps,
            size=size,
            global_batch=batch,
            evaluated=self._evaluation(run, args, model, loss_fn, collate),
        )
        run.restore(
            model=model,
            optimizer=optimizer,
            schedule=schedule,
            batches=batches,
            extra={"trainer": flow},
            accept=self._accept,
        )
        flow.begin()
        for step in batches.until(step=steps):
            flow.before_step()
            loss = run.backward(model, step, loss_fn)
            flow.before_update()
            run.step(optimizer, schedule, loss=loss, clip=args.max_grad_norm or None)
            flow.after_step(loss.value, ends=batches.step == batches.goal)
        flow.end()

    def _collate(self, args: Any, model: nn.Module) -> tuple[Collate | None, bool]:
        collator = self._collator
        if collator is None and self._processing is not None:
            collators = need("transformers", install="elastic3d[transformers]", why="padding")
            collator = collators.DataCollatorWithPadding(self._processing)
        if args.remove_unused_columns:
            return KnownColumns(model, collator), self._one_shape or collator is None
        return collator, self._one_shape

    def _evaluation(
        self, run: Run, args: Any, model: nn.Module, loss: TokenLoss, collate: Collate | None
    ) -> Callable[[], dict[str, float]] | None:
        if self._held_out is None:
            strategy = str(getattr(args.eval_strategy, "value", args.eval_strategy))
            if strategy != "no" or args.eval_on_start:
                raise UsageError(f"TrainingArguments: eval_strategy={strategy!r} needs eval_dataset= of the Trainer")
            return None
        held_out = self._held_out()
        sets = {f"eval_{name}": one for name, one in held_out.items()} if isinstance(held_out, dict) else {}
        metrics: dict[str, Metric] = {"loss": loss.samples, **self._metrics}

        def evaluated() -> dict[str, float]:
            return {
                f"{prefix}_{name}": run.evaluate(model, dataset, metric, collate=collate)
                for prefix, dataset in (sets or {"eval": held_out}).items()
                for name, metric in metrics.items()
            }

        return evaluated


def _steps(args: Any, size: int, global_batch: int) -> int:
    """Return the number of steps; UsageError for epochs of a stream."""
    if args.max_steps > 0:
        return int(args.max_steps)
    if not size:
        raise UsageError("TrainingArguments: num_train_epochs says nothing of a stream; give max_steps")
    return max(1, math.ceil(float(args.num_train_epochs) * size / global_batch))
