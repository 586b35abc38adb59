"""The events of the report while they are open: what is known of each, step by step.

An event begins as an injected fault, or as a loss that the coordinator notices. The decision adds
its answer and its prices; once training runs again, the times of its phases follow.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Final

from planaria.core.inject import Injection
from planaria.core.messages import Raised
from planaria.core.records import Candidate, Changed, Decided, Running
from planaria.observe.metrics import EventRecord
from planaria.observe.recoveries import SourceTier

_STANDING_BY: Final = "standing by, in no plan so far"


@dataclass(frozen=True, slots=True)
class OpenEvent:
    """An event that is not over yet.

    Attributes:
        order: position among all events, in the order in which the recorder heard of them.
        lost_s: time at which it happened if that is known, else at which it was noticed.
        is_noticed: whether the coordinator has noticed the loss.
        noticed_s: time at which the coordinator noticed the newest loss that the same plan answers.
        detected_s, told_s: times at which all members had answered, and were sent the plan; 0
            before that.
    """

    event: EventRecord
    order: int
    lost_s: float
    is_noticed: bool = False
    noticed_s: float = 0.0
    detected_s: float = 0.0
    told_s: float = 0.0


def injected_event(injection: Injection) -> EventRecord:
    """The event of an injected fault."""
    place = injection.place
    return EventRecord(
        kind=injection.kind,
        nodes=injection.nodes,
        iteration=place.iteration,
        step=place.step if place.at_s < 0.0 else f"~{place.at_s}",
        value=injection.value,
        reason=_STANDING_BY if injection.num_nodes else "",
    )


def is_answered_by(open_event: OpenEvent, kind: str, nodes: tuple[int, ...]) -> bool:
    """Whether a change may answer an injection: it has all its nodes, or some of a join."""
    common = set(nodes) & set(open_event.event.nodes)
    is_match = bool(common) if kind == "join" else common == set(nodes)
    return is_match and open_event.event.kind == kind and not open_event.is_noticed


def with_error(event: EventRecord, raised: Raised | None) -> EventRecord:
    """The event with the error of a worker, if there is one."""
    if raised is None:
        return event
    layers = tuple(range(raised.first_layer, raised.end_layer))
    return replace(event, error=raised.error, message=raised.message, layers=layers)


def with_decision(open_event: OpenEvent, message: Decided) -> OpenEvent:
    """The event with the answer that the coordinator chose, and its prices."""
    event = replace(
        open_event.event,
        policy=message.policy,
        answer=message.answer,
        candidates=_candidate_tables(message.candidates),
        time_to_failure_s=message.time_to_failure_s,
        transfer_bytes=message.transfer_bytes,
        source_tier=_tier(message),
        predicted_downtime_s=message.predicted_downtime_s,
        predicted_transfer_s=message.predicted_transfer_s,
        predicted_recovery_s=message.predicted_recovery_s,
        predicted_recovery_s_min=message.predicted_recovery_s_min,
        predicted_recovery_s_max=message.predicted_recovery_s_max,
        redone_samples=message.redone_samples,
        epoch=message.epoch,
        inputs=message.inputs,
    )
    return replace(
        open_event, event=event, noticed_s=message.noticed_s, detected_s=message.detected_s
    )


def recovery_tier(message: Decided, num_committed: int) -> SourceTier:
    """The tier that keeps the state with which the job goes on after a decision.

    Args:
        num_committed: number of iterations that were committed before it.
    """
    if tier := _tier(message):
        return SourceTier(tier)
    return SourceTier.START if message.iteration < num_committed else SourceTier.LIVE


def finished_event(open_event: OpenEvent, message: Running) -> EventRecord:
    """The event with the times of its phases, from the loss until every rank could go on."""
    if not open_event.detected_s:  # This recovery does not answer the fault, such as a short stop.
        return open_event.event
    between_s = message.now_s - open_event.told_s
    transfer_s = min(message.transfer_s, between_s)
    return replace(
        open_event.event,
        detect_s=open_event.detected_s - open_event.lost_s,
        decide_s=open_event.told_s - open_event.detected_s,
        regroup_s=between_s - transfer_s,
        transfer_s=transfer_s,
        received_bytes=message.received_bytes,
        downtime_s=message.now_s - open_event.lost_s,
        recovery_s=message.now_s - open_event.noticed_s if open_event.noticed_s else 0.0,
    )


def change_event(event: EventRecord, nodes: tuple[int, ...], message: Changed) -> EventRecord:
    """The event of a change that was made while training went on."""
    steps = f"{message.now_s - message.asked_s:.2f} s from the first step to the last"
    return replace(
        event,
        nodes=nodes,
        iteration=message.iteration if event.iteration < 0 else event.iteration,
        policy=message.policy,
        answer=message.answer,
        candidates=_candidate_tables(message.candidates),
        time_to_failure_s=message.time_to_failure_s,
        regroup_s=message.pause_s,
        transfer_bytes=message.transfer_bytes,
        received_bytes=message.received_bytes,
        source_tier="live" if message.transfer_bytes else "",
        downtime_s=message.pause_s,
        predicted_downtime_s=message.predicted_pause_s,
        reason="; ".join(filter(None, (message.reason, steps))),
        epoch=message.epoch,
        inputs=message.inputs,
    )


def _candidate_tables(candidates: tuple[Candidate, ...]) -> tuple[Mapping[str, object], ...]:
    return tuple(map(asdict, candidates))


def _tier(message: Decided) -> str:
    """The tier that serves layers: "memory", "disk", "live", or "" if no layer moves."""
    if message.copied >= 0:
        return "memory"
    return "disk" if message.source else "live" if message.transfer_bytes else ""
