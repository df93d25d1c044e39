"""The run as a user's `main` sees it, and how its steps are made.

    def main(run):
        model = run.shard(lambda: GPT(config), blocks="blocks")
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        batches = run.batches(dataset, global_batch=512, micro_batch=2, seed=17)
        run.restore(model=model, optimizer=optimizer, batches=batches)
        for batch in batches.until(step=20_000):
            loss = run.backward(model, batch, loss_fn)
            run.step(optimizer, loss=loss, clip=1.0)

A `Run` lives as long as one generation, and talks to the world outside its process group only through a `Port`. When
another rank is lost, or this one has to leave, the port ends the process: `main` never notices.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn, overload

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from elastic3d.clock import SYSTEM, Clock
from elastic3d.data import Adaptive, Batch, Batches, Growing, Share, TokenBudget
from elastic3d.data.batches import Dataset
from elastic3d.data.collating import Collate
from elastic3d.data.ledger import Ledger, add, resumed, stopped
from elastic3d.data.sizes import check_whole
from elastic3d.devices.contract import deterministic
from elastic3d.errors import UsageError
from elastic3d.health.phases import Phase
from elastic3d.health.record import fingerprint
from elastic3d.islands import Islands
from elastic3d.islands.parts import IslandParts
from elastic3d.parallel.all_reduce import all_reduce
from elastic3d.parallel.assembly import Assembly, measure
from elastic3d.parallel.averaging import let_copy
from elastic3d.parallel.digest import state_digest
from elastic3d.parallel.initial import WHOLE_BELOW, nbytes, outline, skeleton
from elastic3d.parallel.mesh import Mesh
from elastic3d.parallel.numerics import local_step
from elastic3d.parallel.numerics.carried import check_carried
from elastic3d.parallel.numerics.choices import Numerics
from elastic3d.parallel.numerics.objective import UserLoss, objective
from elastic3d.parallel.numerics.precision import Precision, over_masters
from elastic3d.parallel.numerics.scale import LossScale
from elastic3d.parallel.numerics.update import scale_gradients, update
from elastic3d.parallel.outside import Outside
from elastic3d.parallel.reduction.units import reshard
from elastic3d.parallel.refusals import look_at_optimizer, look_at_parameters, look_at_schedule
from elastic3d.parallel.shard_request import ShardRequest
from elastic3d.parallel.state import tiles_of
from elastic3d.parallel.tensor.taking import Tensor, take
from elastic3d.parallel.vote import Outcome
from elastic3d.planner.passing import passed_on
from elastic3d.planner.schedules import stages_of_rank
from elastic3d.port import LocalState, Port, StateRestored, StepRecord
from elastic3d.pretrained.adapters import configurations
from elastic3d.pretrained.weights import KeptWeights, Weights
from elastic3d.provenance import compared
from elastic3d.provenance.model import record_of
from elastic3d.provenance.record import ScriptOrigin
from elastic3d.quantities import some_seconds
from elastic3d.snapshots.interval import Interval
from elastic3d.training import identity, loading, parts, restoring, state_facts
from elastic3d.training.batch_control import BatchControl
from elastic3d.training.checkpoint_timer import NOTHING_UNSAVED, CheckpointTimer, Unsaved
from elastic3d.training.collecting import FewerCollections
from elastic3d.training.evaluated import EvaluatedState
from elastic3d.training.evaluating import Metric, evaluate
from elastic3d.training.extras import Extras
from elastic3d.training.going_back import GoingBack
from elastic3d.training.island_run import IslandRun
from elastic3d.training.loss import Loss
from elastic3d.training.parts import Parts
from elastic3d.training.peers import Peers
from elastic3d.training.run_health import RunHealth
from elastic3d.training.scalars import Scalars
from elastic3d.training.state_facts import AskedState
from elastic3d.training.state_loading import StateLoader
from elastic3d.training.step_record import StepTimer, unmeasured
from elastic3d.training.step_vote import vote
from elastic3d.training.unclipped import UnclippedGradient
from elastic3d.values import Layout


class Run:
    """One generation of a training run, as its trainer on one rank sees it."""

    def __init__(
        self,
        port: Port,
        *,
        tiers: restoring.Tiers | None = None,
        origin: ScriptOrigin | None = None,
        evaluated: EvaluatedState | None = None,
        islands: Islands | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        self._evaluated = evaluated
        self._port, self._clock, self._progress = port, clock, port.progress
        self._tiers = tiers or restoring.Nowhere()
        self._origin, self._islands = origin, islands
        self._island: IslandRun | None = None
        self._provenance = ""
        self._assignment = port.assignment
        self._layout = port.assignment.layout or Layout(pp=1, dp=1)
        self._mesh: Mesh | None = None
        self._plan: ShardRequest | None = None
        self._model: nn.Module | None = None
        self._assembly: Assembly | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._schedule: Any = None
        self._batches: Batches | None = None
        self._control = BatchControl()
        self._ledger: Ledger = ()
        self._scale = LossScale.of(Precision.FP32)
        self._last_loss, self._changed = math.nan, ""
        self._scalars = Scalars()
        self._passed = self._restored = False
        self._unclipped = UnclippedGradient()
        self._extras = Extras(None)
        self._ending: Outcome | None = None
        self._last_record: StepRecord | None = None
        self._step_timer = StepTimer(port.assignment, clock)
        self._timer = CheckpointTimer(port.assignment, clock)
        self._interval = Interval(port.assignment.snapshot_every)
        self._stored_step = 0
        self._asked: AskedState | None = None
        self._weights: Weights | None = None
        self._begun_with: KeptWeights | None = None
        self._adapters: dict[str, Any] = {}
        self._outside: Outside | None = None
        self._peers = Peers(port, clock, lambda: self.steps)
        self._health = RunHealth(port, clock)
        torch.set_num_threads(self._assignment.threads)
        deterministic()
        self._parts = Parts(clock)
        self._collections = FewerCollections()

    @property
    def steps(self) -> int:
        """Number of steps made so far in the run, skipped ones included."""
        if self._evaluated is not None:
            return self._evaluated.step
        return self._batches.step if self._batches else 0

    @property
    def rank(self) -> int:
        """This trainer's number within the generation."""
        return self._assignment.rank

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, of which there is one in each generation: for what one rank does, such as printing.

        Not for what all ranks do together: `run.all_reduce`, `run.digest` and passes of the model.
        """
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes, and its micro-batches are: for tensors of the script's own."""
        return self._port.device.torch_device

    @property
    def world(self) -> int:
        """Number of ranks of the generation."""
        return self._assignment.world

    @property
    def layout(self) -> Layout:
        """Sizes of the mesh axes in this generation."""
        return self._layout

    @property
    def generation(self) -> int:
        """Number of this generation."""
        return self._assignment.generation

    @property
    def measuring(self) -> bool:
        """Whether this trainer only measures the model, which is on meta then, and ends at `restore`."""
        return self._assignment.measuring

    @property
    def ledger(self) -> Ledger:
        """Account of the samples consumed up to now."""
        return self._ledger

    def shard(
        self,
        build: Callable[[], nn.Module],
        *,
        blocks: str | None = None,
        tensor: Tensor = None,
        seed: int = 0,
        reduction: str = "ordered",
        compress: str | None = None,
        leaf: int = 1,
        precision: str = "fp32",
        recompute: str = "none",
        experts: str | None = None,
        chunks: int = 1,
        whole_below: int = WHOLE_BELOW,
        weights: str | os.PathLike[str] | None = None,
        weights_accept: str | Iterable[str] = (),
    ) -> nn.Module:
        """Build the model and return this rank's part of it.

        Args:
            build: Returns the model; called in each process, under keyed random numbers.
            blocks: Dotted path of the ModuleList or ModuleDict of repeated layers, in the order in which they run, of
                which pipeline stages and ZeRO shards are made. None, the default, for no pipeline stages.
            tensor: Patterns of module names and how tensor parallelism cuts them (see
                `elastic3d.parallel.tensor.styles`); "auto" for the plan of a Hugging Face model. None, the default,
                for tp 1.
            seed: Of initial weights and dropout; 0 by default.
            reduction: "ordered", the default, gives the same bits for every layout; "fast" leaves the order of sums to
                the backend.
            compress: With "fast": "bf16" or "fp16" sends gradients in 16 bits, "powersgd" factors of low rank between
                replicas. None, the default, for neither.
            leaf: With "ordered": so many micro-batches in a row are added up by the rank that runs them before their
                sum is sent, so that fewer bytes are. 1, the default, for each by itself. It divides the number of
                micro-batches of a step and stays the same for the whole run: each has bits of its own.
            precision: "fp32", the default, trains the model as it is built; "bf16" and "fp16" compute in that dtype
                over fp32 parameters and optimizer state, to which a model in 16 bits is widened; fp16 scales its
                losses.
            recompute: What each block computes again in the backward pass: "none", the default, "full" for all of it,
                "selective" for all but products with weights and fused attention. Bits stay the same.
            experts: Path of layers of experts, such as "blocks.*.mlp.experts", that are spread over the data-parallel
                ranks, without the promise of equal bits. None, the default, for none.
            chunks: Number of parts into which sequences, dim 1 of inputs and targets, are cut for long ones: the ranks
                of the mesh axis cp share them, and every cp that divides it gives the same bits. It stays the same for
                the whole run. 1, the default, for uncut ones.
            whole_below: Bytes of parameters from which on the model is no longer built whole in each process; such a
                model cannot be loaded by `build`. 8 GiB by default.
            weights: What the run begins with at step 0: a folder of Hugging Face's, a file of safetensors or
                `torch.save`, a DCP folder, or `URL@checkpoint` for a store of elastic3d. Each rank reads its own part,
                and narrower dtypes are widened; `build` makes the model from its configuration alone. A run that goes
                on has a state of its own, and does not read them again. None, the default, for what the seed gives.
            weights_accept: Patterns of names, such as ("lm_head.*",), that may be missing there or have another shape,
                and get the values that the seed gives them; or that the model lacks, and are left out. All others
                are refused by name. Adapters of peft may always be missing.

        Raises:
            ModelError: The model cannot be trained; the message says why.
            UsageError: A value makes no sense, or the run already has a model.
        """
        if self._plan is not None:
            raise UsageError("run.shard was called twice; a run has one model")
        check_whole("run.shard", seed=seed)
        numerics = Numerics.of(precision=precision, recompute=recompute)
        build = over_masters(build, numerics.precision)
        if weights is not None:
            store = self._assignment.store
            self._weights = Weights(weights, weights_accept, key=store.key if store is not None else "")
        elif weights_accept:
            raise UsageError("run.shard: weights_accept= says what weights may lack: give weights=, too")
        self._plan = ShardRequest(
            build=build,
            blocks=blocks,
            seed=seed,
            reduction=reduction,
            compress=compress,
            leaf=leaf,
            whole_below=whole_below,
            tensor=tensor,
            numerics=numerics,
            experts=experts,
            chunks=chunks,
            weights=self._weights,
        )
        self._scale = LossScale.of(self._plan.numerics.precision)
        if self.measuring:
            self._model = outline(build)
            if nbytes(self._model) > whole_below:
                skeleton(build, seed)  # only for what it refuses, before any rank joins
            take(self._model, tensor, 1)
            if self._weights is not None and not self._expects_state():
                self._weights.foresee(self._model)
            return self._model
        self._parts.end(parts.SCRIPT)
        self._peers.open_device(self._assignment)
        if self._assignment.sheets:
            self._progress.measure_by(self._port.device.stopwatch(), unmeasured)
        self._parts.end(parts.TURN)
        with self._peers.followed():
            self._mesh = self._peers.join(
                self._assignment, self._layout, passes=self._plan.reduction == "ordered" and passed_on(self._layout)
            )
            self._parts.end(parts.GROUPS)
            self._assembly = Assembly(
                self._plan,
                self._mesh,
                expects_state=self._expects_state(),
                proven=self._assignment.proven,
                recompute=self._assignment.recompute,
            )
        self._model = self._assembly.model
        self._adapters = configurations(self._model)
        if self.world > 1 or isinstance(self._model, FSDPModule):
            let_copy(self._model, self._assembly.deferred)
        self._outside = Outside(self._model, self._layout, self._peers.ranks)
        if self._assembly.deferred is not None:
            self._assembly.deferred.watch()
        self._parts.end(parts.BUILDING)
        return self._model

    def batches(
        self,
        dataset: Dataset | Iterable[Any],
        *,
        global_batch: int | Growing | Adaptive,
        micro_batch: int | TokenBudget,
        seed: int = 0,
        workers: int = 0,
        exclude: Iterable[tuple[int, int]] = (),
        collate: Collate | None = None,
        one_shape: bool = False,
    ) -> Batches:
        """Return the run's batches over a data set of pairs (input, target), or of dictionaries with `labels`.

        A dictionary's entry `labels` is the target, and all its others are the input; lists of numbers in it become
        tensors.

        dataset: map-style, which is shuffled anew for each epoch by `seed`; or iterable, a stream that is the same each
        time it is started, and is read in its own order, over and over, by every rank. A stream's iterator may have
        `skip(n)`, which passes over n samples and returns how many there were; the data set may have `state_dict` and
        `load_state_dict`, of values that JSON can hold, and `set_epoch`. Make one with such a state in `main`: after
        another run of the process it has what that one left, and gives other samples.
        global_batch, micro_batch: in samples; the second divides the first and stays the same for the whole run. The
        first may be a function of the step, such as `Growing((0, 256), (1000, 512))`, or follow the gradient's noise:
        `Adaptive(256, 4096)`. The second may be as many as fit a budget of tokens, `TokenBudget(8192)`, where samples
        are of several lengths: micro-batches are then of several sizes, and steps of several numbers of them. workers:
        processes that load ahead, 0 for a thread. exclude: pairs (first, stop) of positions that are left out of
        training, whole micro-batches: nothing else takes their place, so that all others keep theirs. collate: makes
        the list of the samples of one micro-batch into a pair (input, target), or a dictionary with `labels`, such as
        by padding them to the longest.
        one_shape: what it makes is of one shape for all micro-batches; inner pipeline stages load no inputs then.

        What samples, or `collate`, draw from the global random numbers of torch, numpy and Python is keyed by position.
        Without workers such samples are made between the steps, and a thread of the script's own that draws from
        Python's or numpy's at the same moment changes them, and with them the run's bits: workers have no such thread.
        """
        if self._plan is None:
            raise UsageError("call run.shard before run.batches")
        if self._batches is not None:
            raise UsageError(
                "run.batches was called twice; a run has one data set that it trains on. Pass the one to validate on "
                "to run.evaluate as it is, and mix several to train on by elastic3d.Mixture"
            )
        share = Share(leaf=self._plan.leaf)
        if self._mesh is not None:
            place, layout = self._mesh.place, self._layout
            mine = stages_of_rank(layout, place.pp)
            inputs, targets = 0 in mine, layout.stages - 1 in mine
            share = replace(share, dp=layout.dp, index=place.dp, shares=layout.shares, inputs=inputs, targets=targets)
        self._batches = Batches(
            dataset,
            global_batch=global_batch,
            micro_batch=micro_batch,
            seed=seed,
            exclude=exclude,
            share=share,
            workers=workers,
            collate=collate,
            one_shape=one_shape,
            device=self._port.device.torch_device,
            progress=self._progress,
        )
        self._control = BatchControl(self._batches, self._plan.leaf)
        if self._assembly is not None:
            randomness = self._assembly.randomness
            self._batches.model_draws = lambda: randomness.drawn_from_globals
        return self._batches

    def restore(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        batches: Batches | None = None,
        schedule: Any = None,
        extra: Mapping[str, Any] | None = None,
        accept: str | Iterable[str] = (),
    ) -> None:
        """Load the newest state there is; at the run's start, leave everything as it was built.

        extra: what else belongs to the state, by name, such as `{"ema": ema, "sampler": sampler}`: objects with
        `state_dict()` and `load_state_dict(state)`, of numbers, texts, lists, dictionaries and tensors. Tensors that
        are distributed as the model's are, as those of `AveragedModel(model)`, are cut anew for each layout; all else
        is the same on every rank, or refused by name. What the script does with them after `run.step` still belongs to
        that step: its snapshot is taken, and the process leaves, when the next batch is asked for. One that the
        state does not have begins as it is, and that is reported.

        accept: changes of the script since the state was saved, which are refused unless they are named here, and
        written into the ledger. "data": the data set is another one from here on, such as one that has grown; one
        of another length begins an epoch here. "schedule": one was added, dropped or replaced; it begins anew here, and
        learning rates are the script's. "config": the `config=` of `elastic3d.run` has other values. "extra": one was
        dropped, or is of another class and begins as it is. "stop": where `run.stop` had ended the run of a checkpoint,
        it goes on. "weights": `run.shard` names other weights than the run began with, which are not read.
        What is named and has not changed means nothing.

        Blocks until the generation may begin. While measuring, it reports the model's profile and does not return.

        In the function of `elastic3d.run(evaluate=)` it takes the model alone, and gives it the weights of the
        checkpoint that is evaluated.
        """
        if self._evaluated is not None:
            if model is not self._model:
                raise UsageError("run.restore needs the model of run.shard")
            with self._peers.followed():
                self._evaluated.load(self._made())
            self._restored = True
            return
        if optimizer is None or batches is None:
            raise UsageError("run.restore needs optimizer= and batches=, except in elastic3d.run(evaluate=...)")
        if self._plan is None or model is not self._model or batches is not self._batches:
            raise UsageError("run.restore needs the model of run.shard and the batches of run.batches")
        accepted = identity.accepted(accept)
        look_at_parameters(model, optimizer)
        look_at_optimizer(optimizer, ordered=self._plan.reduction == "ordered")
        if schedule is not None:
            look_at_schedule(schedule)
        self._control.check(optimizer)
        with self._peers.followed():
            check_carried(optimizer)
        kept = (model, optimizer, batches, schedule, self)
        if self.measuring:
            Extras(extra, kept=kept, parameters=model.parameters())
            profile, proven = measure(self._plan, model, batches)
            script, planned = identity.script_digest(), identity.schedule_digest(optimizer, schedule)
            profile = replace(profile, script=script, code=compared.digest_of(model), schedule=planned)
            self._port.measured(replace(profile, audit=self._assignment.audit), proven)
        assembly = self._made()
        self._parts.end(parts.SCRIPT)
        assembly.stop_watching()
        self._optimizer, self._schedule = optimizer, schedule
        self._restored = True
        if self._islands is not None:
            self._island = self._as_island(self._islands, batches)
            extra = self._island.kept_with(extra)
        self._extras = Extras(extra, kept=kept, parameters=model.parameters())
        self._asked = identity.asked(optimizer, schedule, batches.order, self._plan.leaf, self._plan.chunks)
        if self._assignment.seed_digest:
            identity.check_planned(assembly.profile_digest(batches), self._assignment)
        with self._peers.followed():
            assembly.prepare(batches)
            self._health.begin(assembly, batches)
            # Only rank 0's counts, and it is at hand before the keeper says go.
            provenance = None
            if self._origin and self.rank == 0:
                provenance = self._origin.provenance(self._plan.seed, record_of(model))
            self._parts.end(parts.PREPARING)
            go = self._peers.go or self._port.await_go()
            self._parts.end(parts.AWAITING)
        self._progress.phase(Phase.RESTORE)
        loader = StateLoader(
            assignment=self._assignment,
            tiers=self._tiers,
            assembly=assembly,
            optimizer=optimizer,
            schedule=schedule,
            batches=batches,
            asked=self._asked,
            extras=self._extras,
            accept=accepted,
            provenance=provenance,
            weights=self._weights,
            config=self._origin.version if self._origin is not None else None,
            peers=self._peers.followed,
        )
        loaded = loader.load(go, self._scale)
        decision, self._ledger, self._scale = loaded.decision, loaded.ledger, loaded.scale
        self._provenance, self._begun_with = loaded.provenance, loaded.weights
        anew = False
        if self._island is not None:
            self._ledger, anew = self._island.begin(self._ledger)
            self._scale = LossScale.of(self._plan.numerics.precision) if anew else self._scale
        halted, resuming = self._halted(batches, resume="stop" in accepted and decision.source == restoring.STORE)
        # What a generation before this one was to write with its first step comes first.
        said = [loaded.changed, *loaded.accepted, *resuming, self._control.resume(loaded.noise)]
        self._last_loss, self._changed = loaded.loss, "; ".join(filter(None, dict.fromkeys(said)))
        assembly.experts.settle(optimizer)
        with self._peers.followed():
            going_back = GoingBack(
                assignment=self._assignment,
                tiers=self._tiers,
                assembly=assembly,
                batches=batches,
                go=go,
                progress=self._progress,
            )
            self._health.resume(loaded.health, assembly, optimizer, batches, going_back)
        self._parts.end(parts.LOADING)
        self._port.restored(
            StateRestored(
                source=decision.source,
                step=batches.step if anew else decision.step,
                generation=decision.generation,
                detail="; ".join(
                    filter(None, [decision.detail, *loaded.accepted, *resuming, *loaded.changes, *halted])
                ),
                damaged=decision.damaged,
                parts=self._parts.ended(),
                audits=self._health.coverage,
                loss="" if math.isnan(loaded.loss) else loaded.loss.hex(),
            )
        )
        batches.stepped = self._end_step
        in_memory = decision.source == restoring.MEMORY
        self._timer.begin(batches.step, loaded.unsaved if in_memory else NOTHING_UNSAVED)
        self._interval.taken(batches.step)
        if decision.source == restoring.STORE:
            self._stored_step = batches.step
        if anew or decision.source != restoring.NONE:
            self._snapshot(checkpoint=False, wait=anew)
        self._collections.end()
        self._step_timer.begin()

    def backward(self, model: nn.Module, batch: Batch, loss_fn: UserLoss) -> Loss:
        """Run this rank's micro-batches of a step forward and back.

        `loss_fn(output, target)` returns the mean loss of a micro-batch; or, where micro-batches differ in their number
        of tokens, a pair (sum over its tokens, their number, of an integer type): the step's gradient is then the mean
        over all tokens of the global batch. The output is in the compute dtype: compute losses from `output.float()`.

        The loss that is returned is a number once `run.step` has taken it. Until then `loss.item()` is that of the step
        before, NaN in the first one, the same on every rank, and warns (`elastic3d.training.loss`).
        """
        assembly = self._made()
        if self._evaluated is not None:
            raise UsageError("run.backward: this run evaluates a checkpoint and trains nothing")
        if model is not self._model:
            raise UsageError("run.backward needs the model that run.shard returned")
        if not self._restored:
            raise UsageError("call run.restore before run.backward")
        assert self._outside is not None
        self._end_step()
        self._passed = True
        self._health.passes_begin()
        objected = objective(loss_fn, self._scale.scale)
        assembly.measure(self._control.measures(batch.step))
        self._progress.phase(Phase.FORWARD)
        self._progress.begin_step(fingerprint(len(batch.micro_batches), batch.count))
        with self._peers.followed(), self._outside.inside(), self._health.convicting():
            made = self._health.run(assembly, batch, objected)
        passed = objected if self._health.looks_at_micro_batches else None
        loss = Loss(made, batch, passed=passed, before=self._last_loss)
        assert self._optimizer is not None
        self._unclipped.hold(self._optimizer)
        self._progress.in_script()
        return loss

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        schedule: Any = None,
        *,
        loss: Loss,
        clip: float | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        """Make the step whose gradients `backward` has left: vote, clip, update and account.

        clip: largest norm of the whole gradient, above 0; None, the default, for any. skip_nonfinite: make no update if
        the loss or the gradient is not finite, as `Health(numerics="step")` does for every step; without either such a
        step is made, as in a plain script, except in fp16, which always skips. A skipped step still counts: its batch
        is consumed and accounted for, while neither the optimizer nor the schedule moves, and `loss.skipped` is true.
        The process ends after this step if all ranks have been asked to leave.

        UsageError for another `clip`, for another optimizer or schedule than those of `run.restore`, for a loss that is
        not that of this step, and where the script has zeroed the gradients since `run.backward`. The optimizer itself
        refuses a step that the script makes between the two.
        """
        if skip_nonfinite:
            self._health.check_skip()
        if clip is not None and not clip > 0:
            raise UsageError(
                f"run.step: clip= is the largest norm of the gradient, and above 0; it is {clip!r}, by which nothing "
                "would be learned. For a gradient that is not clipped leave it out, or give None"
            )
        assembly, batches = self._made(), self._ready(optimizer, schedule)
        if not isinstance(loss, Loss) or loss.batch.step != batches.step:
            raise UsageError(
                "run.step needs the loss that run.backward returned for the batch of this step: by it the step's "
                "samples are accounted for"
            )
        self._unclipped.release(optimizer)
        assert self._outside is not None
        done = batches.step + 1
        due = self._timer.due(done)
        skip = skip_nonfinite or not self._scale.fixed or self._health.skips
        measured = self._control.measures(batches.step)
        self._progress.phase(Phase.REDUCE)
        with self._peers.followed():

            def ballot() -> Outcome:
                return vote(
                    assembly,
                    loss,
                    self._port,
                    checks=self._health.checks,
                    scalars=self._scalars,
                    step=done,
                    checkpoint=due,
                    unsaved=self._timer.seconds,
                    clip=clip is not None,
                    skip=skip,
                    extras=self._extras.number,
                    measured=measured,
                )

            with self._health.convicting():
                outcome = ballot()
            self._extras.look(outcome.extras, batches.step)
            with self._outside.inside(), self._health.convicting():
                outcome, why = self._health.settle(outcome, loss, ballot, scale=self._scale, step=batches.step)
                spiked = self._health.look_at_loss(outcome.loss, batches.step)
            agreed = self._scalars.settle(outcome, assembly.mesh)
        if agreed.stop:
            batches.stop(done)
        change, scale = update(outcome, clip=clip, scale=self._scale.scale, skip=skip), self._scale.scale
        self._scale = self._scale.after(finite=change.finite)
        scale_gradients(assembly.model, outcome, change)
        self._progress.phase(Phase.COPY)
        self._port.finish_copy()
        with self._control.rates(optimizer), self._peers.followed(), self._health.convicting():
            self._health.before_update(outcome, batches.step, skipped=change.skipped)
            self._progress.phase(Phase.UPDATE)
            if not change.skipped:
                local_step.step(optimizer)
            self._health.updated(outcome, change)
            if outcome.leave or done == batches.goal:
                self._health.last_step(done)
        if not change.skipped and schedule is not None:
            schedule.step()
        # Also of what the optimizer does not update: else they add up, as long as the layout and restarts keep them.
        assembly.model.zero_grad(set_to_none=True)
        self._passed = False
        loss.settle(outcome.loss, skipped=change.skipped)
        self._last_loss = outcome.loss
        self._health.skipped(change)
        self._ledger = add(
            self._ledger,
            generation=self.generation,
            step=batches.step,
            layout=str(self.layout),
            samples=outcome.samples,
            sample_sum=outcome.sample_sum,
            excluded=outcome.excluded,
            excluded_sum=outcome.excluded_sum,
            changed=self._changed,
            stopped=agreed.stop,
        )
        batches.step = done
        self._health.made()
        resized = self._control.settle(outcome, change, scale)
        self._changed = resized.why
        self._interval.voted(outcome.snapshot_needs)
        unsaved = Unsaved(due=outcome.due, seconds=outcome.unsaved)
        self._timer.voted(done, begins=outcome.checkpoint, unsaved=unsaved)
        self._ending = outcome
        if not self._extras:
            self._keep_step()
        record = self._step_timer.record(
            batches,
            outcome,
            loss,
            norm=change.norm,
            interval=self._interval,
            why=why,
            spiked=spiked,
            health=self._health.facts,
            ledger=self._ledger,
            clean=self._health.clean,
            data=self._progress.spent(Phase.DATA),
            copy=self._progress.spent(Phase.COPY),
            agreed=agreed,
            resized=resized,
        )
        if self._extras and done == batches.goal:
            # It is kept when the loop asks for more, as the snapshot is; `log` may add to it until then.
            self._last_record = record
        else:
            self._port.committed(record)
        if outcome.leave and not self._extras:
            self._leave()
        self._progress.step(done)
        self._progress.in_script()

    def _keep_step(self) -> bool:
        """Take the snapshot of the step that was made last, if one is due; return whether to leave after it."""
        outcome, self._ending = self._ending, None
        if outcome is None:
            return False
        self._progress.phase(Phase.LEAVE if outcome.leave else Phase.COPY)
        if outcome.leave or outcome.checkpoint or self._interval.due(self.steps):
            self._snapshot(checkpoint=outcome.checkpoint, wait=outcome.leave)
        return outcome.leave

    def _end_step(self) -> None:
        """Keep the step that was made last, with what the script has done since to objects of its own."""
        if self._last_record is not None:
            record, self._last_record = self._last_record, None
            with self._peers.followed():
                logged = self._scalars.last(self._made().mesh)
            self._port.committed(
                replace(record, logged={**record.logged, **logged}) if self._assignment.slot == 0 else record
            )
        if self._ending is not None:
            self._merge(self._ending)
            if self._keep_step():
                self._leave()
            self._progress.in_script()

    def _merge(self, outcome: Outcome) -> None:
        """Take the outer step that follows the step that was made last; the next generation does if this one leaves."""
        if self._island is not None and not outcome.leave:
            self._ledger, anew = self._island.made(self.steps, self._ledger)
            if anew:
                assert self._plan is not None
                self._scale = LossScale.of(self._plan.numerics.precision)
                self._snapshot(checkpoint=False, wait=True)

    def _as_island(self, islands: Islands, batches: Batches) -> IslandRun:
        """Return this run as one of several islands, before its state is loaded."""
        assembly = self._made()
        assert self._plan is not None
        assert self._optimizer is not None

        @contextmanager
        def around(longest: float) -> Iterator[None]:
            with self._peers.followed(), self.pause("islands", longest):
                yield

        parts = IslandParts(
            assignment=self._assignment,
            mesh=assembly.mesh,
            plan=self._plan,
            model=assembly.model,
            specs=assembly.specs,
            optimizer=self._optimizer,
            schedule=self._schedule,
            batches=batches,
        )
        return IslandRun(islands, parts, clock=self._clock, around=around)

    def _leave(self) -> NoReturn:
        self._peers.stop_looking()
        self._port.leave(self.steps)

    def log(self, *, reduce: str = "mean", **scalars: float | torch.Tensor) -> None:
        """Have numbers of the script's own written for the step that is being made, beside its loss.

            for batch in batches.until(step=20_000):
                loss = run.backward(model, batch, loss_fn)
                run.log(lr=schedule.get_last_lr()[0], temperature=temperature)
                run.log(reduce="sum", **{"data/skipped": dataset.skipped})
                run.step(optimizer, schedule, loss=loss)

        They are in the trackers (`trackers=`), in the event `step.committed` and in the line that says how training
        goes. To be called between a batch and its `run.step`, on any ranks, as often as is right: the last value of a
        name counts. It waits for nobody: the vote of the step carries the numbers, and one gather a name that is new,
        the first time it is logged. A step that is made again after a death is logged again by the script, and is one
        point. With `extra=`, numbers of the run's last step, such as an evaluation of what it leaves, may come after
        `run.step` as well, until the loop asks for the next batch.

        Args:
            reduce: How the numbers of the ranks that log a name become one: "mean", the default, "sum", "max", or
                "last", that of the highest rank. It stays the same for a name.
            scalars: Floats, ints, or tensors of no dimensions, which are read together with the step's loss. Names have
                letters, digits, `_`, `.`, `-` and `/`; there may be 32 of them.

        A number that is the same on every rank, such as a learning rate, comes out as it is, to the last bit, in every
        layout; so does the "max" of what does not depend on the layout. A "sum" or "mean" is rounded once, in whatever
        order the ranks are; but each rank's number is of the samples that it has seen, so that it is another one in
        another layout, and a "sum" counts the ranks of one pipeline, or of one tensor group, each.

        UsageError for what is no number, a name that is ours, such as "loss", and a call between two steps.
        """
        if self._last_record is None and (self._batches is None or not self._batches.under_way):
            raise UsageError(
                "run.log was called when no step was being made: call it between the batch and its run.step, so that a "
                "job that goes on after a death logs the same. What is known only after run.step belongs before the "
                "next one"
            )
        self._scalars.give(scalars, reduce)

    def stop(self, why: str) -> None:
        """End the run after the step that is being made, or the next one, as if `until` had named it.

            if loss_of_validation > 1.05 * best:
                run.stop("the validation loss rises")

        Any rank may ask; the step vote informs the others. All ranks leave the loop, the last state becomes a
        checkpoint, and the job ends well. The event `run.stopped` and the ledger keep the reason, and a job that is
        started again from there makes no more steps, unless it asks to: `run.restore(..., accept="stop")`. A step that
        is made again after a death is the last one if the script says so again.

        why: in words, for people who ask why it ended.
        """
        self._scalars.end(why)

    @overload
    def all_reduce(self, value: float, op: str = "sum") -> float: ...
    @overload
    def all_reduce(self, value: torch.Tensor, op: str = "sum") -> torch.Tensor: ...
    def all_reduce(self, value: float | torch.Tensor, op: str = "sum") -> float | torch.Tensor:
        """Return one number, or one tensor, for those of all ranks: their "sum", "mean", "max" or "min".

            correct = run.all_reduce(correct)

        For a metric, after `run.restore`: a collective of its own, which all ranks must make alike. Every rank gets the
        same bits. They do not depend on the number of ranks where the values do not: for whole numbers, and for "max"
        and "min". Numbers are added as if their exact sum were rounded once; tensors in fp64, in the order of ranks, so
        that a sum of floats that was spread over other ranks may differ in its last bits. Ranks of one pipeline, and of
        one tensor group, count each.

        UsageError for tensors of more than 1 MiB, and where ranks give values of different kinds.
        """
        assembly = self._made()
        assert self._outside is not None
        with self._peers.followed():
            self._outside.meet("run.all_reduce()")
            return all_reduce(assembly.mesh, value, op)

    def evaluate(
        self,
        model: nn.Module,
        dataset: Dataset,
        metric: Metric,
        *,
        micro_batch: int | None = None,
        collate: Collate | None = None,
        longest: float | str = "30m",
    ) -> float:
        """Return the mean of a metric over a data set, by forward passes alone; the same number on every rank.

            for batch in batches.until(step=20_000):
                if run.steps % 500 == 0:
                    run.log(**{"eval/accuracy": run.evaluate(model, held_out, right)})
                run.step(optimizer, loss=run.backward(model, batch, loss_fn))

        where `right = lambda output, target: (output.argmax(-1) == target).float()` for a model of classes. The data
        set is spread over the replicas, and the result has the same bits in every layout in which training has:
        micro-batches are the same, and the values of their samples are added without rounding. A collective: every rank
        calls it, before `run.backward` of a step or after `run.step`. If a rank is lost meanwhile, the script begins
        again from the last state, and comes to it again where it asks `run.steps`, as above.

        The model is in evaluation mode meanwhile, and nothing is kept for gradients.

        Args:
            model: That of `run.shard`.
            dataset: Map-style, of samples as `run.batches` takes them.
            metric: Takes the output for a micro-batch and its target; returns a tensor with one number for each sample,
                or a pair of such tensors (values, weights), such as the loss of each sample's tokens and their number:
                the result is the sum of the values divided by that of the weights. It is called for all micro-batches
                once more where random numbers are drawn, and were not in an earlier evaluation.
            micro_batch: Samples that are passed forward together; None, the default, for those of training, where that
                is a number. It is part of what fixes the bits; with pipeline stages it is that of training, unless
                micro-batches may be of several shapes there. The last one is filled up with its last sample, which
                counts once.
            collate: As `run.batches` takes it. The samples of eight micro-batches are made at a time.
            longest: Seconds, or as "30m", that it may take: silence up to then is no sign of a rank that stands still.
        """
        assembly, batches = self._made(), self._batches
        if model is not self._model or not self._restored:
            raise UsageError("run.evaluate needs the model that run.shard returned, and comes after run.restore")
        if self._passed:
            raise UsageError(
                "run.evaluate was called between run.backward and run.step: call it before the one or after the other"
            )
        of_training = batches.order.micro_batch if batches is not None and batches.order.budget is None else None
        if self._evaluated is not None:
            of_training = self._evaluated.micro_batch
        size = of_training if micro_batch is None else micro_batch
        if not isinstance(size, int) or size < 1:
            say = "; where training has a TokenBudget, say how many" if micro_batch is None else ""
            raise UsageError(f"run.evaluate: micro_batch is a number of samples, 1 or more; it is {size!r}{say}")
        assert self._outside is not None
        with self._peers.followed(), self.pause("evaluate", longest), self._outside.inside():
            self._outside.meet("run.evaluate()")
            return evaluate(assembly, dataset, metric, micro_batch=size, step=self.steps, collate=collate)

    @contextmanager
    def pause(self, why: str, longest: float | str) -> Iterator[None]:
        """Do something that takes long without a step, such as an evaluation: `with run.pause("eval", "10m"): ...`.

        Silence up to `longest` (seconds, or as "10m") is then no sign of a rank that stands still, on the ranks that
        say so. why: in a word, for people who look.
        """
        most = some_seconds(longest, "run.pause: longest")
        before = self._progress.pause(str(why), most)
        try:
            yield
        finally:
            self._progress.phase(before)

    def save(self) -> None:
        """Have a checkpoint made of the current step: of what the next `run.step` leaves, whatever `every` says.

        Any rank may ask; the step vote informs the others. If the store is still busy with the previous checkpoint,
        this one is made at the first step at which it is ready, in the next generation if this one ends before that.
        UsageError in a job without a store; a script run by
        hand keeps nothing anyway.
        """
        if self._assignment.store is None and self._assignment.store_prefix:
            raise UsageError("run.save: this job has no store to save to; give one as elastic3d.run(main, store=...)")
        self._timer.ask()

    def digest(self) -> str:
        """Return one digest of parameters, buffers, optimizer state and extra tensors, equal for equal bits.

        It is so in any layout. A collective: all ranks must call it after the same step.
        """
        assembly = self._made()
        assert self._outside is not None
        with self._peers.followed():
            self._outside.meet("run.digest()")
            return state_digest(assembly.mesh, assembly.model, self._optimizer, self._extras.held())

    def finish(self) -> int:
        """Take a snapshot of the state that `main` left, for the store; return its step, -1 if none has to go there.

        Called when `main` has returned: the end of a run is always a checkpoint, whether one was due or not.
        """
        self._end_step()
        if self._island is not None:
            self._island.end("its script has returned")
        self._peers.stop_looking()
        self._progress.phase(Phase.LEAVE)
        self._peers.say_returned()
        if self._assignment.store is None or self.steps <= self._stored_step:
            return -1
        reshard(self._made().model)
        self._snapshot(checkpoint=False, wait=True)
        return self.steps

    def lost(self, error: BaseException) -> NoReturn:
        """End the process because a collective failed; UnmatchedCollective if `main` has returned on a rank."""
        self._peers.lost(error)

    def _halted(self, batches: Batches, *, resume: bool) -> tuple[list[str], list[str]]:
        """Make no more steps if the script had ended the run with the state's last one, or have it resume.

        Returns in words that it is over, or that it goes on.
        """
        why = stopped(self._ledger, batches.step)
        if not why:
            return [], []
        said = f"the script had stopped the run after step {batches.step}: {why}"
        if resume:
            self._ledger = resumed(self._ledger)
            return [], [f"{said}; it goes on"]
        batches.stop(batches.step)
        return [f'{said}. To go on from its checkpoint: run.restore(..., accept="stop")'], []

    def _expects_state(self) -> bool:
        """Return whether there is most likely a state to go on from; what `restore` finds decides."""
        if self._assignment.expects_state or self._assignment.restore not in restoring.MOVING:
            return True
        go = self._peers.go
        return go is not None and max(go.reached - 1, go.newest) >= 0

    def _made(self) -> Assembly:
        if self._assembly is None:
            raise UsageError("call run.shard first; and while measuring, nothing after run.restore is reached")
        return self._assembly

    def _ready_batches(self) -> Batches:
        assert self._batches is not None
        return self._batches

    def _ready(self, optimizer: torch.optim.Optimizer, schedule: Any) -> Batches:
        if self._batches is None or self._optimizer is None:
            raise UsageError("call run.restore before run.step")
        if optimizer is not self._optimizer or schedule is not self._schedule:
            raise UsageError("run.step needs the optimizer and the schedule that run.restore was given")
        return self._batches

    def _snapshot(self, *, checkpoint: bool, wait: bool) -> None:
        tp = self._made().mesh.place.tp
        tiles, (extra, kept) = tiles_of(self._made().model, self._optimizer, tp=tp), self._extras.taken(tp=tp)
        assert self._optimizer is not None
        restore = self._assignment.restore
        facts = loading.facts(
            self._ready_batches(),
            self._optimizer,
            self._schedule,
            self._ledger,
            self._scale,
            asked=self._asked,
            begun_from="" if restore in restoring.MOVING else restore,
            health=self._health.facts,
            loss=self._last_loss,
            extra=kept,
            weights=self._begun_with,
            adapters=self._adapters,
            provenance=self._provenance,
            noise=self._control.noise,
            changed=self._changed,
            unsaved=self._timer.unsaved,
        )
        state = LocalState(step=self.steps, tiles=[*tiles, *extra], facts=state_facts.to_plain(facts))
        self._interval.taken(self.steps)
        self._port.snapshot(state, checkpoint=checkpoint, wait=wait)
