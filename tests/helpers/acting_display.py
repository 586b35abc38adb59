"""A display that acts when iterations are committed, for tests that need a moment of a run."""

from collections.abc import Callable

from planaria.job.training_job import SilentDisplay
from planaria.observe.metrics import IterationRecord


class At(SilentDisplay):
    """Does things when iterations are committed.

    Attributes:
        acts: what, by iteration.
        notes: what was said.
    """

    def __init__(self, acts: dict[int, Callable[[], object]]) -> None:
        self.acts = acts
        self.notes: list[str] = []

    def show_iteration(self, record: IterationRecord) -> None:
        act = self.acts.pop(record.iteration, None)
        if act is not None:
            act()

    def note(self, text: str) -> None:
        self.notes.append(text)
