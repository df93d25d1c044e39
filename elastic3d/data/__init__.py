"""The samples that a run consumes, their order, and the proof that it consumed each of them once."""

from elastic3d.data.adaptive import Adaptive
from elastic3d.data.batches import Batches
from elastic3d.data.budget import TokenBudget
from elastic3d.data.cached import Cached
from elastic3d.data.ledger import Account, Line, check
from elastic3d.data.micro_batches import Batch, MicroBatch
from elastic3d.data.mixture import Mixture
from elastic3d.data.packing import Packed
from elastic3d.data.permutation import KeyedPermutation
from elastic3d.data.positions import Order
from elastic3d.data.remote import Remote
from elastic3d.data.sizes import Growing
from elastic3d.data.sources import Share
from elastic3d.data.stratified import Stratified
from elastic3d.data.streams import Cursor
from elastic3d.data.tokens import TokenFile

__all__ = [
    "KeyedPermutation",
    "Order",
    "Growing",
    "Adaptive",
    "TokenBudget",
    "Batches",
    "Batch",
    "MicroBatch",
    "Share",
    "Cursor",
    "TokenFile",
    "Packed",
    "Stratified",
    "Mixture",
    "Cached",
    "Remote",
    "Line",
    "Account",
    "check",
]
