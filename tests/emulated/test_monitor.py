"""ZeroMonitor on a device that is late: waits are measured on its streams."""

from __future__ import annotations

import time

import torch

from lightning_zero.engine.comm.counters import Phases
from lightning_zero.monitoring import ZeroMonitor
from tests.emulated.device import NAME, in_order
from tests.emulated.test_trainer import Emulated
from tests.support.trainer import fit


def measured_on_a_stream() -> None:
    phases = Phases(torch.device(NAME))
    phases.measures = True
    values = torch.ones(64, device=NAME)
    with phases("wait for gather", "blocks.0", on_stream=True):
        values = values + 1
        time.sleep(0.02)
    assert phases.take() == {}, "the device has not got there yet"
    torch.accelerator.synchronize()
    assert phases.take()["wait for gather", "blocks.0"] >= 0.02


def test_waits_of_a_stream_are_measured_without_waiting_for_the_stream(run_on_device):
    run_on_device(1, measured_on_a_stream)


@in_order
def monitored() -> None:
    monitor = ZeroMonitor(1)
    run = fit("zero3", accelerator=Emulated(), callbacks=[monitor])
    assert [loss for _, loss in monitor.loss_curve] == [loss.item() for loss in run.losses]
    assert monitor.waited and all(seconds >= 0 for seconds in monitor.waited.values())
    if monitor.metrics:
        assert monitor.metrics["training/gradient_norm"] > 0 < monitor.metrics["throughput/device/samples_per_sec"]


def test_a_monitored_fit_has_no_ordering_errors(run_on_device):
    run_on_device(2, monitored)
