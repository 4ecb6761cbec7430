"""Monitoring: a callback that measures while a run trains, and a report at its end."""

from lightning_zero.monitoring.callback import ZeroMonitor
from lightning_zero.monitoring.non_finite import FindNonFinite, NonFiniteError

__all__ = ["FindNonFinite", "NonFiniteError", "ZeroMonitor"]
