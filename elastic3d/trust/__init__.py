"""Access to the ports of a run: one secret, one handshake, one form of authenticated frame for all of them.

The secret is in etcd, whose TLS and users decide who can read it. A process that holds it is of the run; what members
may do beyond that is decided where a request is answered, from the sealed record.
"""
