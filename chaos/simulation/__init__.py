"""Membership under a virtual clock: the production core over models of etcd, of the network and of trainers.

    loop, clock     virtual time, and what each host reads of it
    etcd            leases and watches, compaction, outages, bandwidth; etcd_store: keys, revisions, transactions
    network         heartbeat links: delays, partitions one way and both, pauses, deaths
    trainers        the minimum of what keepers and trainers answer to the core; durations: how long they take
    node            one member: the core and its driver's rules
    schedule        what is done to a job, and when: drawn from a seed, written as text, made smaller
    invariants      checked at every event; stuck_checks, lie_checks: where ranks stand still, and devices are convicted
    world           all of it together
    run, trace      random schedules by the thousand; one large job, with a trace of nodes that come and go

Everything is drawn from one seed: the same seed gives the same events in the same order.
"""
