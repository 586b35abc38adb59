"""Why an answer was chosen, in a sentence: its price, those of the others, and for how long."""

from collections.abc import Mapping

from planaria.observe.metrics import EventRecord
from planaria.show.words import duration_text, seconds_text


def back_text(event: EventRecord) -> str:
    """That all went back to an older state, and to which; empty if they did not."""
    tiers = {"memory": "copies in memory", "disk": "the newest save"}
    tier = tiers.get(event.source_tier)
    return f"all nodes went back to {tier}" if tier else ""


def choice_text(event: EventRecord) -> str:
    """Such as "borrow: 1.23 s an iteration after 300.0 ms; reroute would be 1.41 s after 100.0 ms,
    layers move for 4.00 s; the next failure is expected in 40 min".

    Args:
        event: that was answered.
    """
    taken = [c for c in event.candidates if _name(c) == (event.policy, event.answer)]
    others = [c for c in event.candidates if _name(c) != (event.policy, event.answer)]
    parts = [f"{event.answer}: {_price(c, 'an iteration ')}" for c in taken[:1]] or [event.answer]
    parts += [f"{candidate['answer']} would be {_price(candidate)}" for candidate in others]
    if others and event.time_to_failure_s:
        parts.append(f"the next failure is expected in {duration_text(event.time_to_failure_s)}")
    return "; ".join(parts)


def _name(candidate: Mapping[str, object]) -> tuple[object, object]:
    return candidate["policy"], candidate["answer"]


def _price(candidate: Mapping[str, object], of_what: str = "") -> str:
    iteration_s, downtime_s, moving_s = (
        float(str(candidate.get(key, 0.0))) for key in ("iteration_s", "downtime_s", "moving_s")
    )
    text = f"{seconds_text(iteration_s)} {of_what}after {seconds_text(downtime_s)}"
    return f"{text}, layers move for {seconds_text(moving_s)}" if moving_s else text
