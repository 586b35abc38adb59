"""The recorder: one record per committed iteration, and the seconds where they belong."""

from dataclasses import asdict

import numpy as np

from planaria.core.messages import IterationDone, MeasuredSpan, WorkerReady
from planaria.core.samples import sample_digest
from planaria.observe.recorder import Recorder

SPAN = MeasuredSpan("compute", "0.0F0", 0.0, 0.5)


def report(
    rank: int, iteration: int, samples: tuple[int, ...], ends: bool = False
) -> IterationDone:
    """What a rank says; rank 1 is the slow one, and the one that needs most memory."""
    return IterationDone(
        rank=rank,
        epoch=3,
        iteration=iteration,
        loss=2.5,
        samples=samples,
        seconds=1.0 + rank,
        stall_s=0.25 * rank,
        peak_bytes=100 * (rank + 1),
        ends=ends,
        spans=(SPAN,) if rank == 1 else (),
    )


def recorder() -> Recorder:
    """A run that started at second 10 and began to train at second 14."""
    started = Recorder(start_s=10.0, predicted_s=0.5, predicted_peak_bytes=999)
    workers = {
        rank: WorkerReady(node=rank + 5, rank=rank, pid=70 + rank, pid_start=8.0, host="h", port=1)
        for rank in (1, 0)
    }
    started.began(workers, {0: 3, 1: 4}, epoch=3, now_s=14.0)
    return started


def test_an_iteration_is_recorded_as_the_report_has_it() -> None:
    """Samples of all ranks, the longest time, the largest memory, the prediction beside it."""
    record = recorder().committed([report(0, 6, (4, 2)), report(1, 6, (9,))], now_s=16.0)

    assert asdict(record) == {
        "iteration": 6,
        "loss": 2.5,
        "samples": 3,
        "sample_digest": sample_digest(np.array([2, 4, 9])),
        "seconds": 2.0,
        "epoch": 3,
        "predicted_s": 0.5,
        "peak_bytes": 200,
        "predicted_peak_bytes": 999,
    }


def test_spans_are_kept_of_the_ranks_that_sent_them() -> None:
    """One entry per iteration, also without tracing, so that they keep in step."""
    run = recorder()
    run.committed([report(0, 6, ()), report(1, 6, ())], now_s=16.0)
    run.committed([report(0, 7, ())], now_s=17.0)

    assert [record.iteration for record in run.iterations] == [6, 7]
    assert run.spans == [{1: (SPAN,)}, {}]


def test_the_seconds_of_a_run_go_where_they_belong() -> None:
    """Startup, training less what saves held up, and the wait for the last save."""
    run = recorder()
    run.committed([report(0, 6, ()), report(1, 6, ())], now_s=16.0)
    run.committed([report(0, 7, (), ends=True), report(1, 7, (), ends=True)], now_s=18.0)
    run.ledger = run.ledger.enter(run.ledger.category, 18.5)
    parts = {name: seconds for name, seconds in run.ledger.parts().items() if seconds}

    expected = {"startup": 4.0, "useful": 3.5, "checkpoint_stall": 1.0, "wall": 8.5}
    assert parts == expected


def test_workers_are_listed_by_rank() -> None:
    """Each with its process and what it did."""
    workers = recorder().workers()

    assert [asdict(worker) for worker in workers] == [
        {
            "node": rank + 5,
            "rank": rank,
            "pid": 70 + rank,
            "pid_start": 8.0,
            "first_epoch": 3,
            "last_epoch": 3,
            "layers_materialised": 3 + rank,
        }
        for rank in (0, 1)
    ]


def test_events_say_what_happened_when_and_why() -> None:
    """A save that failed is one."""
    run = recorder()
    run.noted("unsaved", iteration=4, reason="disk full")

    assert run.events == [{"kind": "unsaved", "iteration": 4, "reason": "disk full"}]
