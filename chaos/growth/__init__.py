"""What grows in a job that goes on for long: one job, a fault every few seconds, and what its processes hold meanwhile.

draws       which fault is next, by seed
account     what the job's events promise, without keeping them all
sampling    what processes, etcd and folders hold now
measures    series of samples, with the bar of each
slopes      whether a series grows
soak        the job from its start to its end
again       the schedule and the job by which it is played again
plot        the series as an SVG file
report      the table, the document and the folder that is kept
"""
