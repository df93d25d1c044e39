"""Which layout for which nodes, and which rank stands where: pure functions."""

from elastic3d.planner.choice import Plan, legal_layouts, plan
from elastic3d.planner.costs import Costs, Device, Link
from elastic3d.planner.placement import Place, place_of
from elastic3d.planner.ranking import rank
from elastic3d.planner.results import Candidate, Ranking, Rejected

__all__ = [
    "Plan",
    "legal_layouts",
    "plan",
    "Place",
    "place_of",
    "Costs",
    "Device",
    "Link",
    "Candidate",
    "Ranking",
    "Rejected",
    "rank",
]
