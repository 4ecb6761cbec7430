"""``torch.save``'s archive of a small tensor, made of that of another of its kind: models have thousands of them."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 2**16
"""Bytes up to which a tensor counts as small: what ``torch.save`` itself takes is more than what writing them takes."""

_LOCAL_HEADER, _CENTRAL_HEADER, _DESCRIPTOR = 30, 46, b"PK\x07\x08"
_HAS_DESCRIPTOR = 8  # the checksum stands behind the data


class _Template(NamedTuple):
    """An archive of zeros, and where in it the values and their checksum stand."""

    archive: bytes
    values: slice
    checksums: tuple[int, ...]


def archived(tensor: Tensor) -> bytearray:
    """What ``torch.save`` writes of a tensor, byte by byte, but for the id that it gives each archive.

    Args:
        tensor: contiguous, on the CPU, in memory of its own size.
    """
    template = _template(tensor.dtype, tuple(tensor.shape))
    archive = bytearray(template.archive)
    values = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    archive[template.values] = values
    for place in template.checksums:
        struct.pack_into("<I", archive, place, zlib.crc32(values))
    return archive


@lru_cache(maxsize=1024)
def _template(dtype: torch.dtype, shape: tuple[int, ...]) -> _Template:
    buffer = io.BytesIO()
    torch.save(torch.zeros(shape, dtype=dtype), buffer)
    archive = buffer.getvalue()
    with zipfile.ZipFile(buffer) as directory:
        central = directory.start_dir
        for record in directory.infolist():
            name, extra, comment = struct.unpack_from("<HHH", archive, central + 28)
            if record.filename.endswith("/data/0"):
                break
            central += _CENTRAL_HEADER + name + extra + comment
    name, extra = struct.unpack_from("<HH", archive, record.header_offset + 26)
    start = record.header_offset + _LOCAL_HEADER + name + extra
    stop = start + record.file_size
    own = record.header_offset + 14
    if record.flag_bits & _HAS_DESCRIPTOR:
        assert archive[stop : stop + 4] == _DESCRIPTOR, "torch.save writes archives of another form"
        own = stop + 4
    return _Template(archive, slice(start, stop), (own, central + 16))
