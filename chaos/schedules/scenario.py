"""Faults as the demo's command line has them: `--kill 1@20`, `--drain leader@10`, `--stop stage0@g2`, `--join @40`.

NODE is a name such as `node1`, a bare number, `leader` (who leads the membership then) or `stage0` (who holds rank 0
then). Instead of a step, `gN` means "once generation N is sealed", which is in the middle of its recovery.
"""

from __future__ import annotations

import re

from chaos.faults.fault import node_name
from chaos.faults.moment import When
from chaos.faults.orders import Drain, Join
from chaos.faults.process import Kill, Stop
from elastic3d.errors import UsageError


def parse_kill(text: str) -> Kill:
    """Return the kill that NODE@STEP asks for; UsageError where it is not one."""
    node, when = _place("--kill", text)
    return Kill(node=node, when=when)


def parse_drain(text: str) -> Drain:
    """Return the drain that NODE@STEP asks for; UsageError where it is not one."""
    node, when = _place("--drain", text)
    return Drain(node=node, when=when)


def parse_stop(text: str) -> Stop:
    """Return the stop that NODE@STEP asks for; UsageError where it is not one."""
    node, when = _place("--stop", text)
    return Stop(node=node, when=when)


def parse_join(text: str) -> Join:
    """Return the join that @STEP asks for; UsageError where it is not one."""
    match = re.fullmatch(r"@(g?)(\d+)", text.strip())
    if match is None:
        raise UsageError(f"--join {text!r}: expected @STEP, such as @40")
    return Join(when=_when(f"--join {text!r}", match[1], match[2]))


def _place(option: str, text: str) -> tuple[str, When]:
    match = re.fullmatch(r"(?:(?:node)?(\d+)|(leader|stage0))@(g?)(\d+)", text.strip())
    if match is None:
        raise UsageError(
            f"{option} {text!r}: expected NODE@STEP, such as 1@20, leader@20 or stage0@20; "
            "NODE is a number from 0, `leader` or `stage0`"
        )
    number, word, kind, count = match.groups()
    return word or node_name(int(number)), _when(f"{option} {text!r}", kind, count)


def _when(what: str, kind: str, number: str) -> When:
    if int(number) < 1:
        raise UsageError(f"{what}: counting starts at 1")
    return When(generation=int(number)) if kind else When(step=int(number))
