"""The job's side of a node.

processes     a slot's template and trainers, and how their keeper starts, hears and stops them
checkpoints   the node's part in the run's checkpoints: tiles into the store, commits, what is read back and let go
keeper        the first keeper, which speaks for the node: its generations, how they begin, go on and end
options       what a script says to `elastic3d.run`; quantities: durations and sizes as people write them
journal       what goes to the event file; pulse: to the node's pulse; safety: how old the safe step is
"""
