"""A thin etcd v3 client over gRPC: keys, transactions, leases that are kept, watches that resume.

    EtcdClient    calls that block
    LeaseKeeper   keeps leases alive and reports when one is lost
    Watch         a prefix as a snapshot and all its changes after it, whichever member serves it

The child of a fork may go on with a client, over its own connections and login, whatever the parent's threads were
doing; watches and lease keepers belong to the process that made them. `transport` says how gRPC is made to allow that.
"""

from elastic3d.etcd.client import EtcdClient
from elastic3d.etcd.endpoints import Endpoint, parse_endpoints, password_warning
from elastic3d.etcd.failures import Compacted, FutureRevision, Impaired, LeaseGone, OutcomeUnknown, PasswordRefused
from elastic3d.etcd.history import Change
from elastic3d.etcd.lease import Lease, LeaseKeeper, LeaseLoss
from elastic3d.etcd.operations import (
    Compare,
    Delete,
    Get,
    KeyValue,
    ListedMember,
    MemberStatus,
    Operation,
    Put,
    TxnResult,
)
from elastic3d.etcd.tls import Tls
from elastic3d.etcd.watch import Changes, Connected, Delivery, Disconnected, Ended, Snapshot, Watch

__all__ = [
    "EtcdClient",
    "Endpoint",
    "Tls",
    "parse_endpoints",
    "password_warning",
    "KeyValue",
    "MemberStatus",
    "ListedMember",
    "Compare",
    "Get",
    "Put",
    "Delete",
    "Operation",
    "TxnResult",
    "Lease",
    "LeaseKeeper",
    "LeaseLoss",
    "Watch",
    "Delivery",
    "Snapshot",
    "Changes",
    "Change",
    "Connected",
    "Disconnected",
    "Ended",
    "OutcomeUnknown",
    "Impaired",
    "PasswordRefused",
    "LeaseGone",
    "Compacted",
    "FutureRevision",
]
