"""The display of a running job: a live panel on a terminal, lines of text elsewhere.

The plan, notes, and what the job's own code prints are printed once, above the panel. The panel
itself has two lines, so it always fits the screen.
"""

import time
from collections import deque
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from planaria.core.plan import Plan
from planaria.observe.metrics import IterationRecord, Report
from planaria.planner.plans import pipeline_microbatches
from planaria.show.comparison import comparison_table
from planaria.show.words import count_text

_NUM_RECENT = 10


def pipelines_table(plan: Plan, layer_names: tuple[str, ...]) -> Table:
    """The plan as a table with a row per stage: pipeline, microbatches, node and layers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("pipeline", "microbatches", "node"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("layers", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, overflow="ellipsis")
    counts = pipeline_microbatches(plan)
    for index, (pipeline, count) in enumerate(zip(plan.pipelines, counts, strict=True)):
        head = (str(index), str(count))
        for stage_index, stage in enumerate(pipeline.template.stages):
            node = pipeline.stage_ranks(stage_index)[0] // pipeline.template.devices_per_node
            first, last = stage.first_layer, stage.end_layer - 1
            table.add_row(
                *head,
                Text(str(node), style="bold cyan"),
                f"{first}" if first == last else f"{first}-{last}",
                Text(_names(layer_names[first], layer_names[last]), style="dim"),
            )
            head = ("", "")
    return table


def _names(first: str, last: str) -> str:
    """A range of two layers' names, which gives their common prefix once."""
    if first == last:
        return first
    parts, others = first.split("."), last.split(".")
    alike = 0
    while alike < min(len(parts), len(others)) - 1 and parts[alike] == others[alike]:
        alike += 1
    return f"{first} .. {'.'.join(others[alike:])}"


class LiveDisplay:
    """Shows a running job on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_live = console.is_interactive
        self._progress = Progress(
            TextColumn("iteration"),
            MofNCompleteColumn(),
            BarColumn(bar_width=30),
            TimeRemainingColumn(),
            console=console,
        )
        self._recent: deque[IterationRecord] = deque(maxlen=_NUM_RECENT)
        self._spinner: Spinner | None = None
        self._live: Live | None = None
        self._first_loss = 0.0
        self._num_nodes = 0

    def show_step(self, text: str) -> None:
        """Shows what is being done before there is a plan."""
        if not self._is_live:
            self._line(f"{text} ...")
        elif self._spinner is None:
            self._spinner = Spinner("dots", text=text, style="status.spinner")
            self._start(self._spinner, per_second=12.5, is_transient=True)
        else:
            self._spinner.update(text=text)

    def show_plan(
        self, plan: Plan, layer_names: tuple[str, ...], *, iterations: int, first: int
    ) -> None:
        """Shows the plan and, on a terminal, starts the live panel.

        Args:
            iterations: number of iterations of the job.
            first: number of iterations that were committed before this run.
        """
        self.stop()
        self._console.print(pipelines_table(plan, layer_names))
        self._num_nodes = len(plan.nodes)
        self._task = self._progress.add_task("train", total=iterations, completed=first)
        if self._is_live:
            self._start(self._panel(), per_second=8.0, is_transient=False)

    def show_iteration(self, record: IterationRecord) -> None:
        """Shows a committed iteration."""
        if not self._recent:
            self._first_loss = record.loss
        self._recent.append(record)
        self._progress.update(self._task, completed=record.iteration + 1)
        if self._live is not None:
            self._live.update(self._panel())
        else:
            self._line(
                f"iteration {record.iteration}  loss {record.loss:.4f}  "
                f"{record.samples / record.seconds:.1f} samples/s"
            )

    def show_next_plan(self, plan: Plan, *, at_s: float) -> None:
        """Shows that the job goes on with another plan since `at_s` (time.time())."""
        self._num_nodes = len(plan.nodes)
        alive = [set(pipeline.nodes).difference(plan.gone) for pipeline in plan.pipelines]
        sizes = "+".join(str(len(nodes)) for nodes in alive if nodes)
        go = "goes" if len(plan.nodes) == 1 else "go"
        self.note(
            f"{count_text(len(plan.nodes), 'node')} {go} on in pipelines of {sizes}", at_s=at_s
        )

    def note(self, text: str, *, at_s: float) -> None:
        """Shows a line; on a terminal, the time of day `at_s` (time.time()) precedes it."""
        if self._is_live:
            at = time.strftime("%H:%M:%S", time.localtime(at_s))
            self._line(f"{at}  {text}", style="dim")
        else:
            self._line(text)

    def show_printed_line(self, line: str) -> None:
        """Shows a line that the job's own code printed; any thread may call it."""
        self._console.print(Text.from_ansi(line), soft_wrap=True)

    def stop(self) -> None:
        """Ends the spinner or the panel; the panel's last state stays on the screen."""
        self._spinner = None
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _start(self, moving: RenderableType, *, per_second: float, is_transient: bool) -> None:
        """Shows something that moves.

        sys.stdout is not redirected to the console: other threads that print would block on a
        terminal that nobody reads.
        """
        self._live = Live(
            moving,
            console=self._console,
            refresh_per_second=per_second,
            transient=is_transient,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def _line(self, text: str, *, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)

    def _panel(self) -> RenderableType:
        parts: list[RenderableType] = [self._progress]
        if self._recent:
            last = self._recent[-1]
            seconds = sum(record.seconds for record in self._recent)
            samples = sum(record.samples for record in self._recent)
            facts = (
                f"loss [bold]{last.loss:.4f}[/] (first {self._first_loss:.4f})",
                f"[bold]{samples / seconds:.1f}[/] samples/s",
                f"{1000 * last.seconds:.0f} ms (predicted {1000 * last.predicted_s:.0f})",
                count_text(self._num_nodes, "node"),
            )
            parts.append(Text.from_markup("   ".join(facts)))
        return Group(*parts)


def summary(report: Report) -> RenderableType:
    """The summary of a run: its facts, where its time went, and predicted beside measured.

    Facts have a line each and are not wrapped.
    """
    facts = {
        "iterations": f"{report.final.iteration}",
        **_training_facts(report.iterations),
        "checkpoint": report.final.checkpoint,
        "sha256 of": "",
        " parameters": report.final.parameters_sha256,
        " optimizer": report.final.optimizer_sha256,
    }
    lines = Text("\n")
    for name, value in facts.items():
        lines.append(f"{name:<13}", style="bold").append(f"{value}\n")
    ledger = Table(title="where the seconds went", title_justify="left", box=None, pad_edge=False)
    ledger.add_column("", style="bold")
    ledger.add_column("seconds", justify="right")
    ledger.add_column("share", justify="right")
    wall_s = report.ledger["wall"]
    for name, spent_s in report.ledger.items():
        if spent_s > 0:
            ledger.add_row(name, f"{spent_s:.2f}", f"{100 * spent_s / wall_s:.1f}%")
    return Group(lines, ledger, Text(), comparison_table(report))


def _training_facts(records: Sequence[IterationRecord]) -> dict[str, str]:
    """What this run has trained; nothing if the head before it had committed all iterations."""
    if not records:
        return {}
    samples = sum(record.samples for record in records)
    seconds = sum(record.seconds for record in records)
    tail = records[-3:]
    loss = sum(record.loss for record in tail) / len(tail)
    return {
        "loss": f"{records[0].loss:.4f} -> {loss:.4f} (mean of the last {len(tail)})",
        "throughput": f"{samples / seconds:.1f} samples/s",
    }
