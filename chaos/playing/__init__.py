"""A job while it is played.

setting       a job as it is to be played; outcome: what became of it
play          one history: a cluster is started, faults are made, the job is followed to its end
events_disks  disks of nodes' events, which faults spoil
standing      when a job counts as left standing
own_script    a job of anybody's script, and the run of it that nothing happens to
observer      events of a job whose script knows nothing of elastic3d
"""
