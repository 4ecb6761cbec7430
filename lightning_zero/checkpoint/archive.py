"""``torch.save``'s archive of a small tensor, made of that of another of its kind: models have thousands of them."""

from __future__ import annotations

import io
import struct
import zlib
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint.records import records_of

LARGEST = 2**16
"""Bytes up to which a tensor counts as small: what ``torch.save`` itself takes is more than what writing them takes."""

_DESCRIPTOR = b"PK\x07\x08"
"""Behind the data, before their checksum, which the directory has once more."""


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
    torch.save(torch.zeros(shape, dtype=dtype, device="cpu"), buffer)
    archive = buffer.getvalue()
    data = next(record for record in records_of(buffer) if record.name.endswith("/data/0"))
    stop = data.start + data.length
    assert archive[stop : stop + 4] == _DESCRIPTOR, "torch.save writes archives of another form"
    return _Template(archive, slice(data.start, stop), (stop + 4, data.entry + 16))
