"""A digest of bits that adds up over any cut, at the speed of memory: D(x) = sum of word_i * w(i), modulo 2^64.

Words are those of the bytes in memory, of 8 bytes, at their index in the whole. Every weight is odd, so that a change
of one word always shows: d * w is 0 modulo 2^64 only for d = 0. Weights are keyed by index, so that moved or swapped
words show too, which an exclusive or of words lets pass. And since it is a sum, the digests of shards add up to that of
the whole, however it is cut (at multiples of 8 bytes).

A weight is the product of two odd numbers, one for the place within a block of `BLOCK` words and one for the block:
so one small table serves tensors of any length, and stays in the cache.

It is no cryptographic digest. It finds what a device or a wire does by accident, against which 2^-64 is enough; whoever
wants to can make two tensors of one digest.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[np.uint64]

WORD = 8
"""Bytes of a word."""

BLOCK = 1 << 16
"""Words of a block: 512 KiB."""

_MASK = (1 << 64) - 1
_KEY = 0x656C617374696333
_GOLDEN = 0x9E3779B97F4A7C15


def digest_of(tensor: torch.Tensor, start: int = 0) -> int:
    """Return the digest of a contiguous tensor's bits, as a number below 2^64.

    start: where its bytes begin in the whole, a multiple of 8; bytes that do not fill the last word count as followed
    by zeros, so that only the end of the whole may be no multiple of 8. Computed where the tensor is; waits for it.
    """
    return int(digest_there(tensor, start)) & _MASK


def digest_there(tensor: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Return the same as one int64, which wraps around, where the tensor is; waits for no device.

    Sums of what it returns are digests too.
    """
    assert tensor.is_contiguous()
    assert start % WORD == 0
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    whole = flat.numel() // WORD * WORD
    # The address of a view may be no multiple of 8, and then neither torch nor numpy can see words in it.
    body = flat[:whole] if flat.data_ptr() % WORD == 0 else flat[:whole].clone()
    first = start // WORD
    total = _digest(body.view(torch.int64), first)
    if whole < flat.numel():
        last = torch.zeros(WORD, dtype=torch.uint8, device=flat.device)
        last[: flat.numel() - whole] = flat[whole:]
        total += _digest(last.view(torch.int64), first + whole // WORD)
    return total


def _digest(words: torch.Tensor, first: int) -> torch.Tensor:
    if words.device.type != "cpu":
        return _on_device(words, first)
    if not len(words):
        return torch.zeros((), dtype=torch.int64)
    # As memory: torch does not let go of a storage any more that numpy has seen, as FSDP does after each use.
    memory: Any = (ctypes.c_char * words.nbytes).from_address(words.data_ptr())
    return torch.tensor(_signed(words_digest(np.frombuffer(memory, dtype=np.uint64), first)))


def words_digest(words: Words, first: int = 0) -> int:
    """Return the digest of words of which the first stands at index `first` of the whole."""
    total, at = 0, 0
    table = _table()
    while at < len(words):
        block, inside = divmod(first + at, BLOCK)
        count = min(BLOCK - inside, len(words) - at)
        dot = int(np.dot(words[at : at + count], table[inside : inside + count]))
        total = (total + dot * _odd(block, 1)) & _MASK
        at += count
    return total


def _on_device(words: torch.Tensor, first: int) -> torch.Tensor:
    """Return the same, computed by the device: products of int64 wrap around, as those of uint64 do."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    at = 0
    table = _table_on(words.device)
    while at < len(words):
        block, inside = divmod(first + at, BLOCK)
        count = min(BLOCK - inside, len(words) - at)
        total += (words[at : at + count] * table[inside : inside + count]).sum() * _signed(_odd(block, 1))
        at += count
    return total


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


@functools.cache
def _table() -> Words:
    return np.array([_odd(place, 0) for place in range(BLOCK)], dtype=np.uint64)


@functools.cache
def _table_on(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_table().view(np.int64)).to(device)


def _odd(number: int, of: int) -> int:
    """Return an odd number keyed by another: the finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    value = (_KEY + of * _GOLDEN * 3 + (number + 1) * _GOLDEN) & _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return (value ^ (value >> 31)) | 1
