"""The events of a job in sentences: each event, its answer, and the result."""

from collections.abc import Iterator

from planaria.observe.metrics import EventRecord
from planaria.show.choice_text import back_text, choice_text, differs_in_risk
from planaria.show.comparison import expected_text, off_text
from planaria.show.words import bytes_text, count_text, seconds_text

_NODE_TEXTS = {
    "kill": "was killed",
    "hang": "was stopped",
    "stall": "stood still",
    "crash": "had its workers killed",
    "cut": "was cut off",
    "flip": "had a bit of its parameters flipped",
    "preempt": "was told to leave",
    "slow": "became slow",
    "unslowed": "got its speed back",
    "fast": "was no longer taken for slow",
    "join": "joined",
    "joined": "joined",
    "drained": "left, as the user asked",
    "preempted": "had notice that it would be gone",
    "reformed": "got other work",
    "lost": "was lost",
}
_JOB_TEXTS = {
    "join": "nodes came to join",
    "leader": "the coordinator was lost",
    "forkserver": "the fork server was killed",
    "store": "the checkpoint directory became slow",
    "disk": "the disk of the journal did not answer",
    "refuse": "the checkpoint directory refused everything",
}


def event_lines(event: EventRecord) -> Iterator[str]:
    """The sentences of an event, a line each; the first says what happened, where and why."""
    yield _event_text(event)
    if not event.fired:
        return
    if event.detect_s and not _is_restart(event):
        yield f"Every rank had stopped for it after {seconds_text(event.detect_s)}."
    if event.answer:
        yield f"planaria chose {choice_text(event)}."
    if len(event.candidates) > 1:
        yield _scores_text(event)
    if not event.answer:
        return
    if event.predicted_downtime_s and not event.downtime_s:
        yield "No node has gone on with this answer."
        return
    if event.downtime_s:
        yield _times_text(event)
    if back := back_text(event):
        yield f"{back.capitalize()}."
    if effects := ", ".join(_effect_texts(event)):
        yield f"{effects}."


def _event_text(event: EventRecord) -> str:
    where = _where(event)
    nodes = ", ".join(map(str, event.nodes))
    if not event.fired:
        what = f"{event.kind} of node {nodes}" if nodes else event.kind
        return f"{where}: {what} was never injected, because the job never came to that place"
    if _is_restart(event):
        return f"{where}: {_restart(event)}"
    if event.nodes and event.kind in _NODE_TEXTS:
        noun = "node" if len(event.nodes) == 1 else "nodes"
        was = _NODE_TEXTS[event.kind]
        if event.error and event.kind == "crash" and not event.step:
            was = f"had a worker that {_end_text(event)}"
        if event.kind == "join" and not event.answer:
            was = "came to join"
        if len(event.nodes) > 1:
            was = was.replace("was ", "were ").replace("that it ", "that they ")
        what = f"{noun} {nodes} {was}"
    elif event.nodes:
        what = f"{event.kind}: node {nodes}"
    else:
        what = _JOB_TEXTS.get(event.kind, event.kind.replace("_", " "))
    return f"{where}: {what}" + (f" ({event.reason})" if event.reason else "")


def _end_text(event: EventRecord) -> str:
    """How the code in a worker ended: an exception, or a signal or exit status."""
    verb = "was ended by" if event.error.startswith(("SIG", "signal ", "status ")) else "raised"
    layers = ", ".join(map(str, event.layers))
    noun = "layer" if len(event.layers) == 1 else "layers"
    return f"{verb} {event.error}" + (f" in {noun} {layers}" if layers else "")


def _where(event: EventRecord) -> str:
    """The iteration, with its step or the time since training began."""
    if not event.step.startswith("~"):
        return f"iteration {event.iteration}" + (f", {event.step}" if event.step else "")
    after = f"{event.step[1:]} s after training began"
    return f"iteration {event.iteration}, {after}" if event.fired else after


def _is_restart(event: EventRecord) -> bool:
    """Whether the event is a loss of the coordinator that did not interrupt training."""
    return event.kind == "leader" and not event.answer


def _restart(event: EventRecord) -> str:
    what = f"the coordinator was {'killed' if event.step else 'lost'}"
    if not event.detect_s:
        return f"{what} ({event.reason})" if event.reason else what
    meanwhile = event.reason or "training went on without it"
    return f"{what}; it ran again after {seconds_text(event.detect_s)}, {meanwhile}"


def _scores_text(event: EventRecord) -> str:
    """A sentence with the scores of all candidates, of which the choice takes the largest."""
    scores = sorted(
        ((float(str(c["score"])), str(c["answer"])) for c in event.candidates), reverse=True
    )
    scores_text = ", ".join(f"{answer} {score:.2f}" for score, answer in scores)
    less = ", less what that failure costs" if differs_in_risk(event) else ""
    return (
        "It is expected to train the most samples a second that count until the next "
        f"failure{less}: {scores_text}."
    )


def _effect_texts(event: EventRecord) -> Iterator[str]:
    if event.transfer_bytes:
        yield f"{bytes_text(event.transfer_bytes)} of layers moved"
    if event.redone_samples:
        was = "was" if event.redone_samples == 1 else "were"
        yield f"{count_text(event.redone_samples, 'sample')} {was} done again"


def _times_text(event: EventRecord) -> str:
    """Predicted and measured times of the phases of a transition."""
    if not event.detect_s:
        return (
            f"Training paused for {seconds_text(event.downtime_s)}; "
            f"{seconds_text(event.predicted_downtime_s)} was predicted."
        )
    rest_s = event.predicted_downtime_s - event.predicted_transfer_s
    total = (
        f"All nodes went on {seconds_text(event.recovery_s)} after the loss was noticed, "
        f"{expected_text(event)}. "
        if event.predicted_recovery_s_max and event.recovery_s
        else ""
    )
    return (
        f"{total}The decision took {seconds_text(event.decide_s)}. The transition after it "
        f"took {seconds_text(event.transition_s)}; "
        f"{seconds_text(event.predicted_downtime_s)} was predicted "
        f"({off_text(event.predicted_downtime_s, event.transition_s)}): regroup "
        f"{seconds_text(event.regroup_s)} ({seconds_text(rest_s)} predicted), transfer "
        f"{seconds_text(event.transfer_s)} ({seconds_text(event.predicted_transfer_s)} "
        "predicted)."
    )
