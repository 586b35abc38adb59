"""Gathers what a run tells while it runs into its report.

Source: DESIGN 7 (Report). It is told the time; it does not look.
"""

from collections.abc import Sequence

import numpy as np

from planaria.core.messages import IterationDone, MeasuredSpan, WorkerReady
from planaria.core.samples import sample_digest
from planaria.observe.ledger import Category, Ledger
from planaria.observe.metrics import IterationRecord, WorkerRecord


class Recorder:
    """The facts of one run.

    Attributes:
        ledger: where the seconds went so far.
        iterations: committed ones, in order.
        spans: of each committed iteration, by rank; empty unless workers were told to trace.
        events: what happened besides iterations.
    """

    def __init__(self, *, start_s: float, predicted_s: float, predicted_peak_bytes: int) -> None:
        self.ledger = Ledger(start_s, start_s)
        self.iterations: list[IterationRecord] = []
        self.spans: list[dict[int, tuple[MeasuredSpan, ...]]] = []
        self.events: list[dict[str, object]] = []
        self._workers: dict[int, tuple[WorkerReady, int, int]] = {}
        self._predicted_s = predicted_s
        self._predicted_peak_bytes = predicted_peak_bytes

    def began(
        self,
        workers: dict[int, WorkerReady],
        materialised: dict[int, int],
        *,
        epoch: int,
        now_s: float,
    ) -> None:
        """Training runs from now on."""
        self._workers = {
            rank: (worker, epoch, materialised[rank]) for rank, worker in workers.items()
        }
        self.ledger = self.ledger.enter(Category.USEFUL, now_s)

    def committed(self, reports: Sequence[IterationDone], *, now_s: float) -> IterationRecord:
        """An iteration is committed; `reports` are those of all ranks."""
        first = reports[0]
        samples = np.array([s for report in reports for s in report.samples], dtype=np.int64)
        record = IterationRecord(
            iteration=first.iteration,
            loss=first.loss,
            samples=len(samples),
            sample_digest=sample_digest(samples),
            seconds=max(report.seconds for report in reports),
            epoch=first.epoch,
            predicted_s=self._predicted_s,
            peak_bytes=max(report.peak_bytes for report in reports),
            predicted_peak_bytes=self._predicted_peak_bytes,
        )
        self.iterations.append(record)
        self.spans.append({report.rank: report.spans for report in reports if report.spans})
        stall_s = max(report.stall_s for report in reports)
        self.ledger = self.ledger.enter(Category.USEFUL, now_s).moved(
            stall_s, Category.USEFUL, Category.CHECKPOINT_STALL
        )
        if first.ends:
            self.ledger = self.ledger.enter(Category.CHECKPOINT_STALL, now_s)
        return record

    def noted(self, kind: str, *, iteration: int, reason: str) -> None:
        """Something else happened."""
        self.events.append({"kind": kind, "iteration": iteration, "reason": reason})

    def workers(self) -> tuple[WorkerRecord, ...]:
        """The workers of the run, by rank."""
        return tuple(
            WorkerRecord(
                node=worker.node,
                rank=rank,
                pid=worker.pid,
                pid_start=worker.pid_start,
                first_epoch=epoch,
                last_epoch=epoch,
                layers_materialised=materialised,
            )
            for rank, (worker, epoch, materialised) in sorted(self._workers.items())
        )
