"""The recent range of a series of values, to detect outliers."""

from __future__ import annotations

import math
import statistics
from collections import deque

_FEWEST = 20  # minimum number of values for a meaningful range
_LEAST = 0.1  # minimum half-width, as a fraction of the median: smaller rises are not worth a warning
_SIGMA = 1.4826  # the standard deviation of a normal distribution, in median absolute deviations


class Band:
    """The range in which a value is expected: the median of recent values, plus or minus a multiple of their spread.

    The spread is the median absolute deviation, scaled to the standard deviation of a normal distribution. A few
    outliers hardly affect median and spread. Once values in a new range fill half the window, the new range becomes
    the expected one.

    Args:
        window: number of recent values that determine the range.
        width: half the width of the range, in standard deviations.
    """

    def __init__(self, window: int, width: float) -> None:
        self._recent: deque[float] = deque(maxlen=window)
        self._width, self._fewest, self._is_above = width, min(window, _FEWEST), False

    def exceeded_by(self, value: float) -> tuple[float, float] | None:
        """Add the next value of the series. Return the range if this value is above it and the previous value was not.

        NaN and infinities count as above every range.
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
