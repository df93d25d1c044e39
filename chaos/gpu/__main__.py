"""`python -m chaos.gpu`: run stages within a budget, print one JSON line per figure, and judge the gates."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos.gpu import catalogue, gates, needs

DEVICES = ("cuda", "cpu", "emulated")
SIZES = ("full", "small")
EXAMPLES = """\
examples:
  python -m chaos.gpu --list
  python -m chaos.gpu --stages P0,P6,P1,P2,P3 --budget 540 --out figures
  python -m chaos.gpu --stages P7,P4,P5 --budget 590 --out more --etcd ./etcd
  python -m chaos.gpu --device cpu --size small --out figures      proves the stages' code where there is no GPU
  python -m chaos.gpu --judge figures/figures.jsonl more/figures.jsonl      the gates over several runs

--out gets figures.jsonl (the lines printed), stages.log (what the stages' processes said) and gates.txt.
Exit code: 0 if all stages ended by themselves and no gate failed, 1 if not, 2 if it could not begin.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line says; return the exit code."""
    options = parser().parse_args(arguments)
    if options.list:
        print(catalogue.table())
        return 0
    if options.judge:
        return _judged([line for file in options.judge for line in read(file)], None)
    missing = needs.missing_packages()
    if missing:
        print(f"chaos.gpu: {needs.advice(missing)}", file=sys.stderr)
        return 2
    seen = needs.probe()
    if seen.error or (options.device == "cuda" and not seen.cuda):
        why = seen.error or (
            f"torch {seen.torch} sees no CUDA device here. With one: look at the driver (nvidia-smi). Without one: "
            "--device cpu --size small, or --device emulated, runs the same stages"
        )
        print(f"chaos.gpu: {why}", file=sys.stderr)
        return 2
    return run(options, seen)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(
        prog="python -m chaos.gpu",
        description="Measure what elastic3d promises on one accelerator, in stages, each a process with a time limit.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--stages", type=_stages, default=catalogue.BY_VALUE, help=f"which, in order; {catalogue.BY_VALUE} by default"
    )
    made.add_argument("--budget", type=_seconds, default=540.0, help="seconds for all of them together; 540 by default")
    made.add_argument("--out", type=Path, default=Path("gpu-figures"), help="folder for what is found")
    made.add_argument("--device", choices=DEVICES, default="cuda", help="what to measure; cuda by default")
    made.add_argument("--size", choices=SIZES, default="full", help="small: seconds, for any machine")
    made.add_argument("--etcd", type=Path, default=None, help="etcd binary for P7; else as the tests find theirs")
    made.add_argument("--list", action="store_true", help="list the stages and end")
    made.add_argument("--judge", type=Path, nargs="+", metavar="FILE", help="judge the lines of earlier runs and end")
    return made


def _stages(text: str) -> tuple[catalogue.Stage, ...]:
    try:
        return catalogue.chosen(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: give seconds, 1 or more")
    return value


class _Output:
    """Lines go to standard output and into a file at once, so that a kill loses none."""

    def __init__(self, folder: Path) -> None:
        self.lines: list[dict[str, Any]] = []
        self._file = (folder / "figures.jsonl").open("a", buffering=1)

    def take(self, text: str) -> None:
        """Pass on one line of a stage; what is not JSON is kept as it is."""
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            line = {"garbled": text[:1000]}
        self.say(**line)

    def say(self, **line: Any) -> None:
        """Print one line and keep it."""
        self.lines.append(line)
        text = json.dumps(line)
        self._file.write(text + "\n")
        print(text, flush=True)


def command(stage: catalogue.Stage, options: argparse.Namespace, name: str, *, deadline: float) -> list[str]:
    """Return the command of a stage's process. name: of the device."""
    etcd = str(options.etcd.absolute()) if options.etcd else ""
    asked = [stage.name, options.device, options.size, f"{deadline:.1f}", name, etcd]
    return [sys.executable, "-m", "chaos.gpu.stage", *asked]


def run(options: argparse.Namespace, seen: needs.TorchFacts) -> int:
    """Run the stages one after the other, whatever becomes of each; return the exit code."""
    from chaos.gpu.running import run_stage

    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    output = _Output(options.out)
    name = seen.name if options.device == "cuda" else options.device
    output.say(run="begun", device=options.device, name=name, size=options.size, torch=seen.torch, at=time.time())
    well = True
    with tempfile.TemporaryDirectory(prefix="elastic3d-gpu-") as folder, (options.out / "stages.log").open("ab") as log:
        environment = needs.environment(Path(folder, "registered"))
        for stage in options.stages:
            limit = stage.limit(options.size, options.budget - (time.monotonic() - began))
            if not limit:
                output.say(stage=stage.name, ended="not begun: the budget is spent", seconds=0.0)
                well = False
                continue
            log.write(f"\n=== {stage.name} ===\n".encode())
            log.flush()
            ended = run_stage(
                command(stage, options, name, deadline=time.monotonic() + limit),
                limit=limit,
                mark=f"{os.getpid()}-{stage.name}-{time.monotonic_ns()}",
                environment={**environment, "TMPDIR": folder},
                take=output.take,
                log=log,
            )
            output.say(stage=stage.name, ended=ended.how, seconds=round(ended.seconds, 2), left=list(ended.left))
            well = well and ended.how == "ok" and not ended.left
    code = _judged(output.lines, options.out)
    return code if well else 1


def _judged(lines: Sequence[gates.Line], folder: Path | None) -> int:
    judged = gates.judge(lines)
    for gate in judged:
        said = {"gate": gate.name, "wanted": gate.wanted, "verdict": gate.verdict, "evidence": gate.evidence}
        print(json.dumps(said))
    text = gates.table(judged)
    print(text, file=sys.stderr)
    if folder is not None:
        (folder / "gates.txt").write_text(text + "\n")
    return 1 if any(gate.verdict is gates.Verdict.FAIL for gate in judged) else 0


def read(file: Path) -> list[dict[str, Any]]:
    """Return the lines of an earlier run; the end of one that was cut short is passed over."""
    lines = []
    for text in file.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return [line for line in lines if isinstance(line, dict)]


if __name__ == "__main__":
    sys.exit(main())
