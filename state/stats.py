"""Small-sample statistics over benchmark rounds.

Pure and deterministic: the same numbers give the same interval, everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import sqrt
from typing import NamedTuple

DRAWS = 10_000  # bootstrap resamples where there are too many rounds to enumerate them all
ENUMERATE_UP_TO = 20_000  # … and up to this many every resample is taken: exact, no random numbers

# Two-sided 97.5 % quantiles of Student's t by degrees of freedom; beyond the table, the normal distribution's.
_T975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12)
_T80 = (1.376, 1.061, 0.978, 0.941, 0.920, 0.906, 0.896, 0.889, 0.883, 0.879, 0.876, 0.873, 0.870, 0.868, 0.866, 0.865)


class Interval(NamedTuple):
    """A value and its 95 % bootstrap percentile interval."""

    value: float
    low: float
    high: float
    n: int


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def median_of(values: Sequence[float]) -> Interval | None:
    """The median and its interval; None of nothing. One value has no spread that could be known: low = high."""
    if not values:
        return None
    low, high = _percentiles(_resampled([values], lambda sample: median(sample[0])))
    return Interval(median(values), low, high, len(values))


def ratio_interval(base: Sequence[float], other: Sequence[float]) -> Interval:
    """median(other) / median(base). Both samples are resampled; with three rounds each, the interval excludes 1
    only when every round of one beats every round of the other."""
    low, high = _percentiles(_resampled([base, other], lambda sample: median(sample[1]) / median(sample[0])))
    return Interval(median(other) / median(base), low, high, min(len(base), len(other)))


def min_detectable_effect(base: Sequence[float], other: Sequence[float]) -> float | None:
    """The relative change that this many rounds with this spread would have shown 4 times out of 5 (t test)."""
    if len(base) < 2 or len(other) < 2:
        return None
    error = sqrt(_variance(base) / len(base) + _variance(other) / len(other))
    degrees = len(base) + len(other) - 2
    quantile = (_T975[degrees - 1] + _T80[degrees - 1]) if degrees <= len(_T975) else 1.96 + 0.84
    return quantile * error / (sum(base) / len(base))


def _variance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _resampled(
    samples: Sequence[Sequence[float]], statistic: Callable[[Sequence[Sequence[float]]], float]
) -> list[float]:
    samples = [sorted(sample) for sample in samples]  # the order of rounds must not decide what is drawn
    combinations = 1
    for sample in samples:
        combinations *= len(sample) ** len(sample)
    if combinations <= ENUMERATE_UP_TO:
        per_sample = [list(product(sample, repeat=len(sample))) for sample in samples]
        return [statistic(drawn) for drawn in product(*per_sample)]
    from random import Random  # only here: it costs as much to import as the rest of the module

    draw = Random(0)
    return [statistic([draw.choices(sample, k=len(sample)) for sample in samples]) for _ in range(DRAWS)]


def _percentiles(values: list[float]) -> tuple[float, float]:
    values.sort()
    last = len(values) - 1
    return values[round(0.025 * last)], values[round(0.975 * last)]
