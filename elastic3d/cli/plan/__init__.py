"""`elastic3d plan`: which layout would be best for a model on some nodes, why, and why others would not work."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from elastic3d.admission.host_memory import HostMemory, host_memory
from elastic3d.calibration.record import load
from elastic3d.calibration.script_question import ask
from elastic3d.cli.plan import shown
from elastic3d.cli.plan.documents import PlanDocument
from elastic3d.cli.plan.question import Question, check_size, described, number_for, requested, slow_nodes
from elastic3d.errors import UsageError
from elastic3d.planner import rank
from elastic3d.planner.costs import Costs
from elastic3d.planner.devices import DataSheet, Number, device_named
from elastic3d.planner.results import Ranking
from elastic3d.quantities import some_seconds
from elastic3d.values import ModelProfile

SCHEMA = 1


def plan(
    script: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SCRIPT [-- ARGUMENTS...]]", help="A script that calls elastic3d.run."),
    ] = None,
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="A well-known model instead of a script.")] = "",
    nodes: Annotated[int, typer.Option("--nodes", help="How many nodes.")] = 1,
    slots: Annotated[int, typer.Option("--slots", help="Devices of each node.")] = 8,
    device: Annotated[str, typer.Option("--device", help="h200, h100, a100-80g, ..., from its data sheet.")] = "h200",
    calibration: Annotated[
        str, typer.Option("--calibration", metavar="FILE", help="Measured by elastic3d calibrate, instead of --device.")
    ] = "",
    layout: Annotated[
        str, typer.Option("--layout", metavar="pp=2,...", help="The fixed part; all else is free.", show_default=False)
    ] = "",
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", help="Samples of a step.", show_default="512, or the script's")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option("--micro-batch", help="Samples that are forwarded together.", show_default="1")
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", help="Tokens of a sample.", show_default="the model's")
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(
            "--chunks", help="Parts into which a sample's tokens are cut, shared by cp ranks.", show_default="1"
        ),
    ] = None,
    precision: Annotated[
        str, typer.Option("--precision", help="bf16, fp16, tf32, fp32 or fp8.", show_default="the device's")
    ] = "",
    recompute: Annotated[
        str, typer.Option("--recompute", help="none, selective or full.", show_default="none, or the script's")
    ] = "",
    optimizer: Annotated[str, typer.Option("--optimizer", help="adamw, adam, sgd-momentum or sgd.")] = "adamw",
    slow: Annotated[
        list[str] | None,
        typer.Option(
            "--slow", metavar="NODE=TIMES", help="This node's work takes so many times as long; nodes count from 0."
        ),
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="How many layouts to show.")] = 10,
    rejected: Annotated[bool, typer.Option("--rejected", help="Say of every layout why it does not work.")] = False,
    host: Annotated[
        bool, typer.Option("--host-memory", help="Say how much host memory a node or its pod needs with the best.")
    ] = False,
    timeout: Annotated[str, typer.Option("--timeout", help="How long a script may take to show its model.")] = "2m",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show which layout of pp x dp x cp x tp is best for a model on some nodes, why, and why others would not work.

    The model is a named one, or that of a script, which is run up to `run.restore` with its parameters on meta: no
    cluster, no device and no memory for them is needed. Times are predictions from data sheets, or from a calibration.
    Exit codes: 0; 1 if no layout works; 2 for a wrong call.

    Examples:

        elastic3d plan --model llama-7b --nodes 7 --slots 8 --device h200

        elastic3d plan --model llama-70b --nodes 128 --device h100 --global-batch 2048 --recompute full

        elastic3d plan train.py --nodes 4 --slots 8 --layout pp=2 --json

        elastic3d plan train.py --calibration profile.json --nodes 4 -- --width 1024

        elastic3d plan --model llama-7b --nodes 8 --layout pp=4 --slow 2=1.3

        elastic3d plan --model llama-7b --nodes 4 --context 131072 --chunks 16 --global-batch 32 --recompute full

        elastic3d plan --model llama-7b --nodes 2 --host-memory    # the fewest that may train: each holds most
    """
    check_size(nodes, slots)
    request = requested(layout)
    if bool(script) == bool(model):
        raise UsageError("plan needs a script or --model, and not both, as in elastic3d plan --model llama-7b")
    if model.endswith(".py"):
        script, model = [model], ""
    sheet = device_named(device)
    if script:
        if micro_batch is not None or context is not None or chunks is not None:
            raise UsageError("--micro-batch, --context and --chunks are up to the script: give them to it, after --")
        profile = ask(script[0], script[1:], limit=some_seconds(timeout, "--timeout")).profile
        profile = _changed(profile, global_batch, recompute)
        number = _number_of(profile, sheet, precision)
    else:
        number = number_for(sheet, precision)
        profile = described(
            model,
            number=number,
            global_batch=global_batch,
            micro_batch=micro_batch,
            context=context,
            chunks=1 if chunks is None else chunks,
            recompute=recompute or "none",
            optimizer=optimizer,
        )
    costs, called = _costs(calibration, sheet, number)
    question = Question(
        model=script[0] if script else model,
        profile=profile,
        nodes=nodes,
        slots=slots,
        device=called,
        costs=costs,
        request=request,
        slow=slow_nodes(slow or (), nodes),
    )
    ranked = rank(nodes, slots, profile, request, costs, speeds=question.speeds)
    needed = _host_memory(question, ranked) if host and ranked.ranking else None
    if as_json:
        print(json.dumps(document(question, ranked, needed), indent=2))
    else:
        console = Console(highlight=False)
        console.print(shown.picture(question, ranked, top=top, every_reason=rejected, width=console.width))
        if needed is not None:
            console.print(shown.host_memory(needed))
    if not ranked.ranking:
        raise typer.Exit(1)


def document(question: Question, ranked: Ranking, needed: HostMemory | None = None) -> dict[str, Any]:
    """Return what `--json` prints. Times are seconds of a step, memory bytes of the fullest device."""
    plan_document = PlanDocument(
        model=question.model,
        nodes=question.nodes,
        slots=question.slots,
        device=question.device,
        parameters=question.profile.parameters,
        global_batch=question.profile.micro_batches * question.profile.micro_batch,
        ranking=ranked.ranking,
        rejected=ranked.rejected,
        slow={str(node): times for node, times in sorted(question.slow.items())},
        host_memory=needed,
    )
    return {"schema": SCHEMA, **plan_document.data()}


def _host_memory(question: Question, ranked: Ranking) -> HostMemory:
    """Return what a node needs with the best layout; slots that share cores have no memory but the host's."""
    best = ranked.ranking[0]
    return host_memory(
        best.layout,
        question.profile,
        nodes=best.nodes,
        slots=question.slots,
        device_bytes=best.memory_bytes if question.costs.cores else None,
    )


def _changed(profile: ModelProfile, global_batch: int | None, recompute: str) -> ModelProfile:
    if global_batch is not None:
        if global_batch < 1 or global_batch % profile.micro_batch:
            raise UsageError(
                f"--global-batch {global_batch} is not a whole number of the script's micro-batches of "
                f"{profile.micro_batch} samples"
            )
        if global_batch % (profile.micro_batch * profile.leaf):
            raise UsageError(
                f"--global-batch {global_batch} is not a whole number of the script's leaves of {profile.leaf} "
                f"micro-batches of {profile.micro_batch} samples"
            )
        profile = dataclasses.replace(profile, micro_batches=global_batch // profile.micro_batch, counts=())
    if recompute:
        if recompute not in profile.block.kept:
            there = ", ".join(profile.block.kept) or "none"
            raise UsageError(f"--recompute {recompute!r}: known for this script's model: {there}")
        profile = dataclasses.replace(profile, recompute=recompute)
    return profile


def _number_of(profile: ModelProfile, sheet: DataSheet, precision: str) -> Number:
    """Return what a script computes in: as given here, else by its bytes, as near as the device has it."""
    if precision or profile.compute_bytes < 4:
        return number_for(sheet, precision)
    return Number.FP32


def _costs(calibration: str, sheet: DataSheet, number: Number) -> tuple[Costs, str]:
    if calibration:
        measured = load(Path(calibration))
        return measured.costs(), f"{measured.name}, measured on {measured.host}"
    return sheet.costs(number), sheet.name
