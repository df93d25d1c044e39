"""Where the members of a zip archive lie in its file."""

from __future__ import annotations

import struct
import zipfile
from typing import BinaryIO

_LENGTHS = struct.Struct("<26xHH")  # of the name and the extra field, which a member's own header has for itself


def members(file: BinaryIO) -> dict[int, zipfile.ZipInfo]:
    """Return the members of an archive by the offset of their bytes, in the order of its directory.

    zipfile.BadZipFile if the file is no archive, or a member does not begin in it.
    """
    with zipfile.ZipFile(file) as archive:
        directory = archive.infolist()
    made: dict[int, zipfile.ZipInfo] = {}
    for member in directory:
        file.seek(member.header_offset)
        header = file.read(_LENGTHS.size)
        if len(header) < _LENGTHS.size:
            raise zipfile.BadZipFile(f"{member.filename} begins behind the end")
        name, extra = _LENGTHS.unpack(header)
        made[member.header_offset + _LENGTHS.size + name + extra] = member
    return made
