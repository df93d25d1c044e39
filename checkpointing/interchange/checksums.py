"""Checksums of a zip archive whose members were written after it: torch does not check them, other readers do."""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Mapping
from typing import BinaryIO

from checkpointing.interchange.archives import members

_DESCRIPTOR = b"PK\x07\x08"
_CENTRAL = struct.Struct("<4s12xI8xHHH12x")  # signature, CRC, lengths of name, extra field and comment


def mend(file: BinaryIO, checksums: Mapping[int, int]) -> None:
    """Write CRCs, given by the offset of a stored member's bytes, into an archive that is open for writing.

    ZIP keeps each in the central directory, and in the local header or a descriptor behind the bytes.
    """
    with zipfile.ZipFile(file) as archive:
        entry = archive.start_dir
    descriptor = file.fileno()
    for offset, member in members(file).items():
        signature, _, name, extra, comment = _CENTRAL.unpack(os.pread(descriptor, _CENTRAL.size, entry))
        assert signature == b"PK\x01\x02"
        if offset in checksums:
            crc = struct.pack("<I", checksums[offset])
            os.pwrite(descriptor, crc, entry + 16)
            behind = offset + member.compress_size
            if member.flag_bits & 8 and os.pread(descriptor, 4, behind) == _DESCRIPTOR:
                os.pwrite(descriptor, crc, behind + 4)
            else:
                os.pwrite(descriptor, crc, member.header_offset + 14)
        entry += _CENTRAL.size + name + extra + comment
