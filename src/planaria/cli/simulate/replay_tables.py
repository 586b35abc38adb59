"""Replays of a real run: tables for a terminal, and JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from planaria.job.replays.calibration import MeasuredCost
from planaria.job.replays.decisions import DecisionAgain
from planaria.job.replays.recorded_run import RecordedRun
from planaria.job.replays.simulated_run import ReplayedRun, SimulatedDecision
from planaria.observe.ledger import Category
from planaria.observe.metrics import EventRecord
from planaria.show.simulations import share_cell
from planaria.show.words import count_text

VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class ComparedDecision:
    """A decision of a run beside one of its replay.

    Attributes:
        at_s: time of the event, in seconds since the job started.
        event: event in words.
        recorded: "POLICY: ANSWER" of the run; "": the run had no such decision.
        replayed: the same of the replay.
    """

    at_s: float
    event: str
    recorded: str
    replayed: str
    is_same: bool


def with_inputs(decisions: Sequence[DecisionAgain]) -> tuple[ComparedDecision, ...]:
    """The decisions that were made again from recorded inputs."""
    return tuple(
        ComparedDecision(
            again.events[0].at_s,
            ", ".join(map(_event_text, again.events)),
            again.answer,
            again.answer_again,
            again.is_same,
        )
        for again in decisions
    )


def without_inputs(run: RecordedRun, simulated: ReplayedRun) -> tuple[ComparedDecision, ...]:
    """The decisions of a run and of its simulation, which decides from what it simulates itself.

    Those that answer the same loss or change are beside each other.
    """
    stood_for = {id(event) for event in simulated.stood_for}
    left = list(simulated.decisions)
    compared = []
    for events in run.decisions:
        event = events[-1]
        if id(event) in stood_for:
            continue
        match = next(
            (decision for decision in left if _decision_concern(decision) == _event_concern(event)),
            None,
        )
        if match is not None:
            left.remove(match)
        answer, answer_again = (
            f"{event.policy}: {event.answer}",
            match.answer if match else "",
        )
        text = ", ".join(map(_event_text, events))
        is_same = answer == answer_again
        compared.append(ComparedDecision(events[0].at_s, text, answer, answer_again, is_same))
    compared += [
        ComparedDecision(decision.at_s, _text(decision), "", decision.answer, False)
        for decision in left
    ]
    return tuple(sorted(compared, key=lambda decision: decision.at_s))


_Concern = tuple[str, tuple[int, ...]]


def _decision_concern(decision: SimulatedDecision) -> _Concern:
    lost, changed = decision.inputs.lost, decision.inputs.changed
    if lost is not None:
        return "lost", lost.nodes
    assert changed is not None
    return _change_concern(changed.joined, changed.leaving)


def _event_concern(event: EventRecord) -> _Concern:
    assert event.inputs is not None
    lost, changed = event.inputs.lost, event.inputs.changed
    if lost is not None:
        return "lost", lost.nodes
    assert changed is not None
    return _change_concern(changed.joined, changed.leaving)


def _change_concern(joined: tuple[int, ...], leaving: tuple[int, ...]) -> _Concern:
    if joined:
        return "joined", joined
    return ("leaving", leaving) if leaving else ("reformed", ())


def _text(decision: SimulatedDecision) -> str:
    kind, nodes = _decision_concern(decision)
    return f"{kind} {', '.join(map(str, nodes))}".strip()


def _event_text(event: EventRecord) -> str:
    if event.kind == "reformed" or not event.nodes:
        return event.kind
    return f"{event.kind} {', '.join(map(str, event.nodes))}"


# -- JSON -----------------------------------------------------------------------------------------


def decisions_json(run: RecordedRun, decisions: Sequence[ComparedDecision]) -> dict[str, Any]:
    """The content of `planaria simulate --replay --json`."""
    return {
        "version": VERSION,
        "report": run.name,
        "decisions": [asdict(decision) for decision in decisions],
        "num_different": sum(not decision.is_same for decision in decisions),
    }


def replay_json(
    run: RecordedRun, costs: Sequence[MeasuredCost], simulated: ReplayedRun
) -> dict[str, Any]:
    """The content of `planaria simulate --replay --without-inputs --json`."""
    return {
        **decisions_json(run, without_inputs(run, simulated)),
        "costs": costs_json(costs),
        "real": real_json(run),
        "simulated": _simulated_json(run, simulated),
        "left_out": [_event_text(event) for event in simulated.left_out],
        "stood_still_for": [_event_text(event) for event in simulated.stood_for],
    }


def policies_json(
    run: RecordedRun,
    costs: Sequence[MeasuredCost],
    policies: Mapping[str, ReplayedRun | str],
) -> dict[str, Any]:
    """The content of `planaria simulate --replay --policy --json`."""
    return {
        "version": VERSION,
        "report": run.name,
        "costs": costs_json(costs),
        "real": real_json(run),
        "policies": {
            name: {"error": replayed}
            if isinstance(replayed, str)
            else _simulated_json(run, replayed)
            for name, replayed in policies.items()
        },
    }


def costs_json(costs: Sequence[MeasuredCost]) -> dict[str, Any]:
    """The costs by their keys in `[costs]`; those from no event are defaults."""
    return {
        cost.name: {
            "value": cost.value,
            "events": cost.num_events,
            "low": cost.low if cost.num_events else None,
            "high": cost.high if cost.num_events else None,
        }
        for cost in costs
    }


def real_json(run: RecordedRun) -> dict[str, Any]:
    """The run as it was."""
    training_s = run.trained_until_s - run.startup_s
    return {
        "policy": run.planned.config.resilience.policy,
        "samples": run.samples,
        "wall_s": run.trained_until_s,
        "goodput_samples_per_s": run.samples / run.trained_until_s,
        "trained_samples_per_s": run.samples / training_s,
        "ledger": dict(run.ledger),
        "wasted": {tier: dict(of) for tier, of in run.wasted.items()},
    }


def _simulated_json(run: RecordedRun, simulated: ReplayedRun) -> dict[str, Any]:
    real = real_json(run)
    return {
        "policy": simulated.policy,
        "samples": simulated.samples,
        "wall_s": simulated.wall_s,
        "goodput_samples_per_s": simulated.samples_per_s,
        "trained_samples_per_s": simulated.trained_samples_per_s,
        "over_real": simulated.samples_per_s / real["goodput_samples_per_s"],
        "trained_over_real": simulated.trained_samples_per_s / real["trained_samples_per_s"],
        "redone_iterations": simulated.num_redone,
        "restarts": simulated.num_restarts,
        "ledger": dict(simulated.ledger),
        "wasted": {tier: dict(of) for tier, of in simulated.wasted.items()},
    }


# -- for a terminal -------------------------------------------------------------------------------


def costs_table(source: str, costs: Sequence[MeasuredCost]) -> Group:
    """The costs, from how many events each is, and their spread."""
    table = _table("costs", "value", "events", "least to most")
    for cost in costs:
        spread = f"{cost.low:.4g} to {cost.high:.4g}" if cost.num_events > 1 else ""
        events = str(cost.num_events) if cost.num_events else "default"
        table.add_row(cost.name, f"{cost.value:.4g}", events, spread)
    return Group(Text(f"costs as {source} had them:"), table)


def decisions_table(decisions: Sequence[ComparedDecision]) -> Group:
    """The decisions of a run beside those of its replay, and how many differ."""
    table = _table("at, s", "event", "run", "replay", "")
    for decision in decisions:
        mark = "same" if decision.is_same else "DIFFERS"
        row = (
            f"{decision.at_s:.2f}",
            decision.event,
            decision.recorded or "-",
            decision.replayed or "-",
            mark,
        )
        table.add_row(*map(Text, row))
    number = sum(not decision.is_same for decision in decisions)
    summary = f"{count_text(len(decisions), 'decision')}, {number} of them different"
    return Group(table, Text(summary))


def goodput_text(run: RecordedRun, simulated: ReplayedRun) -> Iterator[str]:
    """Lines with real and simulated goodput, and with what was not simulated."""
    real, replay = real_json(run), _simulated_json(run, simulated)
    for name, key, ratio in (
        ("goodput", "goodput_samples_per_s", "over_real"),
        ("goodput while training", "trained_samples_per_s", "trained_over_real"),
    ):
        yield (
            f"{name}: {real[key]:.4g} samples/s real, {replay[key]:.4g} simulated, "
            f"ratio {replay[ratio]:.3f}"
        )
    if simulated.stood_for:
        texts = ", ".join(map(_event_text, simulated.stood_for))
        yield f"training stood still for as long as in the run, undecided: {texts}"
    if simulated.left_out:
        yield f"not simulated: {', '.join(map(_event_text, simulated.left_out))}"


def policies_table(run: RecordedRun, policies: Mapping[str, ReplayedRun | str]) -> Group:
    """What each policy would have given, beside what was run."""
    real = real_json(run)
    table = _table(
        "policy",
        "samples/s",
        "while\ntraining",
        "to run",
        "redone\niterations",
        "restarts",
    )
    spent = [
        c for c in Category if any(_share(replayed, c) > 0.0 for replayed in policies.values())
    ]
    ledger = _table("policy", *(str(category).replace("_", "\n") for category in spent))
    table.add_row(
        f"{real['policy']}, as run",
        f"{real['goodput_samples_per_s']:.4g}",
        f"{real['trained_samples_per_s']:.4g}",
        *("", "", ""),
    )
    for name, replayed in policies.items():
        if isinstance(replayed, str):
            continue
        ratio = replayed.trained_samples_per_s / real["trained_samples_per_s"]
        table.add_row(
            name,
            f"{replayed.samples_per_s:.4g}",
            f"{replayed.trained_samples_per_s:.4g}",
            f"{ratio:.3f}x",
            str(replayed.num_redone),
            str(replayed.num_restarts),
        )
        ledger.add_row(name, *(share_cell(_share(replayed, category)) for category in spent))
    heading = Text(f"{run.name}: {count_text(len(run.iterations), 'iteration')}", style="bold")
    errors = [
        Text(f"{name}: {replayed}")
        for name, replayed in policies.items()
        if isinstance(replayed, str)
    ]
    return Group(heading, table, *errors, Text("Share of the time:"), ledger)


def _share(replayed: ReplayedRun | str, category: Category) -> float:
    if isinstance(replayed, str):
        return 0.0
    return replayed.ledger[category] / replayed.ledger["wall"]


def _table(first: str, *headings: str) -> Table:
    """An empty table; its cells are wrapped, never cut."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    return table
