"""What this machine can do, measured: products, memory, links, and a model's own blocks, for the planner to use."""
