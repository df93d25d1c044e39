"""Which layout for which nodes, and which rank stands where: pure functions."""

from elastic3d.planner.layouts import Plan, legal_layouts, plan
from elastic3d.planner.places import Place, place_of

__all__ = ["Plan", "legal_layouts", "plan", "Place", "place_of"]
