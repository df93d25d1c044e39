"""`elastic3d calibrate`: measure this machine, so that plans rest on its real speed and not on data sheets."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from elastic3d import environment
from elastic3d.calibration.comparison import TOLERANCE, check_same, compare, parse_tolerance
from elastic3d.calibration.record import Calibration, MeasuredLink, load, save
from elastic3d.cli.calibration_compared import compared
from elastic3d.cli.durations import spell
from elastic3d.cli.plan.question import choose
from elastic3d.cli.plan.shown import spell_bytes, spell_time
from elastic3d.clock import SYSTEM
from elastic3d.errors import UsageError
from elastic3d.planner.devices import Number
from elastic3d.quantities import some_seconds
from elastic3d.values import to_json

if TYPE_CHECKING:
    from elastic3d.calibration.measuring import Wish

BUSY = 0.3
"""Share of the cores that others may use before measurements are doubted."""


def calibrate(
    script: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SCRIPT [-- ARGUMENTS...]]", help="Also time a block of this script's model."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to save it.")] = Path(
        "profile.json"
    ),
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.", show_default="cuda if there is one")] = "",
    precision: Annotated[
        str, typer.Option("--precision", help="Number format of the products.", show_default="bf16, on CPUs fp32")
    ] = "",
    seconds: Annotated[str, typer.Option("--for", metavar="TIME", help="About how long it may take.")] = "1m",
    slots: Annotated[
        int | None, typer.Option("--slots", min=1, help="Slots of a node.", show_default="devices, or cores")
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=1, help="CPU threads of a trainer, as in run().")] = 1,
    listen: Annotated[
        int | None,
        typer.Option("--listen", metavar="PORT", min=1, max=65535, help="Wait here for the other node's --peer."),
    ] = None,
    peer: Annotated[
        str, typer.Option("--peer", metavar="HOST:PORT", help="Another node that listens: measure the link to it.")
    ] = "",
    timeout: Annotated[str, typer.Option("--timeout", help="How long a script may take to show its model.")] = "2m",
    show: Annotated[bool, typer.Option("--show", help="Only show what is in the file.")] = False,
    older: Annotated[
        Path | None,
        typer.Option("--compare", metavar="FILE", help="Say what got slower or faster than in this older one."),
    ] = None,
    tolerance: Annotated[
        str, typer.Option("--tolerance", metavar="SHARE", help="By how much a speed may differ and count as the same.")
    ] = TOLERANCE,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document: the calibration, or with --compare the comparison.")
    ] = False,
) -> None:
    """Measure products, memory, links and a model's own block on this machine, and save it for plans and runs.

    Takes about a minute; the machine should be idle. To measure the link between nodes, give --listen on one node and
    --peer on the other, or have torchrun start this command on each of several nodes. Ctrl-C leaves nothing behind.
    With --compare, an older calibration of the same kind of device is set beside the one that is made, or beside the
    one in -o with --show. Exit codes: 0; 1 if something could not be measured, or if anything is slower than in the
    older one by more than --tolerance; 2 for a wrong call.

    Examples:

        elastic3d calibrate -o profile.json

        elastic3d calibrate train.py -o profile.json -- --width 1024

        elastic3d calibrate --listen 29400 -o profile.json

        elastic3d calibrate --peer node-1:29400 -o profile.json

        elastic3d calibrate --show -o profile.json

        elastic3d calibrate --compare profile.json -o today.json

        elastic3d calibrate --show -o today.json --compare profile.json --tolerance 5% --json

        elastic3d plan train.py --calibration profile.json --nodes 4
    """
    if older is None and tolerance != TOLERANCE:
        raise UsageError("--tolerance is of a comparison: give --compare FILE too")
    # The older one is read first: whatever is wrong with it is reported before anything is measured.
    share, old = parse_tolerance(tolerance), load(older) if older is not None else None
    if show:
        shown = load(output)
        if old is None:
            _tell(shown, as_json)
        else:
            _compare(old, shown, share, as_json)
        return
    if older is not None and output.resolve() == older.resolve():
        raise UsageError(
            f"--output {str(output)!r} would overwrite the calibration to compare with: give the new one another name "
            "with -o"
        )
    if not output.absolute().parent.is_dir():
        raise UsageError(f"--output {str(output)!r}: its folder is not there; make it, or give another file")
    limit, patience = some_seconds(seconds, "--for"), some_seconds(timeout, "--timeout")
    # Importing torch takes seconds: whatever is wrong with the call is reported before that.
    number = choose(Number, "--precision", precision) if precision else None
    if number is Number.FP8:
        raise UsageError("--precision fp8: products in fp8 cannot be measured; choose bf16, fp16, tf32 or fp32")
    if device not in ("", "cpu", "cuda"):
        raise UsageError(f"--device {device!r}: choose cpu or cuda")
    if listen is not None and peer:
        raise UsageError("--listen and --peer: one node listens, the other is given its address")
    host, port = _address(peer) if peer else ("", 0)
    import torch

    from elastic3d.calibration import machine
    from elastic3d.calibration.measuring import Wish, measure

    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    places = torch.cuda.device_count() if kind == "cuda" else len(os.sched_getaffinity(0))
    asked = number or (Number.BF16 if kind == "cuda" else Number.FP32)
    if old is not None:
        there = kind != "cuda" or torch.cuda.is_available()  # where there is none, measuring says so
        name = machine.name(torch.device(kind)) if there else ""
        check_same(old, device=kind, name=name, number=asked, threads=threads)
    wish = Wish(
        device=kind,
        number=asked,
        seconds=limit,
        slots=slots or max(1, places),
        threads=threads,
        script=tuple(script or ()),
        limit=patience,
    )
    if kind == "cpu" and (warning := busy(os.getloadavg()[0], len(os.sched_getaffinity(0)))):
        print(warning, file=sys.stderr)
    start = SYSTEM.monotonic()
    try:
        with Console(stderr=True).status("measuring") as status:

            def say(what: str) -> None:
                status.update(f"measuring {what}: {spell(SYSTEM.monotonic() - start)} of about {spell(limit)}")

            say("the link between nodes")
            between = _between(wish, listen, host, port)
            if _companion():
                return
            calibration = measure(
                wish, made=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), between=between, say=say
            )
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    try:
        save(calibration, output)
    except OSError as error:
        raise UsageError(f"--output {str(output)!r} cannot be written: {error.strerror or error}") from error
    if old is None:
        _tell(calibration, as_json)
    if not as_json:
        print(f"saved to {output}; use it with elastic3d plan --calibration {output}")
    if old is not None:
        _compare(old, calibration, share, as_json)


def _compare(old: Calibration, calibration: Calibration, tolerance: float, as_json: bool) -> None:
    """Print how a calibration differs from an older one; end with 1 if anything got slower."""
    comparison = compare(old, calibration, tolerance)
    if as_json:
        print(json.dumps({"schema": 1, **to_json(comparison)}, indent=2))
    else:
        console = Console(highlight=False)
        console.print(compared(comparison, console.width))
    if comparison.slower:
        raise typer.Exit(1)


def busy(load: float, cores: int) -> str:
    """Return a warning if `load`, the mean number of running processes in the last minute, leaves too few cores."""
    if load <= cores * BUSY:
        return ""
    return (
        f"elastic3d: this machine is busy (load {load:.1f} on {cores} cores), so everything will measure too slow; "
        "measure again when it is idle"
    )


def _companion() -> bool:
    """Whether torchrun started this process beside the one that measures."""
    return int(environment.RANK.read()) != 0


def _between(wish: Wish, listen: int | None, host: str, port: int) -> MeasuredLink | None:
    """Measure the link to another node: by hand, or between the first slots of torchrun's first two nodes."""
    import torch

    from elastic3d.calibration import link

    rank, world = int(environment.RANK.read()), int(environment.WORLD_SIZE.read())
    local = int(environment.LOCAL_WORLD_SIZE.read())
    index = int(environment.LOCAL_RANK.read())
    if listen is None and not host:
        if world <= local or rank not in (0, local):
            return None
        host, port = environment.MASTER_ADDR.need(), int(environment.MASTER_PORT.need())
        master, mine = False, int(rank > 0)
    else:
        master, mine = listen is not None, int(listen is None)
        host, port = host or "0.0.0.0", port or listen or 0
    device = torch.device(wish.device, index) if wish.device == "cuda" else torch.device("cpu")
    return link.meet(host, port, mine, device, master=master, seconds=0.2 * wish.seconds, sizes=wish.messages)


def _address(peer: str) -> tuple[str, int]:
    host, colon, port = peer.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"--peer {peer!r}: give HOST:PORT, as in node-1:29400, of a node that has --listen PORT")
    return host.strip("[]"), int(port)


def _tell(calibration: Calibration, as_json: bool) -> None:
    if as_json:
        print(json.dumps(to_json(calibration), indent=2))
        return
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_row("device", f"{calibration.name} ({calibration.device}), {spell_bytes(calibration.memory)} a slot")
    table.add_row("products", f"{calibration.flops / 1e12:.3g} TFLOP/s in {calibration.number}")
    table.add_row("memory", f"{calibration.memory_bandwidth / 1e9:.3g} GB/s")
    for what, one in (("inside a node", calibration.inside), ("between nodes", calibration.between)):
        text = "not measured"
        if one is not None:
            text = f"{spell_time(one.latency)} + {one.bandwidth / 1e9:.3g} GB/s each way ({one.backend})"
            text += f", line within {one.error:.0%}"
        table.add_row(what, text)
    if calibration.block is not None:
        block = calibration.block
        text = f"forward {spell_time(block.forward)}, backward {spell_time(block.backward)}"
        if block.flops:
            text += f", {3e-12 * block.flops / (block.forward + block.backward):.3g} TFLOP/s"
        table.add_row("a block", f"{text}, keeps {spell_bytes(block.kept_bytes)}")
    Console(highlight=False).print(table)
