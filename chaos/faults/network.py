"""Faults of connections between ranks."""

from __future__ import annotations

from dataclasses import dataclass

from chaos.faults.code import NAMED, STUCK
from chaos.faults.fault import Place
from chaos.faults.script import InScript, about


@dataclass(frozen=True, slots=True, kw_only=True)
class Blackhole(InScript):
    """Nothing arrives any more on the connections of a rank, in one direction only."""

    WORD = "blackhole"
    ABOUT = about(
        Place.NETWORK,
        "a filter on its sockets that drops what arrives",
        f"{NAMED}; of more than two in a group nothing says whose connection it is",
        STUCK,
        "rank.stuck",
        5.0,
        spreads=True,
    )


KINDS = (Blackhole,)
