"""Encoding and decoding of data that is sent between machines."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_zero.engine.comm.codec import Quantised, apply_changes, encode_changes

LENGTHS = st.integers(0, 700)


@st.composite
def bits_and_changes(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """16-bit patterns, including NaN and infinity, and changed ones, which are near the first or arbitrary."""
    numel, reach = draw(LENGTHS), draw(st.sampled_from([0, 1, 7, 8, 126, 127, 128, 2**15 - 1]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    before = torch.randint(-(2**15), 2**15, (numel,), dtype=torch.int16, generator=generator)
    change = torch.randint(-reach, reach + 1, (numel,), dtype=torch.int16, generator=generator)
    rare = torch.rand(numel, generator=generator) < draw(st.sampled_from([0.0, 0.02, 0.5]))
    anywhere = torch.randint(-(2**15), 2**15, (numel,), dtype=torch.int16, generator=generator)
    return before, torch.where(rare, anywhere, before + change)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@settings(max_examples=200, deadline=None)
@given(bits=bits_and_changes())
def test_encoded_changes_are_exact_for_all_bit_patterns(dtype, bits):
    before, after = (each.view(dtype) for each in bits)
    mine, theirs = before.clone(), before.clone()
    message = encode_changes(mine, after)
    apply_changes(theirs, message)
    for each in (mine, theirs):
        assert torch.equal(each.view(torch.int16), after.view(torch.int16))
    assert len(message) <= 2 * len(after) + 8, "never much longer than the values"


@pytest.mark.parametrize(("reach", "bits"), [(1, 2), (7, 4), (126, 8)])
def test_small_changes_take_few_bits(reach, bits):
    before = torch.randint(-(2**15), 2**15, (2**14,), dtype=torch.int16)
    after = before + torch.randint(-reach, reach + 1, (2**14,), dtype=torch.int16)
    message = encode_changes(before.view(torch.bfloat16), after.view(torch.bfloat16))
    assert len(message) == 2**14 * bits // 8 + 8


@pytest.mark.parametrize(("lr", "bits"), [(1e-3, 9.0), (1e-4, 5.0), (1e-5, 2.6)])
def test_updates_of_adamw_take_few_bits(lr, bits):
    """The figures of docs/how-to/several-machines.md."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.nn.Parameter(0.02 * torch.randn(2**16, generator=generator))
    optimizer, taken = torch.optim.AdamW([weights], lr), []
    shown = weights.detach().bfloat16()
    for _ in range(20):
        weights.grad = torch.randn(2**16, generator=generator)
        optimizer.step()
        taken.append(8 * len(encode_changes(shown, weights.detach())) / 2**16)
    assert 0.5 * bits < sum(taken) / len(taken) < bits


@pytest.mark.parametrize("bits", [8, 4])
@settings(max_examples=100, deadline=None)
@given(numel=LENGTHS, block=st.sampled_from([2, 128]), seed=st.integers(0, 2**31))
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
    total = torch.ones(numel)
    codec.add(total, encoded)
    assert torch.equal(total, decoded + 1)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_overflow_is_still_found_after_quantisation(bits, value):
    values = torch.randn(300)
    values[150] = value
    decoded = Quantised(bits, 128).decode(Quantised(bits, 128).encode(values), 300, torch.float32)
    assert not decoded[128:256].isfinite().any() and decoded[:128].isfinite().all() and decoded[256:].isfinite().all()
