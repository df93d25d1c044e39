"""The callbacks of transformers around the steps of a run: when they are called, and what of them is kept.

What they decide (log, evaluate, save, stop), what was logged since, the best metric and the state of callbacks that
have one (`ExportableState`) belong to the state of the run: they are in its snapshots and checkpoints, and come back
with it, so that early stopping counts on after a death. Everything in it is the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from elastic3d.errors import UsageError
from elastic3d.integrations.packages import need
from elastic3d.training.run import Run

Evaluated = Callable[[], dict[str, float]]

KEPT_LOGS = 100
"""Newest entries of state.log_history that go into every snapshot."""


class CallbackFlow:
    """The TrainerState, the TrainerControl and the CallbackHandler of one generation.

    evaluated: evaluates the model, on every rank, and returns metrics by name. size: of the data set, 0 for a stream.
    """

    def __init__(
        self,
        run: Run,
        args: Any,
        callbacks: Iterable[Any],
        *,
        model: nn.Module,
        processing_class: Any,
        optimizer: torch.optim.Optimizer,
        schedule: Any,
        steps: int,
        size: int,
        global_batch: int,
        evaluated: Evaluated | None,
    ) -> None:
        ours = need("transformers.trainer_callback", install="elastic3d[transformers]", why="elastic3d's Trainer")
        # The best metric is only noted; checkpoints, and the state at the end, are the run's.
        args.set_save(strategy="no")
        self._run, self._args, self._schedule = run, args, schedule
        self._size, self._batch, self._evaluated = size, global_batch, evaluated
        self._exportable = ours.ExportableState
        self._handler = ours.CallbackHandler(
            [ours.DefaultFlowCallback, *callbacks], model, processing_class, optimizer, schedule
        )
        self._control = ours.TrainerControl()
        self.state = ours.TrainerState(
            max_steps=steps,
            num_train_epochs=math.ceil(steps * global_batch / size) if size else 1,
            is_local_process_zero=run.rank == 0,
            is_world_process_zero=run.rank == 0,
            train_batch_size=args.per_device_train_batch_size,
        )
        self.state.compute_steps(args, steps)
        self._losses, self._logged = 0.0, 0
        # Step at which a callback asked to stop. The run ends one step later: a state of that step has to keep the
        # wish, and one from which the run goes on all the same (accept="stop", more steps) must not end it again.
        self._wished: int | None = None
        self._pending: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return what belongs to the state of the run."""
        return {
            "losses": self._losses,
            "logged": self._logged,
            "pending": dict(self._pending),
            "history": self.state.log_history[-KEPT_LOGS:],
            "best": [self.state.best_metric, self.state.best_global_step],
            "stop": self._wished,
            "callbacks": {name: one.state() for name, one in self._stateful()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it; a callback that has none there stays as it is."""
        self._losses, self._logged, self._pending = state["losses"], state["logged"], dict(state["pending"])
        self.state.log_history = list(state["history"])
        self.state.best_metric, self.state.best_global_step = state["best"]
        self._wished = state["stop"]
        for name, one in self._stateful():
            for attribute, value in state["callbacks"].get(name, {}).get("attributes", {}).items():
                setattr(one, attribute, value)

    def begin(self) -> None:
        """Call what comes before the first step of this generation."""
        self._count()
        self._call("on_init_end")
        self._call("on_train_begin")
        if self._wished == self.state.global_step:
            self._stop()
        else:
            self._wished = None
        if self.state.global_step == 0 and self._args.eval_on_start and self._evaluated is not None:
            self._evaluate()
        if self.state.global_step < self.state.max_steps:
            self._call("on_epoch_begin")

    def before_step(self) -> None:
        """Call what comes before the passes of a step."""
        self._call("on_step_begin")

    def before_update(self) -> None:
        """Call what comes between the passes of a step and its update, and log what is known of it."""
        self._call("on_pre_optimizer_step")
        known: dict[str, Any] = {"learning_rate": float(self._schedule.get_last_lr()[0]), **self._pending}
        self._run.log(**known)
        self._pending = {}

    def after_step(self, loss: float, *, ends: bool) -> None:
        """Call what comes after a step, and do what callbacks decide. ends: no step follows."""
        before = self._epochs_begun()
        self._losses += loss
        self._count()
        self._call("on_optimizer_step")
        self._call("on_step_end")
        self._act()
        last = self.state.global_step >= self.state.max_steps
        if last or self._epochs_begun() > before:
            self._call("on_epoch_end")
            self._act()
            if not last:
                self._call("on_epoch_begin")
        if ends:
            known: dict[str, Any] = self._pending
            self._run.log(**known)
            self._pending = {}

    def end(self) -> None:
        """Call what comes after the last step of the run."""
        self._call("on_train_end")

    def _stateful(self) -> list[tuple[str, Any]]:
        return [
            (f"{number}:{type(one).__name__}", one)
            for number, one in enumerate(self._handler.callbacks)
            if isinstance(one, self._exportable)
        ]

    def _count(self) -> None:
        step = self.state.global_step = self._run.steps
        self.state.epoch = step * self._batch / self._size if self._size else step / self.state.max_steps

    def _epochs_begun(self) -> int:
        return self.state.global_step * self._batch // self._size if self._size else 0

    def _call(self, event: str, **more: Any) -> None:
        self._control = getattr(self._handler, event)(self._args, self.state, self._control, run=self._run, **more)
        if self._control.should_epoch_stop:
            raise UsageError(
                "a callback asks to end the epoch (should_epoch_stop): epochs of elastic3d follow from the order of "
                "samples, and none is left out; should_training_stop ends the run"
            )

    def _act(self) -> None:
        step, control = self.state.global_step, self._control
        if control.should_log and step > self._logged:
            mean = self._losses / (step - self._logged)
            self._losses, self._logged = 0.0, step
            self._log({"loss": mean, "learning_rate": float(self._schedule.get_last_lr()[0])})
        if self._control.should_evaluate and self._evaluated is not None:
            self._evaluate()
        if self._control.should_save:
            if step < self.state.max_steps:
                self._run.save()
            self._call("on_save")
        if self._control.should_training_stop and step < self.state.max_steps and self._wished is None:
            self._wished = step
            self._stop()

    def _stop(self) -> None:
        self._run.stop("a callback of the Trainer asked for it (should_training_stop)")

    def _evaluate(self) -> None:
        assert self._evaluated is not None
        metrics = self._evaluated()
        self._log(dict(metrics))
        self._call("on_evaluate", metrics={**metrics, "epoch": self.state.epoch})
        self._pending |= metrics
        self._note_best(metrics)

    def _note_best(self, metrics: dict[str, float]) -> None:
        name = self._args.metric_for_best_model
        if name is None:
            return
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            raise UsageError(
                f"TrainingArguments: metric_for_best_model names {name!r}, and an evaluation has {', '.join(metrics)}"
            )
        value, best = metrics[name], self.state.best_metric
        if best is None or (value > best if self._args.greater_is_better else value < best):
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step

    def _log(self, logs: dict[str, float]) -> None:
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._call("on_log", logs=logs)
