"""Sentences that say why the coordinator chose an answer to an event: the prices of all candidates,
and when the next failure is expected."""

from collections.abc import Mapping

from planaria.observe.metrics import EventRecord
from planaria.show.words import duration_text, seconds_text


def back_text(event: EventRecord) -> str:
    """A clause that says from where all nodes took an older state; empty if none went back."""
    tiers = {"memory": "copies in memory", "disk": "the newest save"}
    tier = tiers.get(event.source_tier)
    return f"all nodes went back to {tier}" if tier else ""


def choice_text(event: EventRecord) -> str:
    """The chosen answer and the other candidates with their prices, such as "borrow: an iteration
    takes 1.23 s after a pause of 300.0 ms; reroute would take 1.41 s after 100.0 ms, layers move
    for 4.00 s; the next failure is expected in 40 min".

    The samples at risk are included only where candidates differ in them.

    Args:
        event: an event that has an answer.
    """
    chosen = [c for c in event.candidates if _name(c) == (event.policy, event.answer)]
    others = [c for c in event.candidates if _name(c) != (event.policy, event.answer)]
    is_risk_told = differs_in_risk(event)
    parts = [
        f"{event.answer}: an iteration takes {_price(c, 'a pause of ', is_risk_told=is_risk_told)}"
        for c in chosen[:1]
    ] or [event.answer]
    parts += [
        f"{candidate['answer']} would take {_price(candidate, is_risk_told=is_risk_told)}"
        for candidate in others
    ]
    if others and event.time_to_failure_s:
        parts.append(f"the next failure is expected in {duration_text(event.time_to_failure_s)}")
    if is_risk_told:
        parts.append(
            "the samples at risk are what a failure costs on average, because it may destroy "
            "the last copy of a layer"
        )
    return "; ".join(parts)


def differs_in_risk(event: EventRecord) -> bool:
    """Whether the candidates differ in the samples that the next failure is expected to cost."""
    return len({_risk_text(candidate) for candidate in event.candidates}) > 1


def _name(candidate: Mapping[str, object]) -> tuple[object, object]:
    return candidate["policy"], candidate["answer"]


def _price(candidate: Mapping[str, object], of_pause: str = "", *, is_risk_told: bool) -> str:
    """The costs of a candidate.

    Args:
        of_pause: words before the downtime.
    """
    iteration_s, downtime_s, moving_s, pause_s, then_s = (
        _number(candidate, key)
        for key in ("iteration_s", "downtime_s", "moving_s", "pause_s", "then_s")
    )
    moving = [f"layers move for {seconds_text(moving_s)}"] if moving_s else []
    then = (
        [f"then {seconds_text(then_s)} after a pause of {seconds_text(pause_s)}"] if then_s else []
    )
    risk = [_risk_text(candidate)] if is_risk_told else []
    parts = [f"{seconds_text(iteration_s)} after {of_pause}{seconds_text(downtime_s)}"]
    return ", ".join([*parts, *moving, *then, *risk])


def _risk_text(candidate: Mapping[str, object]) -> str:
    """The samples that the next failure costs on average after a candidate, rounded."""
    return f"{_samples_text(_number(candidate, 'samples_at_risk'))} samples at risk"


def _samples_text(samples: float) -> str:
    """The number without decimals, or with at most one if it is below 10."""
    return f"{samples:,.0f}" if samples >= 10.0 else f"{round(samples, 1):g}"


def _number(candidate: Mapping[str, object], key: str) -> float:
    """A number of a candidate; 0 if the report was written before the key existed."""
    return float(str(candidate.get(key, 0.0)))
