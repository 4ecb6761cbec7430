"""Encoding and decoding of data that is sent between machines."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zero.engine.comm.transport import Quantised


@pytest.mark.parametrize("bits", [8, 4])
@settings(max_examples=100, deadline=None)
@given(numel=st.integers(0, 700), block=st.sampled_from([2, 128]), seed=st.integers(0, 2**31))
def test_quantisation_errors_are_at_most_half_a_step_of_their_block(bits, numel, block, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-20, 20, (numel,), generator=generator)
    codec = Quantised(bits, block)
    encoded = codec.encode(values)
    assert encoded.dtype == codec.dtype and len(encoded) == codec.size(numel)
    decoded = codec.decode(encoded, numel, torch.float32)
    for part, found in zip(values.split(block), decoded.split(block)):
        step = part.abs().amax(0, keepdim=True) / (2 ** (bits - 1) - 1) if len(part) else part
        assert ((part - found).abs() <= 0.5001 * step).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_overflow_is_still_found_after_quantisation(bits, value):
    values = torch.randn(300)
    values[150] = value
    decoded = Quantised(bits, 128).decode(Quantised(bits, 128).encode(values), 300, torch.float32)
    assert not decoded[128:256].isfinite().any() and decoded[:128].isfinite().all() and decoded[256:].isfinite().all()
