"""elastic3d's Trainer: the same training as transformers' own, and what it refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import EarlyStoppingCallback, TrainerCallback, set_seed

from elastic3d.errors import ConfigurationError, ModelError, UsageError
from elastic3d.integrations import packages
from elastic3d.integrations.transformers import Trainer
from elastic3d.integrations.transformers.arguments import alone_for_accelerate, arguments_of
from elastic3d.integrations.transformers.columns import KnownColumns
from elastic3d.integrations.transformers.losses import TokenLoss
from elastic3d.integrations.transformers.optimizers import optimizer_of
from elastic3d.training import Run, run_alone
from elastic3d.training.standalone import StandalonePort
from elastic3d.training.tiers import KeepersAndStore
from tests.integrations.llamas import VOCABULARY, Rows, arguments, llama, perplexed
from tests.pretrained.beginning import Host

ALL = 8


class Heard(TrainerCallback):
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []
        self.calls: list[tuple[str, int]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append({**logs, "step": state.global_step})

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.calls.append(("epoch begins", state.global_step))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.calls.append(("epoch ends", state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert kwargs["run"].steps == state.global_step

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.calls.append(("train ends", state.global_step))


def heard(make: Callable[[], Any] = arguments, **more: Any) -> Heard:
    """Train by hand; return what a callback heard."""
    ears = Heard()
    callbacks = [ears, *more.pop("callbacks", [])]
    run_alone(Trainer(llama, make, train_dataset=Rows, callbacks=callbacks, **more).main)
    return ears


def theirs(ours: Heard, **more: Any) -> list[dict[str, Any]]:
    """Train the same by transformers' own Trainer; return its logs of losses."""
    with alone_for_accelerate():
        args = arguments(**more)
        set_seed(args.seed)
        trainer = transformers.Trainer(llama(), args, train_dataset=Rows())
        trainer.remove_callback(transformers.ProgressCallback)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own Trainer writes to its output folder."""
    monkeypatch.chdir(tmp_path)


def test_losses_are_those_of_transformers_own_trainer() -> None:
    """With all samples in each step: the same weights, tokens that weigh the same, optimizer, decay and schedule."""
    ours = heard()
    other = theirs(ours, save_strategy="no")
    assert [line["step"] for line in ours.logs] == [line["step"] for line in other] == list(range(1, 7))
    for mine, their in zip(ours.logs, other, strict=True):
        # Theirs is the rate of the step that comes, or of the one that was made, by version.
        assert mine["loss"] == pytest.approx(their["loss"], rel=2e-4)
        assert mine["epoch"] == pytest.approx(their["epoch"])
    assert ours.logs[-1]["loss"] < ours.logs[0]["loss"] - 0.1


def test_callbacks_are_called_around_epochs_and_evaluations() -> None:
    """Epochs follow from the positions of samples; the mean of losses since the last log; metrics by name."""
    ears = heard(
        lambda: arguments(
            max_steps=5, gradient_accumulation_steps=3, eval_strategy="steps", eval_steps=2, logging_steps=4
        ),
        eval_dataset=lambda: {"near": Rows(3), "far": Rows(2)},
        metrics={"perplexed": perplexed},
    )
    assert ears.calls == [
        ("epoch begins", 0),
        ("epoch ends", 2),
        ("epoch begins", 2),
        ("epoch ends", 3),
        ("epoch begins", 3),
        ("epoch ends", 4),
        ("epoch begins", 4),
        ("epoch ends", 5),
        ("train ends", 5),
    ]
    evaluated = [line for line in ears.logs if "eval_near_loss" in line]
    assert [line["step"] for line in evaluated] == [2, 4, 5]
    assert {"eval_far_loss", "eval_near_perplexed", "eval_far_perplexed"} < evaluated[0].keys()


@pytest.mark.parametrize(("callbacks", "steps"), [([], 5), (["stops"], 4)], ids=["all", "stopped"])
def test_trackers_have_each_evaluation(callbacks: list[str], steps: int) -> None:
    """At the step that follows it, and that of the last step at the last one."""
    trainer = Trainer(
        llama,
        lambda: arguments(max_steps=5, eval_strategy="steps", eval_steps=2),
        train_dataset=Rows,
        eval_dataset=lambda: Rows(3),
        callbacks=[StopsAt(3) for _ in callbacks],
    )
    ears = Heard()
    trainer._callbacks.append(ears)
    port = run_alone(trainer.main)._port
    assert isinstance(port, StandalonePort)
    losses = {line["step"]: line["eval_loss"] for line in ears.logs if "eval_loss" in line}
    written = {record.step: record.logged["eval_loss"] for record in port.records if "eval_loss" in record.logged}
    assert [record.step for record in port.records] == list(range(1, steps + 1))
    assert written == {3: losses[2], steps: losses[steps]}


def test_early_stopping_ends_the_run() -> None:
    """One step after the callback has asked: all ranks have to hear of it first."""
    ears = heard(
        lambda: arguments(
            max_steps=30,
            learning_rate=0.0,
            eval_strategy="steps",
            eval_steps=2,
            metric_for_best_model="loss",
            logging_steps=50,
        ),
        eval_dataset=lambda: Rows(2),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    assert ears.calls[-1] == ("train ends", 7)


def test_the_state_of_callbacks_is_kept() -> None:
    """What a state has is plain, and comes back: logs, the best metric, the patience of early stopping, the wish."""
    from elastic3d.integrations.transformers.flow import CallbackFlow

    def flow(stopping: EarlyStoppingCallback) -> CallbackFlow:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with alone_for_accelerate():
            args = arguments()
        return CallbackFlow(
            SimpleNamespace(rank=0, steps=3),  # type: ignore[arg-type]
            args,
            [stopping],
            model=model,
            processing_class=None,
            optimizer=optimizer,
            schedule=None,
            steps=9,
            size=4,
            global_batch=8,
            evaluated=None,
        )

    first, second = EarlyStoppingCallback(5), EarlyStoppingCallback(5)
    one, other = flow(first), flow(second)
    first.early_stopping_patience_counter = 3
    one.state.best_metric, one.state.best_global_step = 1.25, 2
    one.state.log_history += [{"loss": 1.5, "step": number} for number in range(200)]
    one._wished = 3
    kept = json.loads(json.dumps(one.state_dict()))
    other.load_state_dict(kept)
    assert second.early_stopping_patience_counter == 3
    assert (other.state.best_metric, other.state.best_global_step) == (1.25, 2)
    assert [line["step"] for line in other.state.log_history] == list(range(100, 200))
    assert other.state_dict() == kept


def kept_run(
    store: Path, steps: int, *callbacks: TrainerCallback, accept: tuple[str, ...] = ()
) -> list[tuple[str, int]]:
    """Go on from the newest checkpoint of a store; return what a callback heard."""
    ears = Heard()
    trainer = Trainer(
        llama, lambda: arguments(max_steps=steps), train_dataset=Rows, callbacks=[ears, *callbacks], accept=accept
    )
    run = Run(Host(store), tiers=KeepersAndStore(None))
    trainer.main(run)
    run.finish()
    return ears.calls


class StopsAt(TrainerCallback):
    """Asks to stop after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_training_stop = True


def test_a_run_that_had_all_its_steps_goes_on_to_more(tmp_path: Path) -> None:
    """transformers itself asks to stop at the last step, which is no wish of a callback to end what comes later."""
    assert kept_run(tmp_path, 2)[-1] == ("train ends", 2)
    assert kept_run(tmp_path, 6)[-1] == ("train ends", 6)


def test_a_run_that_a_callback_has_ended_goes_on_where_that_is_accepted(tmp_path: Path) -> None:
    """To its last step, and not by one step each time it is started."""
    assert kept_run(tmp_path, 6, StopsAt(1))[-1] == ("train ends", 2)
    assert kept_run(tmp_path, 6)[-1] == ("train ends", 2)
    assert kept_run(tmp_path, 6, accept=("stop",))[-1] == ("train ends", 6)


def test_a_wish_to_stop_survives_the_step_in_which_the_ranks_hear_of_it(tmp_path: Path) -> None:
    """A job that dies there ends after the same step as one that does not."""

    class Dies(StopsAt):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == self.step:
                raise InterruptedError("between the wish and the next step")

    with pytest.raises(InterruptedError, match="between the wish"):
        kept_run(tmp_path, 6, Dies(3))
    assert kept_run(tmp_path, 6)[-1] == ("train ends", 4)


@pytest.mark.parametrize(
    ("field", "value", "instead"),
    [
        ("save_strategy", "epoch", "store="),
        ("save_steps", 10, "every="),
        ("save_total_limit", 2, "keep="),
        ("load_best_model_at_end", True, "best step"),
        ("resume_from_checkpoint", "folder", "come back by themselves"),
        ("auto_find_batch_size", True, "memory runs out"),
        ("fsdp", "full_shard", "layout is planned"),
        ("accelerator_config", {"split_batches": True}, "layout is planned"),
        ("average_tokens_across_devices", False, "weighs the same"),
        ("neftune_noise_alpha", 5.0, "embedding"),
        ("label_smoothing_factor", 0.1, "compute_loss_func"),
        ("report_to", ["tensorboard"], "trackers="),
        ("push_to_hub", True, "export"),
        ("include_num_input_tokens_seen", True, "count tokens"),
        ("lr_scheduler_type", "reduce_lr_on_plateau", "function of the step"),
        ("label_names", ["tags"], "`labels`"),
    ],
)
def test_an_argument_that_is_not_taken_is_named(field: str, value: Any, instead: str) -> None:
    """With its value, and what there is instead, before the model is built."""
    more: dict[str, Any] = {field: value}
    if field in ("load_best_model_at_end", "lr_scheduler_type"):
        more |= {"eval_strategy": "steps", "eval_steps": 500}
    with pytest.raises(UsageError, match=rf"{field}=.* is not taken: .*{instead}"):
        arguments_of(lambda: arguments(**more))


def test_a_deepspeed_configuration_is_named() -> None:
    """Where DeepSpeed is installed; elsewhere TrainingArguments refuse it themselves."""
    from dataclasses import fields

    from elastic3d.integrations.transformers.arguments import check_arguments

    with alone_for_accelerate():
        plain = {one.name: getattr(arguments(), one.name) for one in fields(arguments()) if one.init}
    with pytest.raises(UsageError, match=r"deepspeed='zero3\.json' is not taken: the layout is planned"):
        check_arguments({**plain, "deepspeed": "zero3.json"}, plain)
    with pytest.raises(UsageError, match="brand_new=7 is not taken: elastic3d does not know it"):
        check_arguments({**plain, "brand_new": 7}, {**plain, "brand_new": None})


def test_every_field_is_judged() -> None:
    """Each is taken, without effect, or has a reason, so that a new one is looked at."""
    from dataclasses import fields

    from elastic3d.integrations.transformers.arguments import REASONS, TAKEN, WITHOUT_EFFECT

    names = {one.name for one in fields(transformers.TrainingArguments) if one.init}
    assert names - TAKEN - WITHOUT_EFFECT - REASONS.keys() == set()
    assert TAKEN - names == set()
    assert (TAKEN & WITHOUT_EFFECT) | (TAKEN & REASONS.keys()) | (WITHOUT_EFFECT & REASONS.keys()) == set()


@pytest.mark.parametrize("optim", ["adafactor", "adamw_bnb_8bit", "galore_adamw", "lomo"])
def test_an_optimizer_that_shards_cannot_carry_is_named(optim: str) -> None:
    """With those that work."""
    with pytest.raises(UsageError, match=rf"optim='{optim}' is not taken; .*adamw_torch"):
        run_alone(Trainer(llama, lambda: arguments(optim=optim), train_dataset=Rows).main)


def test_the_default_optimizer_is_not_fused_on_a_cpu() -> None:
    """Where it would give other bits for other shards."""
    optimizer = optimizer_of(arguments_of(arguments), llama(), None)
    assert [group["fused"] for group in optimizer.param_groups] == [None, None]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert len(optimizer.param_groups[1]["params"]) == 5  # of norms


@pytest.mark.parametrize("method", ["compute_loss", "training_step", "get_train_dataloader", "create_optimizer", "log"])
def test_a_method_that_is_never_called_cannot_be_overridden(method: str) -> None:
    """The class is refused where it is defined; asking for one of them says what there is instead."""
    with pytest.raises(UsageError, match=rf"Own\.{method} would never be called"):
        type("Own", (Trainer,), {method: lambda self: None})
    with pytest.raises(AttributeError, match=f"has no {method}: give|has no {method}: the loop"):
        getattr(Trainer(llama, arguments, train_dataset=Rows), method)


def test_a_subclass_may_add_what_is_its_own() -> None:
    """Methods of other names."""
    kind = type("Own", (Trainer,), {"describe": lambda self: "fine"})
    assert kind(llama, arguments, train_dataset=Rows).describe() == "fine"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"compute_metrics": print}, "compute_metrics= is not taken: give metrics="),
        ({"model_init": llama}, "model_init= is not taken: give it as model="),
        ({"optimizers": (1, 2)}, "optimizers= is not taken"),
        ({"model": None}, "model= takes a function that returns it.* it is nothing"),
        ({"args": "out"}, "args= takes a function that returns it.* it is str"),
        ({"train_dataset": [1]}, "train_dataset= takes a function"),
        ({"model": nn.Linear(1, 1)}, "model= takes a function.* it is Linear"),
    ],
)
def test_wrong_arguments_are_refused_where_they_are_given(more: Mapping[str, Any], words: str) -> None:
    """By name."""
    with pytest.raises(UsageError, match=words):
        Trainer(**{"model": llama, "args": arguments, "train_dataset": Rows, **more})


def test_train_takes_no_checkpoint() -> None:
    """It restores by itself."""
    with pytest.raises(UsageError, match="resume_from_checkpoint= is not taken: checkpoints are"):
        Trainer(llama, arguments, train_dataset=Rows).train(resume_from_checkpoint=True)
    with pytest.raises(UsageError, match="elastic3d's Trainer has no argument 'speed'"):
        Trainer(llama, arguments, train_dataset=Rows, speed=3)


def quantised() -> nn.Module:
    model = llama()
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    return model


class Bare(nn.Linear):
    loss_type = "ForTokenClassification"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (quantised, "is quantised"),
        (lambda: "llama", "must return an nn.Module; it returned str"),
        (lambda: Bare(2, 2), "a loss of the kind ForTokenClassification"),
    ],
)
def test_a_model_that_cannot_be_taken_is_refused(make: Callable[[], Any], words: str) -> None:
    """Before it is trained."""
    with pytest.raises(ModelError, match=words):
        run_alone(Trainer(make, arguments, train_dataset=Rows).main)


def test_an_evaluation_needs_a_data_set_and_epochs_need_a_length() -> None:
    """Each is said with the argument that asks for it."""
    with pytest.raises(UsageError, match="eval_strategy='steps' needs eval_dataset="):
        heard(lambda: arguments(eval_strategy="steps", eval_steps=2))

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([Rows()[number] for number in range(8)])

    with pytest.raises(UsageError, match="give max_steps"):
        run_alone(Trainer(llama, lambda: arguments(max_steps=-1), train_dataset=Stream).main)
    ears = Heard()
    run_alone(Trainer(llama, lambda: arguments(max_steps=2), train_dataset=Stream, callbacks=[ears]).main)
    assert len(ears.logs) == 2


def test_a_loss_function_must_divide_by_the_number_of_items() -> None:
    """One that does trains as the model's own; one that returns a mean would train at another rate, and is refused."""

    def divided(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits, shifted = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return nn.functional.cross_entropy(logits, shifted, reduction="sum") / num_items_in_batch

    def mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())

    own = [line["loss"] for line in heard(compute_loss_func=divided).logs]
    assert own == pytest.approx([line["loss"] for line in heard().logs], rel=1e-5)
    with pytest.raises(UsageError, match=r"must return the sum .* divided by num_items_in_batch"):
        heard(compute_loss_func=mean)


def test_losses_of_samples_add_up_to_that_of_the_micro_batch() -> None:
    """So that an evaluation weighs tokens as training does."""
    model, rows = llama(), [Rows()[number] for number in range(4)]
    labels = torch.tensor([row["labels"] for row in rows])
    output = model(input_ids=torch.tensor([row["input_ids"] for row in rows]))
    loss = TokenLoss(model, None)
    (total, count), (sums, counts) = loss(output, labels), loss.samples(output, labels)
    assert sums.sum().item() == pytest.approx(total.item(), rel=1e-6)
    assert counts.tolist() == [11, 11, 10, 9]
    assert counts.sum() == count


def test_columns_that_the_model_does_not_take_are_left_out() -> None:
    """Whatever makes the micro-batch; a sample without any that it takes is refused."""
    model = llama()
    given, target = KnownColumns(model, None)([Rows()[0], Rows()[1]])
    assert given.keys() == {"input_ids"}
    assert target.shape == (2, 12)
    assert KnownColumns(model, len)([Rows()[0]]) == 1
    with pytest.raises(UsageError, match=r"no column of the sample is taken by LlamaForCausalLM\.forward: it has text"):
        KnownColumns(model, None)([{"text": "a"}])


def test_arguments_are_made_without_the_ranks_and_devices_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate would form a process group of its own, and asks for MASTER_ADDR; all is as before afterwards."""
    job = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "PMI_SIZE": "2"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        arguments()
    args = arguments_of(lambda: arguments(use_cpu=False))
    assert (args.device.type, args.n_gpu, args.world_size) == ("cpu", 0, 1)
    assert {name: os.environ[name] for name in job} == job
    assert "ACCELERATE_USE_CPU" not in os.environ
    assert not torch.distributed.is_initialized()


def test_arguments_of_another_kind_are_refused() -> None:
    """With what they are."""
    with pytest.raises(UsageError, match="must return TrainingArguments, not dict"):
        arguments_of(dict)


def test_a_callback_that_ends_the_epoch_is_refused() -> None:
    """No sample is left out."""

    class Ends(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_epoch_stop = True
            return control

    with pytest.raises(UsageError, match="should_epoch_stop"):
        heard(callbacks=[Ends])


def test_a_package_that_is_not_installed_is_named() -> None:
    """With what to install."""
    with pytest.raises(ConfigurationError, match=r"pip install 'elastic3d\[nothing\]'"):
        packages.need("no_such_package.part", install="elastic3d[nothing]", why="this")


def test_the_vocabulary_is_that_of_the_model() -> None:
    """The rows fit the model."""
    assert llama().config.vocab_size == VOCABULARY
