"""Takes what the launcher tells about a running job to its report and to whoever shows it."""

import time
from collections.abc import Mapping
from typing import Any, Protocol

from planaria.checkpoint.tiers import Manifest
from planaria.coordinator.coordinator import Began, Committed, Discard, JobState
from planaria.observe.metrics import IterationRecord
from planaria.observe.recorder import Recorder

# The fields of an event in the report; what an event does not know of itself keeps these.
_EVENT: Mapping[str, Any] = {
    "kind": "",
    "nodes": (),
    "iteration": 0,
    "step": "",
    "fired": True,
    "policy": "",
    "answer": "",
    "candidates": (),
    "detect_s": 0.0,
    "decide_s": 0.0,
    "regroup_s": 0.0,
    "transfer_s": 0.0,
    "transfer_bytes": 0,
    "source_tier": "",
    "downtime_s": 0.0,
    "predicted_downtime_s": 0.0,
    "redone_samples": 0,
    "reason": "",
}


class Progress(Protocol):
    """Who shows a job once its nodes start."""

    def began(self) -> None:
        """Training runs."""

    def committed(self, record: IterationRecord) -> None:
        """An iteration is committed."""

    def note(self, text: str) -> None:
        """Something else happened that a person should know."""


class Watcher:
    """Takes what the launcher tells to the recorder and the display."""

    def __init__(self, recorder: Recorder, display: Progress) -> None:
        self._recorder = recorder
        self._display = display
        self._starting_s = self._began_s = time.monotonic()
        self._committed_s = self._began_s
        self._checkpoint_s: list[float] = []

    def starting(self, state: JobState) -> None:
        self._starting_s = time.monotonic()
        self._display.note(f"{len(state.plan.nodes)} nodes are up, they take their layers")

    def began(self, state: JobState, event: Began) -> None:
        self._began_s = self._committed_s = time.monotonic()
        self._recorder.began(
            dict(state.workers),
            dict(event.materialised),
            epoch=state.plan.epoch,
            now_s=self._began_s,
        )
        self._display.began()

    def committed(self, state: JobState, event: Committed) -> None:
        assert event.reports[0].epoch == state.plan.epoch
        self._committed_s = time.monotonic()
        record = self._recorder.committed(event.reports, now_s=self._committed_s)
        self._display.committed(record)

    def saved(self, manifest: Manifest) -> None:
        self._checkpoint_s.append(time.monotonic() - self._committed_s)
        self._display.note(f"saved iteration {manifest.iteration}")

    def unsaved(self, event: Discard) -> None:
        self._recorder.noted("save_failed", iteration=event.iteration, reason=event.reason)
        self._display.note(f"iteration {event.iteration} was not saved: {event.reason}")

    def warned(self, text: str) -> None:
        self._display.note(text)

    def stopping(self) -> None:
        self._display.note("stopping at the next commit; Ctrl-C again stops at once, unsaved")

    def failed(self, reason: str, *, kind: str) -> None:
        """Training ended before its time."""
        records = self._recorder.iterations
        iteration = records[-1].iteration + 1 if records else 0
        self._recorder.noted(kind, iteration=iteration, reason=reason)

    def events(self) -> tuple[dict[str, Any], ...]:
        """The report's events, every field there."""
        return tuple({**_EVENT, **event} for event in self._recorder.events)

    def checkpoints(self, *, every: int, is_resumed: bool) -> dict[str, float]:
        """The report's table: seconds from a commit to its complete save, and to read one."""
        saves = self._checkpoint_s
        return {
            "every": float(every),
            "checkpoint_s": sum(saves) / len(saves) if saves else 0.0,
            "retrieval_s": self._began_s - self._starting_s if is_resumed else 0.0,
            "expected_wasted_s": 0.0,
            "idle_used_s": 0.0,
            "idle_left_s": 0.0,
        }
