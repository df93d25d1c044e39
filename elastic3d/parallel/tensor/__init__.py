"""Layers computed by several ranks of a node together: the plan for each module, and how it is carried out."""
