"""Simulates several ranks' collectives on one GPU, on which NCCL refuses two processes: rank 0 runs alone.

A gather fills all ranks' slices with rank 0's, and a reduction returns rank 0's own slice. So the numbers are not those
of real training, but they are the same in every run, for every schedule. Like NCCL, the collectives run on a separate
stream, after a sleep on the device: reading a result without waiting returns wrong values. On the CPU they run when
they are waited for, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

SLEEP = 2_000_000  # cycles, about a millisecond: longer than the small models here compute


class Layers(nn.Module):
    """Layers that are each a unit; nothing in them is summed in an order that differs from run to run."""

    class Layer(nn.Module):
        def __init__(self, width: int, bias: bool) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width, bias=bias)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.linear(x))

    def __init__(self, width: int, depth: int, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(width, bias) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class _Done:
    """A collective's handle."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self.wait = wait


@contextmanager
def twins(ranks: int, cycles: int = 0) -> Iterator[list[int]]:
    """Run as rank 0 of identical ranks; every collective is delayed by some cycles. Yields the bytes moved."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (makes the backend known)

    from lightning_zero.engine.comm import backend_transport
    from lightning_zero.engine.comm.rendezvous import Rendezvous

    moved: list[int] = []
    streams: dict[torch.device, torch.Stream] = {}

    def beside(device: torch.device, act: Callable[[], Any]) -> _Done:
        if device.type == "cpu":
            return _Done(act)
        stream = streams.setdefault(device, torch.Stream(device))
        stream.wait_event(torch.accelerator.current_stream(device).record_event())
        with stream:
            if cycles:
                torch.cuda._sleep(cycles)
            act()
            done = stream.record_event()
        return _Done(lambda: torch.accelerator.current_stream(device).wait_event(done))

    def all_gather(full: Tensor, own: Tensor, **_: Any) -> _Done:
        moved.append(full.nbytes)
        # autograd may have saved `full`, whose version must not change: the engine has not written to it
        whole, part = full.detach(), own.detach()

        def fill() -> None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(full):
                for slice_ in whole.chunk(ranks)[1:]:
                    slice_.copy_(part)

        return beside(full.device, fill)

    def reduce_scatter(shard: Tensor, flat: Tensor, **_: Any) -> _Done:
        moved.append(flat.nbytes)
        return beside(flat.device, lambda: shard.copy_(flat[: len(shard)]))

    accelerator = torch.accelerator.current_accelerator()
    devices = ["cpu"] + ([accelerator.type] if accelerator else [])
    backends = ",".join(f"{device}:fake" for device in devices)  # "fake" alone serves only devices it is registered for
    # not torch's FakeStore, which cannot be cloned
    dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=ranks)
    try:
        with (
            patch.object(backend_transport, "all_gather_single", all_gather),
            patch.object(backend_transport, "reduce_scatter_single", reduce_scatter),
            patch.object(Rendezvous, "agree_on_gather", lambda *_: None),  # there is no other rank to meet
        ):
            yield moved
    finally:
        dist.destroy_process_group()


def train(
    device: str,
    stage: int,
    *,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    settings: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    width: int = 96,
    steps: int = 6,
    **options: Any,
) -> dict[str, Tensor]:
    """Losses, and this rank's masters at the end, on the CPU."""
    from lightning_zero.engine import Engine
    from lightning_zero.engine.state.slot import slots_of

    torch.manual_seed(0)
    module = Layers(width, 5).to(dtype)
    inputs = torch.randn(steps, 32, width, dtype=dtype).to(device)
    updater = optimizer(module.parameters(), **(settings or {"lr": 0.01}))
    engine = Engine(module, [updater], stage=stage, device=device, **options)
    losses = []
    for x in inputs:
        loss = module(x)
        loss.backward()
        updater.step()
        updater.zero_grad()
        losses.append(loss.detach())
    found = {"losses": torch.stack(losses).cpu()}
    for bucket in engine.buckets:
        for slot in slots_of(bucket):
            found[slot.name] = slot.parameter_at_rest().detach().clone().cpu()
    engine.close(communicate=not dist.is_initialized())  # the simulated ranks do not communicate
    return found


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
