"""Monitoring: callbacks that measure or watch training, evaluation or prediction, and a report at the end of a run."""

from lightning_zero.monitoring.callback import ZeroMonitor
from lightning_zero.monitoring.drift import DriftMonitor
from lightning_zero.monitoring.non_finite import FindNonFinite, NonFiniteError
from lightning_zero.monitoring.slices import SliceMetrics

__all__ = ["DriftMonitor", "FindNonFinite", "NonFiniteError", "SliceMetrics", "ZeroMonitor"]
