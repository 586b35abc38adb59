"""Shows a job on a console while it runs, even if nobody reads the console; see nodes/output.py."""

import time
from collections.abc import Callable
from functools import partial

from rich.console import Console

from planaria.core.plan import Plan
from planaria.job.planning import Planned, short_actions_text
from planaria.job.training_job import TrainingResult
from planaria.nodes.output import Outlet, finish
from planaria.observe.metrics import IterationRecord
from planaria.show.live import LiveDisplay, summary
from planaria.show.words import count_text


class ConsoleDisplay:
    """A live display of a job (see `job.Display`) that never makes the job wait."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._display = LiveDisplay(console)
        self._outlet = Outlet(self._note_now)
        self._last: Callable[[], None] | None = None

    @property
    def output(self) -> Callable[[str], None] | None:
        """A function that shows a line printed by the job's own code; None without a terminal.

        It may block, so it is to be called in a thread of its own.
        """
        return self._display.show_printed_line if self._console.is_interactive else None

    def show_step(self, text: str) -> None:
        self._outlet.post(partial(self._display.show_step, text))

    def show_plan(self, planned: Planned) -> None:
        self._outlet.post(partial(self._show_plan_now, planned))

    def _show_plan_now(self, planned: Planned) -> None:
        profile = planned.prepared.profile
        assert profile is not None
        self._note_now(
            f"{planned.prepared.num_parameters / 1e6:.2f} M parameters in {len(profile.layers)} "
            f"layers, {planned.prepared.num_samples.data} samples; "
            f"{count_text(len(planned.plan.nodes), 'node')} in "
            f"{count_text(len(planned.plan.pipelines), 'pipeline')}"
        )
        self._display.show_plan(
            planned.plan,
            tuple(layer.name for layer in profile.layers),
            iterations=planned.config.training.iterations,
            first=planned.resumed.iteration if planned.resumed else 0,
        )
        if short := short_actions_text(planned):
            self._note_now(short)
        for note in planned.prepared.notes:
            self._note_now(note)

    def show_training(self) -> None:
        self.note("training")

    def show_iteration(self, record: IterationRecord) -> None:
        # On a terminal an iteration is shown in the panel, and takes no line of its own.
        num_lines = 0 if self._console.is_interactive else 1
        self._outlet.post(partial(self._display.show_iteration, record), num_lines=num_lines)

    def show_next_plan(self, plan: Plan) -> None:
        self._outlet.post(partial(self._display.show_next_plan, plan, at_s=time.time()))

    def note(self, text: str) -> None:
        note = partial(self._display.note, text, at_s=time.time())
        self._outlet.post(note, num_bytes=len(text))

    def _note_now(self, text: str) -> None:
        self._display.note(text, at_s=time.time())

    def end(self, result: TrainingResult) -> None:
        """Has `close` print the summary of a job, unless it failed."""
        if result.error is None:
            self._last = partial(self._sum_up, result)

    def _sum_up(self, result: TrainingResult) -> None:
        self._console.print(summary(result.report), soft_wrap=True)
        if result.stopped:
            self._console.print("stopped; go on with --resume")

    def close(self) -> None:
        """Ends the live display after everything is shown, or when nobody reads it."""
        last = () if self._last is None else (self._last,)
        finish(self._outlet, self._display.stop, *last)
