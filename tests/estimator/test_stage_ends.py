"""The ends of stages for every number of microbatches, against a run of 1F1B for each."""

import random

import pytest

from planaria.estimator.ends import stage_ends
from planaria.estimator.makespan import StageSeconds, makespan_s

SEED = 20_261_121


def random_stages(rng: random.Random) -> StageSeconds:
    """One to sixteen stages, equal or not, with transfers from none to slow ones."""
    num_stages, spread = rng.randint(1, 16), rng.choice((0.0, 0.01, 0.5, 3.0))
    transfer_s, latency_s = rng.choice((0.0, 0.01, 0.3)), rng.choice((0.0, 0.001, 0.5))

    def some(seconds: float, count: int) -> tuple[float, ...]:
        return tuple(seconds * (1 + spread * rng.random()) for _ in range(count))

    return StageSeconds(
        forward_s=some(rng.choice((0.0, 1.0, 1.0, 1.0)), num_stages),
        backward_s=some(2.0, num_stages),
        transfer_s=some(transfer_s, num_stages - 1),
        latency_s=some(latency_s, num_stages - 1),
    )


def test_ends_are_those_of_a_run_for_each_number() -> None:
    """Also far beyond where the run was left: there it is the run's own period that is repeated."""
    rng = random.Random(SEED)
    num_beyond = 0
    for case in range(20):
        pipelines = [random_stages(rng) for _ in range(rng.randint(1, 5))]
        most = rng.choice((1, 7, 60, 1000))
        for seconds, ends in zip(pipelines, stage_ends(pipelines, most), strict=True):
            none = [0.0] * len(seconds.forward_s)
            latest_s = ends.latest_s(none, most)
            assert latest_s.shape == (most,)
            for number in {1, 2, 3, most // 3, most // 2, most - 1, most} - {0}:
                if number <= most:
                    expected = pytest.approx(makespan_s(seconds, number), rel=1e-8)
                    assert latest_s[number - 1] == expected, f"seed {SEED}, case {case}"
                    assert ends.by_stage_s(number)[0] == expected
                    num_beyond += number > len(ends.ends_s)
    assert num_beyond > 100


def test_ends_of_stages_by_hand() -> None:
    """With F = B = 1 and one second of latency each way; the last stage ends first.

    0: F0@0 F1@1 B0@5 B1@7
    1: F0@2 B0@3 F1@4 B1@5
    """
    seconds = StageSeconds((1.0, 1.0), (1.0, 1.0), (0.0,), (1.0,))

    (ends,) = stage_ends([seconds], 2)

    assert [ends.by_stage_s(1).tolist(), ends.by_stage_s(2).tolist()] == [[6.0, 4.0], [8.0, 6.0]]
    # The last stage reduces for longer than the first one's backward takes.
    assert ends.latest_s([0.0, 5.0], 2).tolist() == [9.0, 11.0]


def test_a_pipeline_of_stages_that_take_no_time_ends_at_once() -> None:
    """Its state repeats with a period of no seconds."""
    seconds = StageSeconds((0.0, 0.0), (0.0, 0.0), (0.0,), (0.0,))

    (ends,) = stage_ends([seconds], 500)

    assert ends.latest_s([0.0, 0.0], 500).tolist() == [0.0] * 500


def test_what_does_not_repeat_soon_is_run_to_the_end() -> None:
    """Two cycles of nearly the same rate: it takes long until the slower one has overtaken."""
    seconds = StageSeconds((1.0, 1.0, 1.0), (2.0, 2.0, 2.000003), (0.0, 0.0), (0.0, 0.0))

    (ends,) = stage_ends([seconds], 400)

    assert ends.by_stage_s(400)[0] == pytest.approx(makespan_s(seconds, 400), rel=1e-8)
