"""A job as people see it, read from etcd by somebody who takes no part in it.

jobs      which jobs there are
keys      all keys of one, parsed; garbage is named
status    what that says of the job and of each of its nodes
"""
