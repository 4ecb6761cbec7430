"""No wait is missing: collectives and copies that run late on the device change no bit."""

from __future__ import annotations

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from tests.gpu.one_device import SLEEP, same, train, twins

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
CHOICES = [{"prefetch": prefetch, "reduction_buffers": buffers} for prefetch, buffers in ((0, 1), (1, 2), (2, 3))]


def compare_late_collectives(device: str, stage: int) -> None:
    with twins(4):
        expected = train(device, stage, overlap=False)
    for options in CHOICES:
        with twins(4, SLEEP) as moved:
            assert same(train(device, stage, **options), expected), f"{options} gives other bits"
        assert len(moved) > 6 * 5, "a gather and a reduction of each layer in each step"


@STAGES
def test_late_gathers_and_reductions_change_nothing(run_on, device, stage):
    run_on(1, compare_late_collectives, timeout=120, device=device, stage=stage)


def leave_out_waits(device: str, stage: int) -> None:
    from lightning_zero.engine.comm.collectives import Pending

    def wait(self: Pending) -> object:
        return self._finish() if self._finish is not None else None

    with twins(4):
        expected = train(device, stage, overlap=False)
    with twins(4, SLEEP), patch.object(Pending, "wait", wait):
        assert not same(train(device, stage), expected), "a schedule without a single wait goes unnoticed"


@STAGES
def test_late_collectives_reveal_missing_waits(run_on, device, stage):
    run_on(1, leave_out_waits, timeout=120, device=device, stage=stage)


@contextmanager
def late_copies():
    """Every copy from the host begins late, on its own stream."""
    from lightning_zero.engine.state.bucket import Bucket

    start, late = Bucket._start_gather, []

    def start_late(self, own):
        if own is not None and own.device != self.full.device:
            late.append(own.nbytes)
            with self.streams.copies:
                torch.cuda._sleep(SLEEP)
        return start(self, own)

    with patch.object(Bucket, "_start_gather", start_late):
        yield late


def compare_late_copies(device: str) -> None:
    offload = {"optimizer": "cpu", "parameters": "cpu"}
    expected = train(device, 3, offload={**offload, "overlap": False}, overlap=False)
    with late_copies() as late:
        found = train(device, 3, offload=offload)
    assert same(found, expected)
    assert len(late) >= 6 * 5 or device == "cpu", "each layer is copied in each step"


def test_late_copies_from_the_host_change_nothing(run_on, device):
    run_on(1, compare_late_copies, timeout=120, device=device)
