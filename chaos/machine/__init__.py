"""What stands on this machine for a cluster: nodes' processes, the hosts they run on, and what bounds or disturbs them.

cluster       torchrun agents, one per node; preloaded: from a process that has imported torch already
processes     found by a mark in their environment, ended by pid
leftovers     what a job may leave behind besides processes
network       hosts of their own, in network namespaces; impairments: cables that are late, lossy or slow
strangers     on which ports processes listen, and who connects to them without a right
groups        of a node: how much it may have of a processor and of memory; throttle: the former without root
hogs          processes that compute beside them
fuse          file systems that this process serves: hung_files never answer, the writes of a spoilt_file late or never
small_disk    a file system of its own that can be full, or read-only
makers        by whom it was made, of what is removed once that process has ended
clocks        a wall clock of each node's own
"""
