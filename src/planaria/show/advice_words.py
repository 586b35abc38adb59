"""What pays most on a cluster whose nodes fail: in words, as a table, as keys of a job file, JSON.

All intervals of what the advice gains hold at once; a difference whose interval contains 0 is
called none that the seeds show.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from statistics import fmean
from typing import Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planaria.show.words import count_text, duration_text, share_text
from planaria.simulator.economics.advice import CLOSE, Advice, Choice
from planaria.simulator.economics.compare import Interval, JobOutcome, interval
from planaria.simulator.economics.question import Question, Recommendation

VERSION: Final = 1
_S_PER_HOUR: Final = 3600.0
_AXES: Final = {
    "failures_tolerated": "The choice of f",
    "num_spares": "The number of spares",
    "save_min": "The time between saves",
    "copies": "Keeping copies in memory",
}


def advice_text(answer: Recommendation) -> Group:
    """The answer for a terminal."""
    advice = answer.advice
    if not any(outcome.samples for outcome in advice.outcomes[advice.leader]):
        return Group(_heading(answer), Text("No choice trains anything on this cluster."))
    parts: list[RenderableType] = [
        _heading(answer),
        Text(),
        Text(_advised_text(answer), style="bold"),
        _dashed_lines(_reasons_why(answer)),
        _table(answer),
        Text(_intervals_text(answer), style="dim"),
    ]
    refused = [
        *_refusals(advice),
        *(f"{p} was left out: {why}" for p, why in answer.left_out.items()),
    ]
    parts += [Text(f"Not played: {line}.") for line in refused]
    parts += [Text("\nIn the job file:\n"), Padding(Text(_job_keys(answer)), (0, 0, 0, 4))]
    return Group(*parts)


def _dashed_lines(lines: Iterable[str]) -> Table:
    """The lines, each with a dash before it."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    for line in lines:
        grid.add_row("-", Text(line))
    return grid


def _heading(answer: Recommendation) -> Text:
    question, setting = answer.question, answer.scenario.setting
    batch = setting.job.training.global_batch_size
    hours = answer.scenario.horizon_s / _S_PER_HOUR
    return Text(
        f"{setting.model} on {count_text(question.nodes, 'node')}, spares included, {batch} "
        f"samples an iteration. {_failures_text(question)} "
        f"{count_text(answer.num_seeds, 'run')} of {hours:,.4g} h."
    )


def _failures_text(question: Question) -> str:
    table = question.failures
    if not question.losses_per_hour:
        return "No node is lost."
    every = duration_text(_S_PER_HOUR / question.losses_per_hour)
    source = f" ({table['preset']})" if "preset" in table else ""
    notice = f", with a notice of {duration_text(table['notice_s'])}" if "notice_s" in table else ""
    back = ""
    if table.get("repair") == "never":
        back = " None comes back."
    elif "repair_s" in table:
        back = f" It is back after {duration_text(table['repair_s'])} on average."
    return f"A node is lost every {every}{source}{notice}.{back}"


# -- in words -------------------------------------------------------------------------------------


def _advised_text(answer: Recommendation) -> str:
    """What to use, and what that gives."""
    leader = answer.advice.leader
    runs = answer.advice.outcomes[leader]
    goodput = interval([run.samples_per_s for run in runs])
    text = f"Use {_choice_text(leader)}: {goodput.mean:.4g} samples/s"
    if goodput.low is not None:
        text += f" ({goodput.low:.4g} to {goodput.high:.4g})"
    dollars = _dollars_per_million(answer, runs)
    text = f"{text}, ${dollars:,.2f} per million samples." if dollars else f"{text}."
    alike = [
        choice.policy
        for choice, gain in answer.advice.gains.items()
        if choice.policy not in {"", leader.policy} and gain is not None and _is_noise(gain)
    ]
    if alike:
        text += f" These runs do not tell it apart from policy {' or '.join(alike)}."
    return text


def _choice_text(choice: Choice) -> str:
    save = f"a save every {choice.save_min} min"
    spares = count_text(choice.num_spares, "spare") if choice.num_spares else "no spares"
    if choice.system == "restart":
        return f"restarts under torchrun on the nodes that are there, {save}"
    if choice.system == "static":
        return f"restarts under torchrun on a fixed number of nodes, {spares}, {save}"
    copies = f" and {choice.copies} copies in memory" if choice.copies else ""
    return f"policy {choice.policy} with f = {choice.failures_tolerated}, {spares}, {save}{copies}"


def _reasons_why(answer: Recommendation) -> Iterable[str]:
    """A sentence for each question that the advice answers."""
    advice = answer.advice
    leader = advice.leader
    others = [c for c in advice.gains if c.policy and c.policy != leader.policy]
    next_best = _best(advice, others)
    if next_best is not None:
        yield _gain_text(advice, next_best, f"policy {next_best.policy}, the next best")
    for system, name in (
        ("restart", "restarts under torchrun"),
        ("static", "restarts under torchrun on a static cluster"),
    ):
        best = _best(advice, [c for c in advice.gains if c.system == system])
        if best is not None:
            spares = f" with {count_text(best.num_spares, 'spare')}" if best.num_spares else ""
            every = f"saving every {best.save_min} min"
            yield _gain_text(advice, best, f"{name}{spares}, {every}")
    whole = replace(leader, whole_backwards=True)
    if whole in advice.gains:
        name = f"policy {leader.policy} with whole backwards, as under torchrun"
        yield _gain_text(advice, whole, name)
    for axis, words in _AXES.items():
        yield _axis_text(advice, axis, words)
    yield from _spares_text(answer)


def _best(advice: Advice, choices: Sequence[Choice]) -> Choice | None:
    return max(choices, key=lambda choice: _goodput(advice.outcomes[choice]), default=None)


def _goodput(runs: Sequence[JobOutcome]) -> float:
    return fmean(run.samples_per_s for run in runs)


def _gain_text(advice: Advice, other: Choice, name: str) -> str:
    """What the advice gains over another choice."""
    gain = advice.gains[other]
    if gain is None:
        return f"Some runs train nothing with {name}."
    if gain.low == gain.high == 0.0:
        return f"Each run trains as much with {name}."
    if _is_noise(gain):
        return f"These runs show no difference from {name} ({_percent_range(gain)})."
    word = "more" if gain.mean > 0.0 else "less"
    return f"{share_text(abs(gain.mean))} ({_percent_range(_size(gain))}) {word} than {name}."


def _is_noise(gain: Interval) -> bool:
    """Whether the seeds do not show that there is a difference."""
    return gain.low is None or gain.high is None or gain.low <= 0.0 <= gain.high


def _percent_range(of: Interval) -> str:
    return f"{share_text(of.low or 0.0)} to {share_text(of.high or 0.0)}"


def _axis_text(advice: Advice, axis: str, words: str) -> str:
    """How much one respect of the choice matters, the others being as advised."""
    rivals = sorted(_neighbours(advice, axis), key=lambda choice: getattr(choice, axis))
    if not rivals:
        return f"{words} could not be varied."
    costs = {
        getattr(rival, axis): gain
        for rival in rivals
        if (gain := advice.gains[rival]) is None
        or (not _is_noise(gain) and abs(gain.mean) >= CLOSE)
    }

    def size_of(value: int) -> float:
        gain = costs[value]
        return abs(gain.mean) if gain else inf

    if not costs:
        first, last = (getattr(rivals[end], axis) for end in (0, -1))
        span = _value_text(axis, last)
        span = span if first == last else f"{_value_text(axis, first)} to {span}"
        is_unused = axis in {"save_min", "copies"} and not any(
            run.num_redone or run.num_restarts for run in advice.outcomes[advice.leader]
        )
        why = ", since none went back to an older state" if is_unused else ""
        return f"{words} makes no difference that these runs show ({span}){why}."
    ends = dict.fromkeys((min(costs, key=size_of), max(costs, key=size_of)))
    parts = [_more_text(costs[value], _value_text(axis, value)) for value in ends]
    return f"{words} matters: {', '.join(parts)}."


def _more_text(gain: Interval | None, value: str) -> str:
    if gain is None:
        return f"with {value} some runs train nothing"
    word = "more" if gain.mean > 0.0 else "less"
    size = f"{share_text(abs(gain.mean))} ({_percent_range(_size(gain))})"
    return f"{size} {word} as advised than with {value}"


def _size(gain: Interval) -> Interval:
    """The interval of a gain or a loss that is none of noise, as a positive number."""
    return Interval(abs(gain.mean), *sorted((abs(gain.low or 0.0), abs(gain.high or 0.0))))


def _neighbours(advice: Advice, axis: str) -> list[Choice]:
    """The choices that differ from the advised one in this respect alone."""

    def rest(choice: Choice) -> list[Any]:
        others = (getattr(choice, other) for other in _AXES if other != axis)
        return [choice.policy, choice.whole_backwards, *others]

    leader = advice.leader
    return [
        choice
        for choice in advice.gains
        if choice != leader and choice.system == "planaria" and rest(choice) == rest(leader)
    ]


def _value_text(axis: str, value: int) -> str:
    match axis:
        case "failures_tolerated":
            return f"f = {value}"
        case "num_spares":
            return count_text(value, "spare") if value else "no spares"
        case "save_min":
            return f"a save every {value} min"
        case _:
            return f"{count_text(value, 'copy')} in memory" if value else "no copies in memory"


def _spares_text(answer: Recommendation) -> Iterable[str]:
    pay = answer.advice.spares_pay
    if pay is None:
        return
    rate = answer.question.losses_per_hour
    if not pay.multiple:
        every = duration_text(_S_PER_HOUR / rate / pay.multiple_max)
        yield (
            f"No failure rate that was tried shows that spares pay with policy {pay.policy}, up to "
            f"a loss every {every}."
        )
        return
    every = duration_text(_S_PER_HOUR / rate / pay.multiple)
    yield (
        f"Runs show that {count_text(pay.num_spares, 'spare')} with policy {pay.policy} would pay "
        f"at {pay.multiple} times the failure rate, a loss every {every}, and at no lower rate "
        "that was tried."
    )


def _intervals_text(answer: Recommendation) -> str:
    number = len(answer.advice.gains) - 1
    return (
        "Goodput with its 95% interval over seeds. What the advice gains is compared seed by seed; "
        f"its intervals hold for all {number} comparisons at once with 95% (Student's t, "
        "Bonferroni), and more seeds make them narrower (--seeds). No seed that chose the "
        "advice measures it."
    )


# -- the table ------------------------------------------------------------------------------------


def _table(answer: Recommendation) -> Table:
    """Everything that was measured: by policy, by system, and by what differs from the advice."""
    advice = answer.advice
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("choice", overflow="fold")
    columns = ["samples/s", "$ per million\nsamples"] if answer.question.price else ["samples/s"]
    for heading in (*columns, "the advice\ngains", "interval"):
        table.add_column(heading, justify="right", overflow="fold")
    for label, choice in _rows(advice):
        runs = advice.outcomes[choice]
        cells = [f"{_goodput(runs):.4g}"]
        if answer.question.price:
            dollars = _dollars_per_million(answer, runs)
            cells.append(f"{dollars:,.2f}" if dollars else "")
        gain = advice.gains[choice]
        is_advised = choice == advice.leader
        known = gain is not None and not is_advised
        cells += [share_text(gain.mean), _percent_range(gain)] if known and gain else ["", ""]
        table.add_row(label, *cells, style="bold" if is_advised else "")
    return table


def _rows(advice: Advice) -> Iterable[tuple[str, Choice]]:
    leader = advice.leader
    yield "as advised", leader
    shown = {leader}
    for axis in _AXES:
        neighbours = sorted(_neighbours(advice, axis), key=lambda c: getattr(c, axis))
        shown.update(neighbours)
        same = [c for c in neighbours if advice.outcomes[c] == advice.outcomes[leader]]
        if len(same) > 1:
            values = ", ".join(str(getattr(choice, axis)) for choice in same[:-1])
            last = _value_text(axis, getattr(same[-1], axis))
            number = str(getattr(same[-1], axis))
            yield last.replace(number, f"{values} or {number}"), same[0]
        for choice in neighbours:
            if len(same) < 2 or choice not in same:
                yield _value_text(axis, getattr(choice, axis)), choice
    whole = replace(leader, whole_backwards=True)
    if whole in advice.gains:
        shown.add(whole)
        yield "whole backwards", whole
    others = [choice for choice in advice.gains if choice not in shown]
    for choice in sorted(others, key=lambda c: -_goodput(advice.outcomes[c])):
        spares = f", {count_text(choice.num_spares, 'spare')}" if choice.num_spares else ""
        if choice.policy:
            whole_text = ", whole backwards" if choice.whole_backwards else ""
            label = f"policy {choice.policy}, f = {choice.failures_tolerated}{spares}{whole_text}"
            yield label, choice
        else:
            name = "torchrun" if choice.system == "restart" else "torchrun, static"
            yield f"{name}{spares}, {choice.save_min} min", choice


def _dollars_per_million(answer: Recommendation, runs: Sequence[JobOutcome]) -> float | None:
    """Dollars for a million samples; None without a price, or if nothing was trained."""
    samples = sum(run.samples for run in runs)
    dollars = sum(run.node_hours for run in runs) * answer.question.price
    return 1e6 * dollars / samples if samples and dollars else None


# -- what was not played --------------------------------------------------------------------------


def _refusals(advice: Advice) -> Iterable[str]:
    """What cannot be played, by reason; reasons that differ in numbers alone are one."""
    by_reason: dict[str, list[Choice]] = {}
    for choice, reason in advice.reasons.items():
        by_reason.setdefault(reason.split(";")[0], []).append(choice)
    for reason, choices in by_reason.items():
        policies = dict.fromkeys(choice.policy or choice.system for choice in choices)
        f = dict.fromkeys(choice.failures_tolerated for choice in choices)
        spares = dict.fromkeys(choice.num_spares for choice in choices)
        numbers = f"f = {_numbers_text(f)} and {_numbers_text(spares)} spares"
        yield f"{', '.join(policies)} with {numbers}: {reason}"


def _numbers_text(numbers: Iterable[int]) -> str:
    return "/".join(map(str, sorted(numbers)))


# -- the job file, and JSON -----------------------------------------------------------------------


def _job_tables(answer: Recommendation) -> dict[str, dict[str, str | int]]:
    """The keys of a job file that have the advised values."""
    leader, job = answer.advice.leader, answer.scenario.setting.job
    return {
        "training": {
            "global_batch_size": job.training.global_batch_size,
            "microbatch_size": job.training.microbatch_size,
        },
        "resilience": {
            "policy": leader.policy,
            "failures_tolerated": leader.failures_tolerated,
        },
        "checkpoint": {"persist_every": answer.persist_every, "copies": leader.copies},
        "cluster": {
            "nodes": answer.question.nodes - leader.num_spares,
            "devices_per_node": answer.question.devices_per_node,
            "standby": leader.num_spares,
        },
    }


def _job_keys(answer: Recommendation) -> str:
    lines = []
    for table, keys in _job_tables(answer).items():
        lines.append(f"[{table}]")
        for key, value in keys.items():
            about = f" # Iterations: {answer.advice.leader.save_min} min."
            note = about if key == "persist_every" else ""
            lines.append(f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}")
            lines[-1] += note
        lines.append("")
    return "\n".join(lines).rstrip()


def advice_json(answer: Recommendation) -> dict[str, Any]:
    """The content of `planaria simulate --model --json`."""
    question, advice = answer.question, answer.advice
    pay = advice.spares_pay
    return {
        "version": VERSION,
        "model": answer.scenario.setting.model,
        "nodes": question.nodes,
        "devices_per_node": question.devices_per_node,
        "failures": dict(question.failures),
        "price_per_node_hour": question.price,
        "hours": answer.scenario.horizon_s / _S_PER_HOUR,
        "seeds": answer.num_seeds,
        "advised": _choice_json(advice.leader),
        "job": _job_tables(answer),
        "choices": [_measured_json(answer, choice) for choice in advice.gains],
        "comparisons": len(advice.gains) - 1,
        "spares_pay": None
        if pay is None
        else {
            "policy": pay.policy,
            "times_the_failure_rate": pay.multiple or None,
            "tried_up_to": pay.multiple_max,
            "spares": pay.num_spares,
        },
        "not_played": list(_refusals(advice)),
        "left_out": dict(answer.left_out),
    }


def _choice_json(choice: Choice) -> dict[str, Any]:
    return {
        "system": choice.system,
        "policy": choice.policy or None,
        **{axis: getattr(choice, axis) for axis in _AXES},
        "whole_backwards": choice.whole_backwards if choice.policy else None,
    }


def _measured_json(answer: Recommendation, choice: Choice) -> dict[str, Any]:
    runs = answer.advice.outcomes[choice]
    is_advised = choice == answer.advice.leader
    return {
        **_choice_json(choice),
        "goodput_samples_per_s": _interval_json(interval([run.samples_per_s for run in runs])),
        "cost_per_million_samples": _dollars_per_million(answer, runs),
        "advice_gains": None if is_advised else _interval_json(answer.advice.gains[choice]),
    }


def _interval_json(of: Interval | None) -> Mapping[str, float | None] | None:
    return None if of is None else {"mean": of.mean, "low": of.low, "high": of.high}
