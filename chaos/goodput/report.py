"""What a comparison says, as a table and as one JSON document."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from chaos.goodput.compare import Comparison
from chaos.goodput.costs import RecoveryCosts
from chaos.goodput.ledger import Account, Spent

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The question. price: of a node for an hour, None if it is not known. tokens: of a step."""

    trace: str
    seconds: float
    nodes: int
    model: str
    device: str
    slots: int
    samples: int
    tokens: int
    announced: float
    notice: float
    seed: int
    recovery: RecoveryCosts
    price: float | None = None


def document(asked: Asked, comparison: Comparison) -> dict[str, Any]:
    """Return what --json prints. Times are seconds, money is in the unit of the price."""
    question = {name: value for name, value in asdict(asked).items() if name != "recovery"}
    return {
        "schema": SCHEMA,
        **question,
        "costs": asdict(asked.recovery),
        "oracle": _one(asked, comparison, comparison.oracle),
        "policies": [_one(asked, comparison, account) for account in comparison.accounts],
    }


def _one(asked: Asked, comparison: Comparison, account: Account) -> dict[str, Any]:
    data: dict[str, Any] = {
        "policy": account.policy,
        "of_the_oracle": comparison.goodput(account),
        "steps": account.steps,
        "samples": account.steps * asked.samples,
        "tokens": account.steps * asked.tokens,
        "effective_training_time_ratio": account.effective_training_time,
        "node_seconds": {spent.value: seconds for spent, seconds in account.node_seconds.items()},
        "held_node_seconds": account.held,
    }
    if asked.price is not None:
        data["money"] = {
            "paid": _money(asked.price, account.held),
            "by_category": {
                spent.value: _money(asked.price, spent_on) for spent, spent_on in account.node_seconds.items()
            },
            "per_billion_tokens": _per_billion(asked, account),
        }
    return data


def _money(price: float, node_seconds: float) -> float:
    return price * node_seconds / 3600.0


def _per_billion(asked: Asked, account: Account) -> float | None:
    tokens = account.steps * asked.tokens
    return None if asked.price is None or not tokens else _money(asked.price, account.held) / tokens * 1e9


def shown(asked: Asked, comparison: Comparison) -> RenderableType:
    """Return the table, a column for each policy. Categories that nobody has are left out."""
    accounts = (*comparison.accounts, comparison.oracle)
    table = Table("", *(account.policy for account in accounts), box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("of the oracle's steps", *(f"{comparison.goodput(account):.3f}" for account in accounts))
    table.add_row("steps that count", *(f"{account.steps:,.0f}" for account in accounts))
    table.add_row("effective time", *(f"{account.effective_training_time:.1%}" for account in accounts))
    for spent in Spent:
        if any(account.node_seconds[spent] for account in accounts):
            shares = (account.node_seconds[spent] / (account.held or 1.0) for account in accounts)
            table.add_row(f"  {spent.value}", *(f"{share:.2%}" for share in shares))
    if asked.price is not None:
        lost = (_money(asked.price, account.held - account.node_seconds[Spent.USEFUL]) for account in accounts)
        table.add_row("paid for nothing", *(f"{money:,.2f}" for money in lost))
        each = (_per_billion(asked, account) for account in accounts)
        table.add_row("a billion tokens", *("-" if money is None else f"{money:,.2f}" for money in each))
    hours = comparison.oracle.held / 3600.0
    lines = [
        f"{asked.trace}: {asked.seconds / 3600.0:.1f} h, up to {asked.nodes} nodes, {hours:.1f} node-hours",
        f"{asked.model} on nodes of {asked.slots} x {asked.device}, {asked.samples:,} samples a step",
    ]
    if asked.price is not None:
        paid = _money(asked.price, comparison.oracle.held)
        lines.append(f"{paid:,.2f} for all nodes, at {asked.price:g} an hour each")
    end = [
        "Effective time: share of the time with enough nodes for a layout in which steps that",
        "count were made. Below it, what the node-seconds went to.",
    ]
    return Group(Text("\n".join(lines)), Text(), table, Text(), Text("\n".join(end)))
