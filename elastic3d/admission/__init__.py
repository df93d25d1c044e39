"""Admission: a node checks itself in a second or two before it takes part, and is kept out if it should be.

check     results of checks, and how they run: together, each within a time limit
devices   device places, and a product with a known digest; in a trainer, because a keeper must not compute
host      memory, clock and disks of this machine
reach     other nodes and etcd, over the network
record    the record of a refused node in etcd, for `status` to show
"""
