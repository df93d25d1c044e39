"""etcd's messages as classes, built at import from the table below.

The published clients ship generated modules, which pin old protobuf and clash with every other package that registers
`etcdserverpb` in the process-wide pool. Here the descriptors live in a separate pool under our own package name:
nothing clashes, and protobuf 3.20 and everything after it will do. Names and numbers are those of
`etcdserverpb/rpc.proto`, `mvccpb/kv.proto` (etcd 3.4; later versions only add). Enumerations are int32, which has the
same bytes on the wire; fields after `|` are the members of the message's one `oneof`, so that a zero is sent too.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "elastic3d.etcd"

# A line is `Message: name type number, ...`; a type ending in * is repeated, a capital names another message.
TABLE = """
KeyValue: key bytes 1, create_revision int64 2, mod_revision int64 3, version int64 4, value bytes 5, lease int64 6
Event: type int32 1, kv KeyValue 2, prev_kv KeyValue 3
ResponseHeader: cluster_id uint64 1, member_id uint64 2, revision int64 3, raft_term uint64 4

RangeRequest: key bytes 1, range_end bytes 2, limit int64 3, revision int64 4, sort_order int32 5, \
sort_target int32 6, serializable bool 7, keys_only bool 8, count_only bool 9
RangeResponse: header ResponseHeader 1, kvs KeyValue* 2, more bool 3, count int64 4
PutRequest: key bytes 1, value bytes 2, lease int64 3, prev_kv bool 4, ignore_value bool 5, ignore_lease bool 6
PutResponse: header ResponseHeader 1, prev_kv KeyValue 2
DeleteRangeRequest: key bytes 1, range_end bytes 2, prev_kv bool 3
DeleteRangeResponse: header ResponseHeader 1, deleted int64 2, prev_kvs KeyValue* 3
RequestOp: | request_range RangeRequest 1, request_put PutRequest 2, request_delete_range DeleteRangeRequest 3
ResponseOp: | response_range RangeResponse 1, response_put PutResponse 2, response_delete_range DeleteRangeResponse 3
Compare: result int32 1, target int32 2, key bytes 3, range_end bytes 64 \
| version int64 4, create_revision int64 5, mod_revision int64 6, value bytes 7, lease int64 8
TxnRequest: compare Compare* 1, success RequestOp* 2, failure RequestOp* 3
TxnResponse: header ResponseHeader 1, succeeded bool 2, responses ResponseOp* 3
CompactionRequest: revision int64 1, physical bool 2
CompactionResponse: header ResponseHeader 1

WatchCreateRequest: key bytes 1, range_end bytes 2, start_revision int64 3, progress_notify bool 4, filters int32* 5, \
prev_kv bool 6, watch_id int64 7, fragment bool 8
WatchCancelRequest: watch_id int64 1
WatchProgressRequest:
WatchRequest: | create_request WatchCreateRequest 1, cancel_request WatchCancelRequest 2, \
progress_request WatchProgressRequest 3
WatchResponse: header ResponseHeader 1, watch_id int64 2, created bool 3, canceled bool 4, compact_revision int64 5, \
cancel_reason string 6, fragment bool 7, events Event* 11

LeaseGrantRequest: TTL int64 1, ID int64 2
LeaseGrantResponse: header ResponseHeader 1, ID int64 2, TTL int64 3, error string 4
LeaseRevokeRequest: ID int64 1
LeaseRevokeResponse: header ResponseHeader 1
LeaseKeepAliveRequest: ID int64 1
LeaseKeepAliveResponse: header ResponseHeader 1, ID int64 2, TTL int64 3
LeaseTimeToLiveRequest: ID int64 1, keys bool 2
LeaseTimeToLiveResponse: header ResponseHeader 1, ID int64 2, TTL int64 3, grantedTTL int64 4, keys bytes* 5
LeaseLeasesRequest:
LeaseStatus: ID int64 1
LeaseLeasesResponse: header ResponseHeader 1, leases LeaseStatus* 2

StatusRequest:
StatusResponse: header ResponseHeader 1, version string 2, dbSize int64 3, leader uint64 4, raftIndex uint64 5, \
raftTerm uint64 6, errors string* 8, dbSizeInUse int64 9, isLearner bool 10, dbSizeQuota int64 12
SnapshotRequest:
SnapshotResponse: header ResponseHeader 1, remaining_bytes uint64 2, blob bytes 3
Member: ID uint64 1, name string 2, peerURLs string* 3, clientURLs string* 4, isLearner bool 5
MemberListRequest:
MemberListResponse: header ResponseHeader 1, members Member* 2
AuthenticateRequest: name string 1, password string 2
AuthenticateResponse: header ResponseHeader 1, token string 2
"""


def _build(table: str) -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="elastic3d/etcd.proto", package=PACKAGE, syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for line in filter(None, table.splitlines()):
        name, _, body = line.partition(":")
        message = file.message_type.add(name=name)
        plain, _, union = body.partition("|")
        if union:
            message.oneof_decl.add(name="union")
        for fields, in_union in ((plain, False), (union, True)):
            for text in filter(None, (part.strip() for part in fields.split(","))):
                field_name, kind, number = text.split()
                field = message.field.add(name=field_name, number=int(number), label=kinds.LABEL_OPTIONAL)
                if kind.endswith("*"):
                    field.label, kind = kinds.LABEL_REPEATED, kind[:-1]
                if kind[0].isupper():
                    field.type, field.type_name = kinds.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
                else:
                    field.type = getattr(kinds, f"TYPE_{kind.upper()}")
                if in_union:
                    field.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    descriptors = {
        message.name: pool.FindMessageTypeByName(f"{PACKAGE}.{message.name}") for message in file.message_type
    }
    if hasattr(message_factory, "GetMessageClass"):
        return {name: message_factory.GetMessageClass(descriptor) for name, descriptor in descriptors.items()}
    # protobuf before 4.22: the factory must be of the same pool.
    factory = message_factory.MessageFactory(pool)
    return {name: factory.GetPrototype(descriptor) for name, descriptor in descriptors.items()}


CLASSES: dict[str, Any] = _build(TABLE)


def new(message: str, /, **fields: Any) -> Any:
    """Return a message of class `message` with these fields set; KeyError or ValueError for unknown ones."""
    return CLASSES[message](**fields)


def prefix_end(key: bytes) -> bytes:
    """Return the `range_end` for all keys that begin with `key` (an empty key: all keys there are)."""
    for index in range(len(key) - 1, -1, -1):
        if key[index] < 0xFF:
            return key[:index] + bytes([key[index] + 1])
    return b"\0"
