"""Which layout for which nodes, and which rank stands where: pure functions."""

from elastic3d.planner.costs import Costs, Device, Link
from elastic3d.planner.layouts import Plan, legal_layouts, plan
from elastic3d.planner.places import Place, place_of
from elastic3d.planner.ranking import Candidate, Ranking, Rejected
from elastic3d.planner.search import rank

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
