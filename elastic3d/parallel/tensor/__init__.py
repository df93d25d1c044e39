"""Layers computed by several ranks of a node together: what a plan says of which module, and how it is carried out."""
