"""Real servers on this machine that a job uses, and what can be done to them.

etcd          one node or a cluster, made as elastic3d.etcd_server has it; etcd_attacks: what can be done to a live one
s3            an object store; s3_proxy: stands before it and disturbs requests; proxied_store: both, for a job
metadata      a cloud's metadata server, which preempts on request
"""
