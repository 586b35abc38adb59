"""What a person sees while a job trains: a live panel on a terminal, lines of text elsewhere."""

import time
from collections import deque

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from planaria.core.plan import Plan
from planaria.observe.metrics import IterationRecord, Report
from planaria.planner.plans import pipeline_microbatches

_NUM_NOTES = 5
_NUM_RECENT = 10


def pipelines_table(plan: Plan, layer_names: tuple[str, ...]) -> Table:
    """One line per pipeline: its nodes, each with the layers it computes, and its microbatches."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("pipeline", justify="right")
    table.add_column("node: layers")
    table.add_column("microbatches", justify="right")
    counts = pipeline_microbatches(plan)
    for index, (pipeline, count) in enumerate(zip(plan.pipelines, counts, strict=True)):
        cells = Text()
        for stage_index, stage in enumerate(pipeline.template.stages):
            rank = pipeline.stage_ranks(stage_index)[0]
            node = rank // pipeline.template.devices_per_node
            first, last = layer_names[stage.first_layer], layer_names[stage.end_layer - 1]
            name = first if first == last else f"{first} .. {last}"
            cells.append(f"{node}: ", style="bold cyan")
            cells.append(f"{name}   ")
        table.add_row(str(index), cells, str(count))
    return table


class LiveDisplay:
    """Shows a running job on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_live = console.is_terminal
        self._progress = Progress(
            TextColumn("iteration"),
            MofNCompleteColumn(),
            BarColumn(bar_width=30),
            TimeRemainingColumn(),
            console=console,
        )
        self._recent: deque[IterationRecord] = deque(maxlen=_NUM_RECENT)
        self._notes: deque[str] = deque(maxlen=_NUM_NOTES)
        self._live: Live | None = None
        self._first_loss = 0.0
        self._table: Table | None = None
        self._num_nodes = 0

    def show_plan(
        self, plan: Plan, layer_names: tuple[str, ...], *, iterations: int, first: int
    ) -> None:
        """Shows the plan and, on a terminal, starts the live panel."""
        self._table = pipelines_table(plan, layer_names)
        self._num_nodes = len(plan.nodes)
        self._task = self._progress.add_task("train", total=iterations, completed=first)
        if self._is_live:
            self._live = Live(self._panel(), console=self._console, refresh_per_second=8)
            self._live.start()
        else:
            self._console.print(self._table)

    def committed(self, record: IterationRecord) -> None:
        """Shows a committed iteration."""
        if not self._recent:
            self._first_loss = record.loss
        self._recent.append(record)
        self._progress.update(self._task, completed=record.iteration + 1)
        if self._live is not None:
            self._live.update(self._panel())
        else:
            self._console.print(
                f"iteration {record.iteration}  loss {record.loss:.4f}  "
                f"{record.samples / record.seconds:.1f} samples/s"
            )

    def note(self, text: str) -> None:
        """Shows a line."""
        self._notes.append(f"{time.strftime('%H:%M:%S')}  {text}")
        if self._live is not None:
            self._live.update(self._panel())
        else:
            self._console.print(text)

    def stop(self) -> None:
        """Ends the live panel; it stays on the screen as it was last."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _panel(self) -> RenderableType:
        parts: list[RenderableType] = [self._table or Text(), self._progress]
        if self._recent:
            last = self._recent[-1]
            seconds = sum(record.seconds for record in self._recent)
            samples = sum(record.samples for record in self._recent)
            parts.append(
                Text.from_markup(
                    f"loss [bold]{last.loss:.4f}[/] (first {self._first_loss:.4f})   "
                    f"[bold]{samples / seconds:.1f}[/] samples/s   "
                    f"{1000 * last.seconds:.0f} ms an iteration, "
                    f"predicted {1000 * last.predicted_s:.0f}   {self._num_nodes} nodes"
                )
            )
        parts += [Text(note, style="dim") for note in self._notes]
        return Group(*parts)


def summary(report: Report) -> RenderableType:
    """The table at the end of a run, and its ledger."""
    records = report.iterations
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="bold")
    facts.add_column()
    samples = sum(record.samples for record in records)
    seconds = sum(record.seconds for record in records)
    tail = records[-3:]
    facts.add_row("iterations", f"{report.final.iteration}")
    facts.add_row(
        "loss",
        f"{records[0].loss:.4f} -> {sum(r.loss for r in tail) / len(tail):.4f} "
        f"(mean of the last {len(tail)})",
    )
    facts.add_row("throughput", f"{samples / seconds:.1f} samples/s")
    facts.add_row("checkpoint", report.final.checkpoint)
    facts.add_row("parameters", f"sha256 {report.final.parameters_sha256}")
    facts.add_row("optimizer", f"sha256 {report.final.optimizer_sha256}")
    ledger = Table(title="where the seconds went", title_justify="left", box=None, pad_edge=False)
    ledger.add_column("", style="bold")
    ledger.add_column("seconds", justify="right")
    ledger.add_column("share", justify="right")
    wall_s = report.ledger["wall"]
    for name, spent_s in report.ledger.items():
        if spent_s > 0:
            ledger.add_row(name, f"{spent_s:.2f}", f"{100 * spent_s / wall_s:.1f}%")
    return Group(Text(), facts, Text(), ledger)
