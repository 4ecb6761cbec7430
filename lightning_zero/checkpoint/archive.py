"""Fast ``torch.save`` of small tensors from a cached archive of the same shape and dtype; models have thousands."""

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
"""Size in bytes up to which a tensor is small: ``torch.save``'s overhead exceeds the time for writing the values."""

_DESCRIPTOR = b"PK\x07\x08"
"""Zip signature after the data and before their checksum, which the central directory repeats."""


class _Template(NamedTuple):
    """A ``torch.save`` archive of zeros, and where the values and their checksums are in it."""

    archive: bytes
    values: slice
    checksums: tuple[int, ...]


def archived(tensor: Tensor) -> bytearray:
    """Return the bytes that ``torch.save`` writes for a tensor; only the random id of the archive differs.

    Args:
        tensor: contiguous, on the CPU, with a storage of the tensor's size.
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
