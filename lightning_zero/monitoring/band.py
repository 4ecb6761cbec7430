"""The recent range of a series of values, to detect outliers."""

from __future__ import annotations

import math
import statistics
from collections import deque

_FEWEST = 20  # number of values from which a range is meaningful
_LEAST = 0.1  # minimum half-width of a range, as a fraction of its median: less is not worth a warning
_SIGMA = 1.4826  # the standard deviation of a normal distribution, in median absolute deviations


class Band:
    """The range in which a value is expected: the median of recent values, plus or minus a multiple of their spread.

    The spread is the median absolute deviation, scaled to the standard deviation of a normal distribution. A few
    outliers affect neither median nor spread. After half a window of values in a new range, the new range is expected.

    Args:
        window: number of recent values.
        width: half the width of the range, in standard deviations.
    """

    def __init__(self, window: int, width: float) -> None:
        self._recent: deque[float] = deque(maxlen=window)
        self._width, self._fewest, self._is_above = width, min(window, _FEWEST), False

    def exceeded_by(self, value: float) -> tuple[float, float] | None:
        """Add the next value in the series; return the range if this value is the first to exceed it.

        NaN and infinity exceed every range.
        """
        low, high = self._range()
        was_above, is_finite = self._is_above, math.isfinite(value)
        self._is_above = not is_finite or value > high
        if is_finite:
            self._recent.append(value)
        return (low, high) if self._is_above and not was_above else None

    def _range(self) -> tuple[float, float]:
        if len(self._recent) < self._fewest:
            return -math.inf, math.inf
        middle = statistics.median(self._recent)
        spread = _SIGMA * statistics.median(abs(value - middle) for value in self._recent)
        half = max(self._width * spread, _LEAST * abs(middle))
        return middle - half, middle + half
