"""The simulation and the account of real runs speak of the same things in the same words."""

from __future__ import annotations

from chaos.goodput.ledger import Spent
from elastic3d.accounting.spans import Category

BY_REASON = {Spent.RECOVERY, Spent.CHANGE}
"""Where the simulation divides by the reason, an account divides by what is done, and has the reason beside it."""


def test_categories_of_both_have_one_name() -> None:
    """All others of the simulation are categories of an account."""
    assert {spent.value for spent in Spent} - {spent.value for spent in BY_REASON} <= {one.value for one in Category}
