"""Measurements of this machine for the planner: products, memory, links, and a model's own blocks."""
