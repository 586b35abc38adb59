"""A coordinator is restarted at once, however old its job is, how many nodes or samples it has."""

import asyncio
import os
import time
import tracemalloc
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest

from helpers.coordinated import (
    HALVES,
    LEASE_S,
    LOWER,
    NEXT,
    NOW_S,
    NUM_MICROBATCHES,
    UPPER,
    node_loss,
    small_rules,
    stop_report,
    training_halves,
)
from helpers.jobs import NUM_LAYERS, shaped_plan
from planaria.coordinator.commands import MembersRecorded, Saving
from planaria.coordinator.contact import HeadContact
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.leadership import Leadership, Queued
from planaria.coordinator.state import Phase
from planaria.coordinator.step import Event
from planaria.core.commit import Votes, commit_vector, decode_vector, encode_vector, vector_layout
from planaria.core.messages import StartEpoch, ToNode
from planaria.core.plan import Plan, Transfer
from planaria.core.records import (
    Decision,
    Members,
    Outcome,
    Progress,
    Record,
    ToLauncher,
    encode_record,
)
from planaria.nodes.head.journal import open_store, superseded_entries
from planaria.store.logbook import PIECE_BYTES, Logbook, open_logbook
from planaria.store.store import VALUE_BYTES_MAX

LOCAL = HeadContact(lease_s=LEASE_S, patience_s=0.0, now_s=lambda: NOW_S)
RESTART_S = 2.0
BUSY = 3  # Times that: other tests run at the same time.
MEMORY_BYTES = 100 << 20


@dataclass
class FakeLine:
    """A connection that nobody listens to."""

    def tell(self, message: ToNode) -> None:
        pass

    def close(self) -> None:
        pass


class FakeHands:
    """What a leader does, of which nothing is done."""

    def queue(self, event: Queued) -> None:
        pass

    def notify(self, message: ToLauncher) -> None:
        pass

    def carry_out(self, command: Saving) -> None:
        pass

    def on_place_reached(self, place: str, iteration: int) -> None:
        pass


@pytest.fixture(autouse=True)
def _no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    for call in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, call, lambda _fd: None)


async def restarted_coordinator(directory: Path, rules: Rules, plan: Plan) -> Leadership[FakeLine]:
    """A coordinator that has read its records, and could serve agents."""
    async with open_store(directory, now_s=time.monotonic) as store:
        logbook = await open_logbook(store, rules.job.name, lease_s=LEASE_S)
        leadership = Leadership[FakeLine](rules, logbook, FakeHands(), contact=LOCAL)
        await leadership.restore(plan, predicted_s=1.0, now_s=NOW_S)
        await leadership.begin_leases()
        return leadership


def large_start(epoch: int, num_nodes: int) -> Decision:
    """An order to start pipelines of five nodes, with eight layers for each rank to get."""
    plan = replace(shaped_plan((5,) * (num_nodes // 5), 2 * num_nodes), epoch=epoch)
    rng = Random(epoch)
    transfers = tuple(
        Transfer(rng.randrange(NUM_LAYERS), rng.choice(plan.ranks), rank, rng.randrange(1 << 40))
        for rank in plan.ranks
        for _ in range(8)
    )
    order = StartEpoch(epoch=epoch, plan=plan, addresses={}, iteration=epoch, rounds=(transfers,))
    return Decision(order=order)


async def record(logbook: Logbook, decision: Decision, nodes: tuple[int, ...]) -> None:
    """All that goes on record of an epoch."""
    epoch = decision.order.epoch
    await logbook.record_members(Members(epoch=epoch, term=logbook.term, nodes=nodes))
    await logbook.record_decision(Outcome(epoch=epoch, iteration=epoch), decision)
    await logbook.record_progress(Progress(num_committed=epoch, ends=False, epoch=epoch))


def test_a_job_of_ten_thousand_nodes_is_recorded_and_restarted(tmp_path: Path) -> None:
    """Its plan was too large for one value of the store, and the job ended when it began."""
    decision = large_start(0, 10_000)
    assert isinstance(decision.order, StartEpoch)
    plan = decision.order.plan

    async def run() -> None:
        async with open_store(tmp_path, now_s=time.monotonic) as store:
            logbook = await open_logbook(store, rules.job.name, lease_s=LEASE_S)
            await record(logbook, decision, plan.nodes)
            entries = (await store.range("")).entries
            assert max(len(entry.value) for entry in entries) == PIECE_BYTES
            assert sum(len(entry.value) for entry in entries) > VALUE_BYTES_MAX
        leadership = await restarted_coordinator(tmp_path, rules, HALVES)
        assert leadership.state.plan == plan
        assert leadership.state.facts.decision == decision
        assert leadership.state.phase is Phase.JOINING

    rules = small_rules(max_nodes=10_000)
    asyncio.run(run())


def test_a_job_with_a_batch_of_a_million_survives_a_loss_and_a_restart(tmp_path: Path) -> None:
    """The first loss ended it: its record had the number of each sample, twice."""
    batch, losses = 1_200_000, [0.1 * n for n in range(NUM_MICROBATCHES)]
    rules = small_rules()
    training = replace(
        rules.job.training, global_batch_size=batch, microbatch_size=batch // NUM_MICROBATCHES
    )
    job = replace(rules.job, training=training)
    rules = replace(rules, job=job, layout=vector_layout(job, NUM_LAYERS))
    total = np.array([*(1.0,) * NUM_LAYERS, *losses, *range(batch), *Votes(0)])
    summed = commit_vector(total, rules.layout)
    answers = [
        msgspec.structs.replace(
            stop_report(rank, 1, layers=layers, age=NEXT + 1, last=NEXT),
            vector=encode_vector(summed),
        )
        for rank, layers in ((0, LOWER), (1, UPPER), (2, LOWER))
    ]

    async def run() -> None:
        async with open_store(tmp_path, now_s=time.monotonic) as store:
            logbook = await open_logbook(store, job.name, lease_s=LEASE_S)
            leadership = Leadership[FakeLine](rules, logbook, FakeHands(), contact=LOCAL)
            await leadership.restore(HALVES, predicted_s=1.0, now_s=NOW_S)
            leadership.state = training_halves(rules)
            events: list[Event] = [node_loss(3), MembersRecorded(1), *answers]
            for event in events:
                await leadership.handle(event, NOW_S)
        state = (await restarted_coordinator(tmp_path, rules, HALVES)).state
        assert state.commits.outcome is not None
        assert (state.epoch, state.commits.outcome.iteration) == (1, NEXT + 1)
        assert decode_vector(state.commits.outcome.vector, rules.layout) == summed
        assert summed.loss == sum(losses)

    asyncio.run(run())


def test_a_restart_takes_as_long_on_the_last_day_of_a_job_as_on_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 nodes, 1,000 epochs: it took 11 s and 700 MB. What was superseded is on disk all the
    same."""
    num_epochs = 1000
    first, last = large_start(0, 125), large_start(num_epochs - 1, 125)
    assert isinstance(last.order, StartEpoch)
    nodes = last.order.plan.nodes
    encoded = encode_record(first)

    def encode(kept: Record) -> bytes:
        """To encode a plan takes longer than to write it."""
        is_old = isinstance(kept, Decision) and kept.order.epoch < num_epochs - 1
        return encoded if is_old else encode_record(kept)

    async def recorded() -> None:
        async with open_store(tmp_path, now_s=time.monotonic) as store:
            logbook = await open_logbook(store, rules.job.name, lease_s=LEASE_S)
            await logbook.grant(nodes)
            for epoch in range(num_epochs - 1):
                order = StartEpoch(epoch=epoch, plan=HALVES, addresses={}, iteration=epoch)
                await record(logbook, Decision(order=order), nodes)
            await record(logbook, last, nodes)

    rules = small_rules(max_nodes=len(nodes))
    monkeypatch.setattr("planaria.store.logbook.encode_record", encode)
    asyncio.run(recorded())
    monkeypatch.undo()
    begin_s = time.perf_counter()
    leadership = asyncio.run(restarted_coordinator(tmp_path, rules, HALVES))
    seconds = time.perf_counter() - begin_s
    assert leadership.state.plan == last.order.plan
    tracemalloc.start()
    asyncio.run(restarted_coordinator(tmp_path, rules, HALVES))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert seconds < BUSY * RESTART_S
    assert peak_bytes < MEMORY_BYTES
    plans = [entry for entry in superseded_entries(tmp_path) if "/plan/" in entry.key]
    assert [entry.key.rsplit("/", 1)[1] for entry in plans] == [*map(str, range(num_epochs - 1))]
    assert {entry.value for entry in plans} == {encoded}
