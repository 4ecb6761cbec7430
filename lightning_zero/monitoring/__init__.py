"""Watching a run: a callback that measures while it trains, and a report when it ends."""

from lightning_zero.monitoring.callback import ZeroMonitor

__all__ = ["ZeroMonitor"]
