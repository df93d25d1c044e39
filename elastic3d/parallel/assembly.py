"""Prepares a user's model for its place in the mesh, in two steps: when it is taken, and when its batches are known.

The first step builds the model, cuts it into stages and shards it. The second makes what depends on the batches: the
reduction, the passes and the vote. Whatever can be refused is refused here, by name.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

import torch
from blake3 import blake3
from torch import nn
from torch.distributed.fsdp import FSDPModule

from checkpointing.format.tiles import TensorSpec
from elastic3d.data import Batches
from elastic3d.errors import LayoutError, UsageError
from elastic3d.parallel import initial
from elastic3d.parallel.averaging import cut_copies
from elastic3d.parallel.chosen import of_chosen
from elastic3d.parallel.context import taking
from elastic3d.parallel.context.passes import ChunkedLoop
from elastic3d.parallel.context.proof import prove as prove_chunks
from elastic3d.parallel.deferred import Deferred, of_modules, of_nothing, of_whole
from elastic3d.parallel.experts import spread as experts
from elastic3d.parallel.leaf_squares import LeafPlaces, LeafSquares
from elastic3d.parallel.mesh import Mesh
from elastic3d.parallel.norms import Squares, places
from elastic3d.parallel.numerics.precision import check_masters
from elastic3d.parallel.numerics.recompute import Recompute, recompute
from elastic3d.parallel.numerics.ties import check_ties, parts_ends, tie_again, ties
from elastic3d.parallel.pipeline import stages
from elastic3d.parallel.pipeline.chain import check_runs
from elastic3d.parallel.pipeline.handed_on import hand_on, taken_over
from elastic3d.parallel.pipeline.passes import Loop, Passes
from elastic3d.parallel.pipeline.proofs import computed, passed_shapes, prove_for
from elastic3d.parallel.pipeline.shapes import Shape
from elastic3d.parallel.pipeline.staged import Pipeline
from elastic3d.parallel.profiles import with_costs
from elastic3d.parallel.randomness import Randomness, keyed_seed
from elastic3d.parallel.recorded import record
from elastic3d.parallel.reduction import choice
from elastic3d.parallel.reduction.joint import Joint
from elastic3d.parallel.reduction.ordered import Ordered
from elastic3d.parallel.reduction.protocol import Reduction
from elastic3d.parallel.reduction.single_replica import SingleReplica
from elastic3d.parallel.reduction.units import shard_unit
from elastic3d.parallel.reduction.whole_passes import check_whole_passes
from elastic3d.parallel.refusals import look_at_kernels, look_at_model
from elastic3d.parallel.scope import Scope
from elastic3d.parallel.shard_request import ShardRequest
from elastic3d.parallel.state import held_by_model, local
from elastic3d.parallel.tensor.cutting import boundary, cut_layers
from elastic3d.parallel.tensor.proof import prove as prove_parts
from elastic3d.parallel.tensor.taking import take
from elastic3d.parallel.vote import Paper
from elastic3d.parallel.witness import Witness, all_finite
from elastic3d.planner import schedules
from elastic3d.planner.legality import unshared
from elastic3d.shortfall import stronger
from elastic3d.values import ModelProfile, ProvenChain


class Assembly:
    """The part of a model that one rank computes, and how its steps are made.

    It is taken up block by block: each gets its values, goes to the device, is cut and sharded before the next one, so
    that a device never holds more than its shards, one whole block and what is in no block.

    expects_state: leave the weights without values, which a state is going to bring. `deferred` then makes them where
    it does not; None where they have values. proven: what another process of this node has proven of the model.
    recompute: what blocks compute again at least, whatever was asked for.
    """

    def __init__(
        self,
        plan: ShardRequest,
        mesh: Mesh,
        *,
        expects_state: bool = False,
        proven: ProvenChain | None = None,
        recompute: str = Recompute.NONE,
    ) -> None:
        self.plan, self.mesh = plan, mesh
        self.recompute = Recompute(stronger(plan.numerics.recompute, recompute))
        layout, place = mesh.layout, mesh.place
        outline = initial.outline(plan.build)
        self._chain = taken_over(proven, outline) if layout.pp > 1 else None
        self.scheme = take(outline, plan.tensor, layout.tp)
        self._large = initial.nbytes(outline) > plan.whole_below
        if plan.weights is not None:
            plan.weights.look_at(outline)
        model = self._begun(outline, expects_state)
        self.specs = tuple(held.spec for held in held_by_model(model))
        self.parameters = tuple((name, parameter.shape[0]) for name, parameter in _sized(model, plan))
        named = [] if plan.experts is None else experts.check(model, plan.experts, layout, plan.numerics.precision)
        stages.check_recompute(layout, self.recompute)
        self._attention = taking.attention(model, plan.chunks, mesh, self.recompute)
        self._tied = ties(model)
        self._comparable = stages.comparable(model, plan.blocks)
        self.parts = stages.cut(model, plan.blocks, layout, place.pp)
        self.experts = experts.Spread(model, named, mesh.dp, mesh.progress)
        self.randomness = Randomness(plan.seed, mesh.computes_on)
        self._sharded = mesh.shard or (mesh.alone() if plan.numerics.precision.dtype else None)
        self.model = model
        self._recorded = 0
        self.units = self._take_up()
        # What a script draws before its first pass does not depend on whether the weights were drawn.
        mesh.computes_on.seed(keyed_seed(plan.seed, "built"))
        self._paper: Paper | None = None
        self.leaf_squares: LeafSquares | None = None
        self.leaf_places: LeafPlaces | None = None
        self._work: float | None = None

    def _begun(self, outline: nn.Module, expects_state: bool) -> nn.Module:
        """Return the model as it is to be taken up: with values, or on meta to be filled or to wait for a state."""
        build, seed, weights = self.plan.build, self.plan.seed, self.plan.weights
        device, arrived = self.mesh.computes_on, self.mesh.progress.tick
        self._values = of_modules(build, seed, device) if self._large else of_whole(build, seed)
        self._read = None if weights is None else lambda: weights.fill(self.model, device, arrived)
        model = None
        if self._large:
            model = initial.skeleton(build, seed)
        elif expects_state or weights is not None:
            model = initial.blank(build, seed, outline)
        self.deferred: Deferred | None = None
        if weights is not None:
            values = of_chosen(build, seed, lambda: weights.match().fresh) if model is not None else of_nothing
            model = initial.whole(build, seed) if model is None else model
            self.deferred = Deferred(model, values, self._read)
        elif expects_state and model is not None:
            self.deferred = Deferred(model, self._values)
        return initial.whole(build, seed) if model is None else model

    def _take_up(self) -> list[list[FSDPModule]]:
        """Take up every block and then what is around them; return the units of each part."""
        blocks = frozenset(name for part in self.parts for name, _ in part.present)
        made: list[list[FSDPModule]] = []
        for part in self.parts:
            made.append([])
            for name, block in part.present:
                ignored = self._make_ready(Scope(model=self.model, block=name), block)
                if self._attention is not None:
                    self._attention.watch(name, block)
                recompute([(name, block)], self.recompute, self.randomness)
                made[-1] += self._unit(block, ignored)
        ignored = self._make_ready(Scope(model=self.model, blocks=blocks), self.model)
        for part, units in zip(self.parts, made, strict=True):
            units += self._unit(part.module, ignored)
            self.randomness.install(part.module, part.blocks)
            if self.mesh.layout.dp > 1:
                check_whole_passes(part.module, part.present)
        return made

    def _make_ready(self, scope: Scope, module: nn.Module) -> set[nn.Parameter]:
        """Give a part of the model its weights on the device, and cut it; return the parameters FSDP is to ignore."""
        plan, mesh = self.plan, self.mesh
        if self.deferred is not None:
            initial.allocate(module, mesh.computes_on)
        elif self._large:
            initial.fill(module, scope.block, plan.seed, mesh.computes_on, root=self.model)
        if tied := [pair for pair in self._tied if all(map(scope.holds, pair))]:
            tie_again(self.model, tied)
        for _, inner in scope.modules():
            mesh.computes_on.place(inner)
        ignored = self.experts.install(scope)
        if mesh.tp is not None and self.scheme is not None:
            cut_layers(scope, self.scheme, mesh.tp, self.randomness, alone=self._sharded is None)
        return ignored

    def _unit(self, module: nn.Module, ignored: set[nn.Parameter]) -> list[FSDPModule]:
        if self._sharded is None:
            return []
        policy = self.plan.numerics.precision.policy
        unit = shard_unit(module, self._sharded, zero=self.mesh.layout.zero, policy=policy, ignored=ignored)
        record(unit, self.mesh.progress, self._recorded)
        self._recorded += 1
        return [unit]

    def stop_watching(self) -> None:
        """Let the state come, or `initialise`. To be called once, before either."""
        if self.deferred is not None and not self.deferred.stop():
            self.deferred = None

    def initialise(self, *, again: bool = False) -> None:
        """Give the weights their initial values where they have none: there is no state.

        again: everywhere, and the state's buffers theirs: one was read over them from which nobody goes on.
        """
        if again:
            (self.deferred or Deferred(self.model, self._values, self._read)).make_again(self._values)
        elif self.deferred is not None:
            self.deferred.make()
        self.deferred = None

    def prepare(self, batches: Batches) -> None:
        """Make the reduction, the passes and the vote for batches of this size."""
        layout, leaf = self.mesh.layout, self.plan.leaf
        if batches.order.holes and (why := self.unexcluded()):
            raise UsageError(f"run.batches: exclude= leaves micro-batches out of their steps, but {why}")
        if batches.order.adaptive is not None:
            self._measure_leaves()
        multiple = batches.order.multiple
        for count in schedules.every_count(layout, batches.order.counts, multiple):
            unfit = unshared(layout, self.plan.reduction, self.plan.experts is not None, count // leaf)
            if layout.shares and unfit is not None:
                raise LayoutError(f"{layout}: shares {unfit}")
            blocks = max(1, len(self.parts[0].blocks))
            schedules.check(layout, blocks=blocks, micro_batches=count, leaf=leaf, multiple=multiple)
            self.experts.check_step(layout, count, leaf)
        reductions = [self._reduction(part, units) for part, units in zip(self.parts, self.units, strict=True)]
        self.reduction = Joint(reductions)
        self._watched = [
            (part.stage, reduction)
            for part, reduction in zip(self.parts, reductions, strict=True)
            if isinstance(reduction, Ordered | SingleReplica)
        ]
        self.passes: Passes
        if self._attention is not None:
            taking.check_batches(batches.example(), self.plan.chunks)
            group = self.mesh.cp.get_group() if self.mesh.cp is not None else None
            reduction = reductions[0]
            assert isinstance(reduction, Ordered | SingleReplica)
            self.passes = ChunkedLoop(
                self.model, reduction, self.randomness, self._attention, group, self.mesh.progress
            )
            return
        if layout.pp == 1:
            self.passes = Loop(self.model, reductions[0], self.randomness, self.mesh.progress)
            return
        assert self.plan.blocks is not None
        assert self.mesh.pp is not None
        example = batches.example()[0]
        chain = self._chain or prove_for(self.plan, batches)
        stages.cut_further(self.model, self.plan.blocks, chain.early, chain.late, self.parts)
        cut_copies(self.model)
        for part in self.parts:
            stages.dress(part, chain.activation, chain.early, chain.templates, self.mesh.device)
        if chain.frame.everywhere or batches.varies:
            batches.take(replace(batches.share, inputs=True))
        self.passes = pipeline = Pipeline(
            list(zip(self.parts, reductions, strict=True)),
            self.randomness,
            layout=layout,
            group=self.mesh.pp,
            device=self.mesh.device,
            example=example,
            frame=chain.frame,
            boundary=boundary(chain.activation, self.scheme, layout.tp),
            shapes=passed_shapes(chain, example, batches.varies, functools.partial(self._part, chain.activation.dtype)),
            progress=self.mesh.progress,
        )
        if self._comparable:
            pipeline.time_blocks()

    def _part(self, dtype: torch.dtype, shape: Shape) -> Shape:
        """Return the shape of what this rank passes on of an activation."""
        whole = torch.empty(shape, dtype=dtype, device="meta")
        return tuple(boundary(whole, self.scheme, self.mesh.layout.tp).shape)

    def prepare_to_evaluate(self) -> None:
        """Make the passes of a model that is not trained; LayoutError for pipeline stages, which need batches."""
        if self.mesh.layout.pp > 1:
            raise LayoutError(
                f"{self.mesh.layout}: without training there are no pipeline stages; give dp, which shards the model, "
                "or tp"
            )
        reduction = self._reduction(self.parts[0], self.units[0])
        self.passes = Loop(self.model, reduction, self.randomness, self.mesh.progress)

    def _measure_leaves(self) -> None:
        chunked = "with run.shard(..., chunks=) several ranks have parts of it" if self.plan.chunks > 1 else ""
        if why := self.unexcluded() or chunked:
            raise UsageError(
                f"run.batches: global_batch=Adaptive(...) measures the gradient of each micro-batch, but {why}"
            )
        self.leaf_places = LeafPlaces([name for name, _ in self.parameters], self.plan.blocks, self.mesh.layout.tp)
        self.leaf_squares = LeafSquares(self.model, self.leaf_places, self.mesh.place.tp)

    def measure(self, wanted: bool) -> None:
        """Have the squares of leaves measured in the passes that follow, or not."""
        if self.leaf_squares is not None:
            self.leaf_squares.clear()
            for _, reduction in self._watched:
                reduction.measure(self.leaf_squares if wanted else None)

    def unaudited(self) -> str:
        """Return why nobody can repeat what a rank computes and get the same bits, "" if another rank can."""
        if self.plan.reduction != "ordered":
            return f'reduction="{self.plan.reduction}" leaves no gradient of a micro-batch to compare'
        if self.plan.experts is not None:
            return "experts are spread over the ranks that would audit each other"
        if self.plan.chunks > 1:
            return "ranks that share sequences have only parts of what would be compared"
        return ""

    def watch(self, witness: Witness | None) -> None:
        """Have the passes that follow digested, or no longer."""
        self.passes.witness = witness
        for stage, reduction in self._watched:
            reduction.watch(witness, stage)

    @property
    def ordered(self) -> list[Ordered]:
        """The reductions of all stages, where several ranks take part in them."""
        return [reduction for _, reduction in self._watched if isinstance(reduction, Ordered)]

    def drop(self) -> None:
        """Forget what the passes of the step have left: they are made again."""
        if self.leaf_squares is not None:
            self.leaf_squares.clear()
        for _, reduction in self._watched:
            reduction.drop()

    def begin_again(self) -> None:
        """Forget that the step was voted on, too: its passes are made again, and then another vote."""
        self.drop()
        self.present()
        for parameter in self.model.parameters():
            parameter.grad = None

    def weights_finite(self) -> bool:
        """Return whether all of this rank's weights are finite."""
        return all_finite([local(parameter) for parameter in self.model.parameters()]) == 1

    def unexcluded(self) -> str:
        """Return why no micro-batch can be left out of a step, "" if one can be."""
        if self.plan.reduction != "ordered":
            return f'reduction="{self.plan.reduction}" has the backend add up what should be left out'
        if self.plan.experts is not None:
            return "experts are spread over the ranks, and their gradients are no pieces of one micro-batch each"
        return ""

    def paper(self, micro_batches: int, *, sheets: bool = False, scalars: int = 0) -> Paper:
        """Return the voting paper of a step of this many micro-batches. sheets: steps are measured.

        scalars: how many numbers of scripts it has places for.
        """
        if self._paper is None or (self._paper.micro_batches, self._paper.scalars) != (micro_batches, scalars):
            self._paper = Paper(
                world=self.mesh.layout.world,
                micro_batches=micro_batches,
                parameters=self._places(),
                sheets=sheets,
                scalars=scalars,
                leaves=self.leaf_places,
            )
        return self._paper

    def work(self) -> float:
        """Return how many parameters this rank's stages have, whoever shares them."""
        if self._work is None:
            self._work = float(sum(p.numel() for part in self.parts for p in part.module.parameters()))
        return self._work

    def present(self) -> frozenset[str]:
        """Return the names of the parameters that got a gradient on this rank in this step, and forget them."""
        return frozenset(self.reduction.present() | self.experts.present())

    @functools.cached_property
    def squares(self) -> Squares:
        """What this rank's part of the gradient's norm is made of."""
        return Squares(self.model, self.scheme.dims if self.scheme else {}, self.mesh.place.tp, self.mesh.computes_on)

    def _places(self) -> tuple[tuple[str, int], ...]:
        return places(self.parameters, self.scheme.dims if self.scheme else {}, self.mesh.layout.tp)

    def profile_digest(self, batches: Batches) -> str:
        """Return the digest that `measure` finds for the same model and batches."""
        return profile_digest(self.plan, self.specs, batches)

    def _reduction(self, part: stages.Stage, units: list[FSDPModule]) -> Reduction:
        plan = self.plan
        return choice.make(plan.reduction, plan.compress, plan.leaf, plan.chunks, part.module, units, self.mesh)


def measure(plan: ShardRequest, model: nn.Module, batches: Batches) -> tuple[ModelProfile, ProvenChain | None]:
    """Return the profile of an outline of the whole model, and what was proven of it for this node's trainers.

    Refuses by name whatever no layout could train.
    """
    proven, unstaged = None, ""
    blocks, tied = 1, False
    _sized(model, plan)
    layers = experts.find(model, plan.experts).values() if plan.experts is not None else ()
    scheme = take(model, plan.tensor, 1)
    example = batches.example()[0]
    if plan.chunks > 1:
        taking.check_model(model)
        taking.check_batches(batches.example(), plan.chunks)
        prove_chunks(plan.build, plan.blocks, example, plan.chunks, plan.seed)
    if scheme is not None:
        prove_parts(model, plan.blocks, example, scheme)
    if plan.blocks is not None:
        blocks = len(stages.find_blocks(model, plan.blocks))
        tied = parts_ends(ties(model), *stages.ends(model, plan.blocks))
        staged = not tied and plan.chunks == 1
        if staged:
            try:
                proven = hand_on(prove_for(plan, batches), model)
            except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
                # It trains without stages, also where it runs on its device alone.
                if not batches.varies:
                    raise
                tried = "" if isinstance(error, UsageError) else "a pass on the CPU ended with: "
                staged, unstaged = False, tried + str(error)
        if not staged and plan.reduction == "ordered":
            # What does not run on meta is refused where it trains.
            with suppress(RuntimeError, NotImplementedError):
                check_runs(*computed(plan, initial.outline(plan.build), example))
    profile = ModelProfile(
        blocks=blocks,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        micro_batches=batches.order.micro_batches,
        micro_batch=max(1, batches.order.batch_at(0) // batches.order.micro_batches_at(0)),
        digest=profile_digest(plan, [held.spec for held in held_by_model(model)], batches),
        tied=tied,
        unstaged=unstaged,
        compute_bytes=2 if plan.numerics.precision.dtype else 4,
        recompute=plan.numerics.recompute,
        reduction=plan.reduction,
        heads=scheme.divisor if scheme else 0,
        counts=tuple(batches.order.counts),
        multiple=batches.order.multiple,
        experts=math.gcd(*map(experts.number_of, layers)),
        compress=plan.compress or "",
        samples=batches.samples,
        leaf=plan.leaf,
        chunks=plan.chunks,
    )
    return with_costs(profile, model, plan.blocks, example, scheme), proven


def profile_digest(plan: ShardRequest, specs: Iterable[TensorSpec], batches: Batches) -> str:
    """Return a digest of names, shapes and dtypes, of the batches' sizes, of the data set and of the seeds."""
    lines = [f"{spec.key} {spec.shape} {spec.dtype}" for spec in specs]
    lines += [
        repr((batches.order, batches.fingerprint)),
        repr((plan.seed, plan.reduction, plan.blocks, plan.numerics, plan.compress, plan.experts)),
    ]
    lines += [repr(plan.tensor)] if plan.tensor is not None else []
    lines += [f"leaf {plan.leaf}"] if plan.leaf > 1 else []
    lines += [f"chunks {plan.chunks}"] if plan.chunks > 1 else []
    lines += ["weights"] if plan.weights is not None else []
    return blake3("\n".join(lines).encode()).hexdigest()


def _sized(model: nn.Module, plan: ShardRequest) -> list[tuple[str, nn.Parameter]]:
    units, path = [], plan.blocks
    if path is not None:
        units = [(f"{path}.{name}", block) for name, block in stages.find_blocks(model, path).named_children()]
    look_at_model(model, units)
    if plan.reduction == "ordered":
        look_at_kernels(model)
    check_masters(model, plan.numerics.precision)
    check_ties(ties(model), [name for name, _ in units])
    return list(model.named_parameters())
