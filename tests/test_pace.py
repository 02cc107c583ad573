"""The search for a server's own limit, against servers that are formulas: no clock, no noise, every answer known."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest

from pipeline.stages.pace import FIRST, MOST, Pace


def play(pace: Pace, seconds: Callable[[int], float], answers: int, tokens: Callable[[], int]) -> float:
    """Ask a server that decodes `n` requests at `seconds(n)` a token. Returns the time that it took.

    Requests are served as a batch: each token of each costs what the batch as it is costs.
    """
    now, open_, done = 0.0, [], 0  # open_: (token count at which it ends, tokens)
    step = 0
    while done < answers:
        while len(open_) < pace.limit:
            length = tokens()
            heapq.heappush(open_, (step + length, length))
        ends, length = open_[0]
        now += (ends - step) * seconds(len(open_))
        step = ends
        while open_ and open_[0][0] == step:
            pace.answered(now, heapq.heappop(open_)[1], full=True)
            done += 1
    return now


def batch_of(best: int) -> Callable[[int], float]:
    """Free up to `best` requests at once (memory bound), linear after it: throughput stops growing there."""
    return lambda n: 0.01 * max(1.0, n / best)


@pytest.mark.parametrize("best", [4, 16, 50, 100, 700])
def test_it_finds_where_the_throughput_stops_growing(best: int) -> None:
    lengths = random.Random(0)
    pace = Pace(0)
    play(pace, batch_of(best), 100 * max(best, FIRST), lambda: lengths.randint(20, 400))
    assert pace.mode == "held"
    # Doubling from 16: never under what saturates the server, at most twice as much (or where it began).
    assert min(best, FIRST) <= pace.limit <= max(2 * best, FIRST), pace.why
    assert "tokens/s" in pace.why


def test_it_stops_at_the_most() -> None:
    pace = Pace(0)
    play(pace, lambda n: 0.01, 30 * MOST, lambda: 50)
    assert (pace.limit, pace.mode) == (MOST, "held")


def test_a_given_number_is_kept() -> None:
    pace = Pace(64)
    play(pace, batch_of(8), 1000, lambda: 50)
    assert (pace.limit, pace.why) == (64, "as configured")
    pace.queued(0, waiting=60, running=4)
    assert pace.limit == 64


@pytest.mark.parametrize("asked", [0, 64])
def test_refusals_of_one_crowd_are_one_step_down_and_it_climbs_again(asked: int) -> None:
    pace = Pace(asked)
    pace.limit = 64
    for _ in range(40):
        pace.refused(100.0, "HTTP 429")
    assert pace.limit == 44 and "64 at once were too many: HTTP 429" in pace.why
    pace.refused(106.0, "HTTP 503")
    assert pace.limit == 30
    play(pace, lambda n: 0.01, 400 * 64, lambda: 50)
    assert pace.limit >= 64, "and it comes back when nothing is refused any more"
    assert pace.limit == 64 or not asked


def test_it_never_goes_below_one() -> None:
    pace = Pace(0)
    for i in range(100):
        pace.refused(i * 10.0, "HTTP 429")
        assert pace.limit >= 1
    assert pace.limit == 1


def test_a_queue_at_the_server_is_too_much() -> None:
    pace = Pace(0)
    pace.limit = 128
    pace.queued(0.0, waiting=8, running=120)
    assert pace.limit == 128, "a short queue keeps the batch full"
    pace.queued(1.0, waiting=88, running=40)
    assert pace.limit == 50 and pace.mode == "held" and "88 waited" in pace.why
    pace.queued(2.0, waiting=88, running=40)
    assert pace.limit == 50, "the echo of the same crowd"


def test_too_little_work_says_nothing_about_the_limit() -> None:
    pace = Pace(0)
    for i in range(1000):
        pace.answered(i * 1.0, 100, full=False)
    assert (pace.limit, pace.mode) == (FIRST, "doubling")
