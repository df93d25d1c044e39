"""`elastic3d doctor`: is this node fit for a job, before one is started?

findings      what a check found
running       checks side by side, each within its time; what they make they remove
child         a program that is asked something, and cannot take this process along
devices       accelerators, driver, torch and NCCL; device_child asks torch, in a process of its own
host          memory, shared memory and limits of this machine
clock         this machine's clock against others'
network       by which address and interface others reach this machine
etcd          each member, and a write under a lease
store         reads, writes, conditions, bandwidth; directory: one that is a folder
peers         other nodes, by the port on which they listen
node          all of them together

In each of the last groups `judge` says what measured facts mean, and is pure; `measure` looks at the world.
"""
