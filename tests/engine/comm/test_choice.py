"""Where ranks exchange tensors over NCCL, and what is said where they do not."""

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.jobs import shaped_plan, tiny_job
from helpers.linked_ranks import TIMEOUT_S, in_threads, link_ranks
from planaria.core.job import JobConfig
from planaria.core.specs import PrepareRequest
from planaria.engine import prepare
from planaria.engine.blame import mistake_of
from planaria.engine.comm import choice
from planaria.engine.comm.choice import NcclTrials, nccl_obstacle, open_comm
from planaria.engine.comm.device_comm import DeviceComm
from planaria.engine.comm.host import HostComm
from planaria.engine.devices import Device
from planaria.errors import AbortedError, ConfigError, PeerLostError
from planaria.job.checks import check_job
from planaria.schedule.lower import rank_schedule

OTHER_MACHINES = ("10.0.0.1", "10.0.0.2")
THIS_MACHINE = ("127.0.0.1", "127.0.0.1")


class Gpu(Device):
    """A device that says that it is a GPU."""

    def __init__(self, identity: str, count: int = 8) -> None:
        super().__init__()
        self.place = torch.device("cuda", 0)
        self.name, self.identity, self.count = "H100", identity, count


def job_with(transport: str, device: str = "auto") -> JobConfig:
    job = tiny_job("sequential", Path(), iterations=1)
    changes: Any = {"nodes": 2, "transport": transport, "device": device}
    return replace(job, cluster=replace(job.cluster, **changes))


class Formed(HostComm):
    """Stands for a comm over NCCL."""

    is_formed = False

    def form(self) -> None:
        self.is_formed = True


def opened(
    devices: Sequence[Device],
    hosts: Sequence[str],
    job: JobConfig,
    trials: Sequence[NcclTrials] = (NcclTrials(), NcclTrials()),
) -> tuple[list[DeviceComm], int]:
    """What each rank opened, and the bytes that they sent for that."""
    plan = shaped_plan((2,), job.num_microbatches)
    comms: dict[int, DeviceComm] = {}
    with link_ranks(2) as ranks:
        calls = [
            lambda links=links, device=device: open_comm(
                links,
                device,
                plan,
                rank_schedule(plan, links.rank),
                job=job,
                hosts=hosts,
                trials=trials[links.rank],
                publish=lambda comm: comms.update({links.rank: comm}),
            )
            for links, device in zip(ranks, devices, strict=True)
        ]
        with in_threads(*calls) as running:
            for one in running:
                one.result(timeout=TIMEOUT_S)
        num_bytes = sum(links.sent_bytes.total() for links in ranks)
    return [comms[0], comms[1]], num_bytes


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of torch that has NCCL."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(choice, "NcclComm", lambda links, device, *_: Formed(links, device))


@pytest.mark.parametrize("hosts", [THIS_MACHINE, OTHER_MACHINES])
@pytest.mark.usefixtures("nccl")
def test_ranks_that_have_a_gpu_each_use_nccl(hosts: Sequence[str]) -> None:
    """On one machine and on several; the groups are formed before the epoch begins."""
    for transport in ("auto", "nccl"):
        comms, _ = opened([Gpu("a"), Gpu("b")], hosts, job_with(transport))
        assert all(isinstance(comm, Formed) and comm.is_formed for comm in comms)


@pytest.mark.usefixtures("nccl")
def test_a_rank_that_is_alone_needs_no_groups(caplog: pytest.LogCaptureFixture) -> None:
    """It exchanges nothing."""
    job, opened_comms = job_with("nccl"), list[DeviceComm]()
    plan = shaped_plan((1,), job.num_microbatches)
    with link_ranks(1) as (links,):
        schedule, publish = rank_schedule(plan, 0), opened_comms.append
        hosts = THIS_MACHINE[:1]
        trials, gpu = NcclTrials(), Gpu("a")
        open_comm(links, gpu, plan, schedule, job=job, hosts=hosts, trials=trials, publish=publish)

    assert [type(comm) for comm in opened_comms] == [HostComm]
    assert not caplog.records


@pytest.mark.usefixtures("nccl")
def test_whoever_cannot_use_nccl_keeps_all_from_it(caplog: pytest.LogCaptureFixture) -> None:
    """Ranks must agree; one of them says why."""
    for devices, reason in (
        ([Gpu("a"), Gpu("a")], "ranks 0 and 1 share a GPU"),
        ([Gpu("a"), Device()], "rank 1 has no NVIDIA GPU"),
    ):
        caplog.clear()
        comms, _ = opened(devices, OTHER_MACHINES, job_with("auto"))
        assert not any(isinstance(comm, Formed) for comm in comms)
        (record,) = caplog.records
        assert reason in record.message

        with pytest.raises(ConfigError, match=reason) as mistake:
            opened(devices, OTHER_MACHINES, job_with("nccl"))
        assert mistake_of(mistake.value)[:2] == ("cluster.transport", '"nccl"')


@pytest.mark.usefixtures("nccl")
def test_what_is_to_be_encrypted_does_not_go_over_nccl(caplog: pytest.LogCaptureFixture) -> None:
    """Activations, gradients and copies went in the clear where every rank had a GPU, and the job
    file said that nobody could read them."""
    plain = job_with("auto")
    job = replace(plain, cluster=replace(plain.cluster, encryption="on"))
    for hosts in (THIS_MACHINE, OTHER_MACHINES):
        comms, _ = opened([Gpu("a"), Gpu("b")], hosts, job)
        assert [type(comm) for comm in comms] == [HostComm, HostComm]

    assert caplog.text.count("because cluster.encryption is on, and NCCL encrypts nothing") == 2
    asks = replace(job, cluster=replace(job.cluster, transport="nccl"))
    with pytest.raises(ConfigError, match="NCCL encrypts nothing"):
        check_job(asks)
    with pytest.raises(ConfigError, match="NCCL encrypts nothing"):
        opened([Gpu("a"), Gpu("b")], OTHER_MACHINES, asks)


@pytest.mark.usefixtures("nccl")
def test_ranks_do_without_nccl_once_they_have_tried_it_twice_in_vain(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a third epoch would break, and cost a healthy node; a success in between counts."""
    devices, trials = [Gpu("a"), Gpu("b")], (NcclTrials(), NcclTrials())

    def form(comm: Formed) -> None:
        if comm._links.rank == failing:
            raise PeerLostError(1 - failing, "NCCL error: no space left in /dev/shm")
        comm.is_formed = True

    monkeypatch.setattr(Formed, "form", form)
    monkeypatch.setattr(choice, "_LOSS_S", 0.0)
    for failing in (1, -1, 1, 0):
        with pytest.raises(PeerLostError) if failing >= 0 else nullcontext():
            opened(devices, OTHER_MACHINES, job_with("auto"), trials)
    assert not caplog.records
    failing = -1
    comms, _ = opened(devices, OTHER_MACHINES, job_with("auto"), trials)
    only_nccl, _ = opened(devices, OTHER_MACHINES, job_with("nccl"), trials)

    assert [type(comm) for comm in comms] == [HostComm, HostComm]
    assert "their groups of NCCL could not be formed 2 times in a row" in caplog.text
    assert all(isinstance(comm, Formed) for comm in only_nccl)


@pytest.mark.usefixtures("nccl")
def test_a_peer_that_is_lost_while_groups_form_is_no_failure_of_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL sees it before the link has closed, and names no rank: after two losses a job did
    without NCCL for good, and complaints were of a rank that was there."""
    job, trials, has_seen = job_with("auto"), NcclTrials(), threading.Event()
    plan = shaped_plan((3,), job.num_microbatches)

    def form(comm: Formed) -> None:
        if comm._links.rank == 0:
            has_seen.set()
            raise PeerLostError(1, "NCCL error: remote process exited")
        if comm._links.rank == 2:
            assert has_seen.wait(TIMEOUT_S)
            comm._links.close()

    monkeypatch.setattr(Formed, "form", form)
    with link_ranks(3) as ranks:
        calls = [
            lambda links=links: open_comm(
                links,
                Gpu(str(links.rank)),
                plan,
                rank_schedule(plan, links.rank),
                job=job,
                hosts=("10.0.0.1",) * 3,
                trials=trials if links.rank == 0 else NcclTrials(),
                publish=lambda _: None,
            )
            for links in ranks
        ]
        with in_threads(*calls) as running:
            with pytest.raises(PeerLostError) as lost:
                running[0].result(timeout=TIMEOUT_S)
            for others in running[1:]:
                others.result(timeout=TIMEOUT_S)

    assert lost.value.rank == 2
    assert trials.num_failed == 0


@pytest.mark.usefixtures("nccl")
def test_groups_that_nobody_forms_because_the_epoch_is_over_are_no_failure_of_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The coordinator may know of a loss before the links do, as where a machine is gone."""
    trials = (NcclTrials(), NcclTrials())

    def form(comm: Formed) -> None:
        if comm._links.rank == 0:
            comm._links.abort("a member is lost", first_epoch=1)
            raise PeerLostError(1, "NCCL error: unhandled system error")

    monkeypatch.setattr(Formed, "form", form)
    with pytest.raises(AbortedError):
        opened([Gpu("a"), Gpu("b")], OTHER_MACHINES, job_with("auto"), trials)

    assert trials[0].num_failed == 0


@pytest.mark.parametrize(
    ("job", "hosts"),
    [
        (job_with("auto"), THIS_MACHINE),
        (job_with("host"), OTHER_MACHINES),
        (job_with("auto", "cpu"), OTHER_MACHINES),
        (job_with("auto", "late"), OTHER_MACHINES),
    ],
)
def test_ranks_that_know_better_ask_nobody(
    job: JobConfig, hosts: Sequence[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A recovery on processors costs no message more, and nobody wonders about NCCL there."""
    comms, num_bytes = opened([Device(), Device()], hosts, job)

    assert all(type(comm) is HostComm for comm in comms)
    assert not num_bytes
    assert not caplog.records


def test_a_machine_says_what_keeps_it_from_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words go to the user."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert "compute on cpu" in nccl_obstacle(Device(), num_ranks=1)
    assert nccl_obstacle(Gpu("a"), num_ranks=1) == "this build of torch has no NCCL"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert nccl_obstacle(Gpu("a", 1), num_ranks=6) == "6 ranks share 1 GPU"
    assert not nccl_obstacle(Gpu("a", 6), num_ranks=6)


@pytest.mark.usefixtures("nccl")
def test_the_user_is_told_before_the_job_starts() -> None:
    """In one line where a GPU is there, and with a mistake where only NCCL would do."""
    request = PrepareRequest(job=job_with("auto"), cache_directory="", processors=2)
    assert prepare._transport_notes(request, Device()) == ()
    (note,) = prepare._transport_notes(request, Gpu("a", 1))
    assert "through the memory of their machines, because" in note
    assert "ranks share 1 GPU" in note
    assert prepare._transport_notes(request, Gpu("a")) == ()

    only_nccl = PrepareRequest(job=job_with("nccl"), cache_directory="", processors=2)
    with pytest.raises(ConfigError, match=r"cluster\.transport"):
        prepare._transport_notes(only_nccl, Device())


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("further", [{"max_nodes": 3}, {"standby": 1}])
def test_a_job_of_nccl_alone_has_a_gpu_for_each_node_that_may_come(further: Any) -> None:
    """Its next epoch would end it; another job says it when that epoch begins."""
    for transport in ("nccl", "auto"):
        job = job_with(transport)
        job = replace(job, cluster=replace(job.cluster, **further))
        request = PrepareRequest(job=job, cache_directory="", processors=2)
        assert prepare._transport_notes(request, Gpu("a", 3)) == ()
        if transport == "nccl":
            with pytest.raises(ConfigError, match="3 ranks share 2 GPUs"):
                prepare._transport_notes(request, Gpu("a", 2))
        else:
            assert prepare._transport_notes(request, Gpu("a", 2)) == ()


@pytest.mark.usefixtures("nccl")
def test_the_user_is_told_that_copies_between_devices_make_a_detour() -> None:
    """Where tensors do not go over NCCL; a paced job's copies go nowhere."""
    for transport, device, model, is_detour in (
        ("auto", Gpu("a"), "hf", False),
        ("host", Gpu("a"), "hf", True),
        ("auto", Gpu("a", 1), "hf", True),
        ("auto", Device(), "hf", True),
        ("auto", Device(), "paced", False),
    ):
        job = job_with(transport)
        checkpoint = replace(job.checkpoint, copies=2, path="device")
        kind: Any = model
        job = replace(job, checkpoint=checkpoint, model=replace(job.model, kind=kind))
        request = PrepareRequest(job=job, cache_directory="", processors=2)
        notes = prepare._transport_notes(request, device)
        assert any("checkpoint.path" in note for note in notes) == is_detour
