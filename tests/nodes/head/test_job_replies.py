"""What a running job tells of its events: what a person asks for, at any number of nodes."""

import asyncio
from dataclasses import replace

import msgspec

from planaria.core.cluster import ClusterState, Node
from planaria.core.findings import FailureHistory, Findings
from planaria.core.job import JobConfig
from planaria.core.messages import DrainRequested
from planaria.core.records import DecisionInputs
from planaria.nodes.head.requests import Drains, TellEvents, reply_function
from planaria.observe.metrics import EventRecord
from planaria.observe.status import Standing, job_status

ANSWERED = EventRecord(kind="lost", nodes=(3,), iteration=5, answer="reroute", epoch=1)


def inputs(num_nodes: int) -> DecisionInputs:
    """The facts of a decision in a job of so many nodes."""
    return DecisionInputs(
        plan_epoch=0,
        members=tuple(range(num_nodes)),
        cluster=ClusterState(1, tuple(Node(n, (frozenset(range(4)),)) for n in range(num_nodes))),
        findings=Findings(),
        history=FailureHistory(),
        priced_s=20.0,
        next_iteration=5,
        saved_iteration=-1,
        version_iterations=1,
        processors=0,
        is_foreseen=False,
    )


def told_events(*events: EventRecord) -> str:
    """The answer of a job with these events."""

    def send(_: DrainRequested) -> None:
        raise AssertionError("nobody asked a node to leave")

    status = job_status(JobConfig(name="mine"), Standing(), hosts={})
    drains = Drains(send, tuple)
    answer = reply_function(drains, events=lambda: events, status=lambda: status, directory="")

    async def ask() -> str:
        return (await answer(TellEvents())).text

    return asyncio.run(ask())


def test_what_a_job_tells_of_an_event_does_not_grow_with_its_nodes() -> None:
    """The facts of a decision name each node: after many events of a large job, the answer was
    longer than whoever asks reads."""
    answers = [told_events(replace(ANSWERED, inputs=inputs(size))) for size in (3, 300)]

    assert answers[0] == answers[1]
    assert msgspec.json.decode(answers[0], type=tuple[EventRecord, ...]) == (ANSWERED,)
