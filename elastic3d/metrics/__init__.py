"""What a node's first keeper tells Prometheus: one table of metrics, fed by events, and a port that serves it.

`table` says what there is, `recording` counts it from the events of a keeper's journal, `exposition` writes it in
Prometheus' formats, `server` answers scrapes. Nothing of it is imported by a job that asks for no metrics.
"""
