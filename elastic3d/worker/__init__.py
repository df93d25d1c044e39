"""The job's side of a node.

processes     a slot's template and trainers, and how their keeper starts, hears and stops them
checkpoints   the node's part in the run's checkpoints: uploads, commits, verification and retention
keeper        the first keeper, which speaks for the node: its generations, how they begin, go on and end
options       what a script passes to `elastic3d.run`, checked
journal       the node's event file; pulse: the figures it reports; safety: how old the safe step is
"""
