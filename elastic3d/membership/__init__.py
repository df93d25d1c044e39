"""Membership: who takes part, in which generation, in which order.

Data, in etcd and between the parts below:

    records       the records in etcd, and their keys; encoding: how the large ones are written
    transactions  how each write is made; reading: what each key says
    policy        the numbers a job's owner chooses
    events        what a member hears; actions: what it does about it
    topology      which nodes are near each other: rank order, holes and buddies
    orders        what an operator asks of a job

The parts that decide, act, and only look:

    machine/      the state machine of one member, a pure function of events and `now`
    driver/       the machine run against a real etcd, over real connections between keepers
    inspection/   a job as people see it, read from etcd
"""
