"""Pipeline stages: what can be cut, the cuts, and the passes of a step over them."""
