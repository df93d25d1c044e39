"""Which layout for which nodes: pure functions."""

from elastic3d.planner.layouts import Plan, legal_layouts, plan

__all__ = ["Plan", "legal_layouts", "plan"]
