"""Who may talk to the ports of a run: one secret, one handshake, one form of authenticated frame for all of them.

The secret lies in etcd, whose TLS and users decide who can read it. Whoever holds it is of the run; what its members
may do beyond that is decided where the request is answered, from the sealed record.
"""
