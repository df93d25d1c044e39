"""Break real clusters of real processes, and judge the outcome.

What is there to break:
    machine       nodes' processes and the hosts they run on
    servers       etcd, object stores, a cloud's metadata server
    scripts       training scripts that break in known ways
    failpoints    points of the runtime's own code at which it can be killed

What is done to it:
    faults        the catalogue, a file for each place where faults enter
    schedules     which faults one job meets, and when

Playing and judging real jobs:
    playing       one job, from its start to its end
    history       what happened to it, from its events
    judging       which promises it kept
    storms        schedules on anybody's script
    report        what a person sees of a run, and a machine reads
    score         the score card of health
    growth        a job that goes on for hours
    commands      what a person types

In virtual time, and in figures:
    simulation    memberships of many nodes
    commits       the commit protocol
    goodput       jobs on traces of spot nodes
    many          schedules of the three by the thousand
    bench         measurements beside peers
    gpu           measurements of a machine with GPUs
"""
