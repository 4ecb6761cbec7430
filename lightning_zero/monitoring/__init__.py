"""Monitoring: callbacks that measure or watch a run while it trains, evaluates or predicts, and a report at its end."""

from lightning_zero.monitoring.callback import ZeroMonitor
from lightning_zero.monitoring.drift import DriftMonitor
from lightning_zero.monitoring.non_finite import FindNonFinite, NonFiniteError
from lightning_zero.monitoring.slices import SliceMetrics

__all__ = ["DriftMonitor", "FindNonFinite", "NonFiniteError", "SliceMetrics", "ZeroMonitor"]
