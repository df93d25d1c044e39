"""torchrun's `--rdzv-backend=etcd`, on etcd v3.

settings      --rdzv-conf and friends, checked
registration  how the literal backend name `etcd` becomes ours
resident      mode=resident: each agent is a group of one, its keepers are the member
restart       mode=restart: the agent is the member, torchrun restarts the workers
agent         which agent a worker belongs to and ends with
table         the keys that the agents of one generation share
store         where the agents of one generation meet in restart mode
"""
