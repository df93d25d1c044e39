"""Membership: who takes part, in which generation, in which order.

What is said, to etcd and between the rooms:

    records       what stands in etcd, and under which keys; encoding: how the large ones are written
    transactions  how each write is made; reading: what each key says
    policy        the numbers a job's owner chooses
    events        what a member hears, and what it does about it
    topology      who stands near whom: rank order, holes and buddies
    orders        what an operator asks of a job

Who decides, who acts, and who only looks:

    machine/      the state machine of one member, a pure function of events and `now`
    driver/       the machine run against a real etcd, over real connections between keepers
    inspection/   a job as people see it, read from etcd
"""
