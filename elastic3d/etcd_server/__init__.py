"""Servers of etcd for those who have none: `elastic3d etcd up` runs them, and so do demo, tests and fault injection.

binary         the program: where it is, which version, and which versions lose data
certificates   PEM files for encrypted connections
process        one process that dies with its owner, and ports for it
cluster        what a folder of data is of: members, addresses, certificates; and a member's arguments
restarts       when a member that ended is started again
reasons        why one ended, by its log
supervisor     the members of this machine, kept running
snapshot       a backup: taken, looked at, and made a cluster of
status         what every member says of itself
"""
