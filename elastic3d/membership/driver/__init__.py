"""One member against a real etcd: threads, sockets and leases around the state machine, which has none.

member    events in, actions out, and what they touch
writer    what is sent to etcd, in which order, and how often
links     heartbeat connections between keepers; wire: what goes over one
ended     how a job that ended makes room for the next one under its id
"""
