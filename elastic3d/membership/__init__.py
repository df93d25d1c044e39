"""Membership: who takes part, in which generation, in which order.

records   what stands in etcd, and under which keys
policy    the numbers a job's owner chooses
events    what a member hears, and what it does about it
view      what a member knows of the job
leader    what the leader decides from that: a pure function
core      the state machine of one member: a pure function of events and `now`
links     heartbeat connections between keepers
member    the adapter: the core run against a real etcd
"""
