"""Admission: a node looks at itself in a second or two before it takes part, and is kept out where it should be.

check     what a check found, and how checks run: together, each bounded in time
devices   device places, and a product whose digest is known; in a trainer, for a keeper must not compute
host      memory, clock and disks of this machine
reach     other nodes and etcd, over the network
record    what a refused node leaves in etcd, for `status` to show
"""
