"""Goodput over traces of nodes that come and go: what a job makes of the nodes it is given, and what it loses.

lives       the nodes of a trace, the same for all policies
costs       what recovering, saving and joining cost, with sources
step_times  the production planner's layouts
ledger      every second of every node in one category
playing     one policy over one trace
production  elastic3d: the membership machine itself
restart     a peer that only restarts from checkpoints; young_daly: how often it saves
replicas    a peer that keeps data parallelism only
oracle      the bound that knows the future
compare     all of them
report, plot, cli
"""
