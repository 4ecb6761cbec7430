"""Monitoring: a callback that measures while a run trains, and a report at its end."""

from lightning_zero.monitoring.callback import ZeroMonitor

__all__ = ["ZeroMonitor"]
