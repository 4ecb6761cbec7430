"""The public import path of the callbacks that measure or watch training, evaluation or prediction."""

from lightning_zero.callbacks.drift import Drift, DriftMonitor
from lightning_zero.callbacks.monitor import ZeroMonitor
from lightning_zero.callbacks.non_finite import FindNonFinite, NonFiniteError
from lightning_zero.callbacks.slices import SliceMetrics

__all__ = ["Drift", "DriftMonitor", "FindNonFinite", "NonFiniteError", "SliceMetrics", "ZeroMonitor"]
