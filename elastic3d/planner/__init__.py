"""Which layout to use for which nodes, and where each rank is in it: pure functions."""

from elastic3d.planner.bounded import plan_below
from elastic3d.planner.choice import Plan, legal_layouts, plan
from elastic3d.planner.costs import Costs, Device, Link
from elastic3d.planner.placement import RankPlace, place_of
from elastic3d.planner.ranking import rank
from elastic3d.planner.results import Candidate, Ranking, RejectedLayout

__all__ = [
    "Plan",
    "legal_layouts",
    "plan",
    "plan_below",
    "RankPlace",
    "place_of",
    "Costs",
    "Device",
    "Link",
    "Candidate",
    "Ranking",
    "RejectedLayout",
    "rank",
]
