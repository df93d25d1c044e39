"""Pipeline stages: which models can be cut, the cuts, and the passes of a step over them."""
