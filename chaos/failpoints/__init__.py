"""Failpoints: processes that kill themselves at a named store operation of a save, a commit or a collection.

store     the seam: a store that ends its own process before, during or after the k-th operation of a name
work      what a process does: one rank's save, or a leader's fence and commit
nursery   a process that forks the others, so that each costs milliseconds and is a process all the same
run       one trial: a save with failpoints, then the recovery by the next generation
"""
