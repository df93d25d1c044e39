"""Which samples a run consumes, in which order, and the proof that it consumed each of them once."""

from elastic3d.data.batches import Batch, Batches, MicroBatch, Share
from elastic3d.data.ledger import Account, Line, check
from elastic3d.data.permutation import KeyedPermutation
from elastic3d.data.positions import Order
from elastic3d.data.sizes import Growing

__all__ = [
    "KeyedPermutation",
    "Order",
    "Growing",
    "Batches",
    "Batch",
    "MicroBatch",
    "Share",
    "Line",
    "Account",
    "check",
]
