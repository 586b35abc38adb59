"""Gathers the machines on which a job runs, and has one of them examine the job (`planaria train
--listen`).

The head needs neither a device nor the job's data: the first machine that comes builds the model
and measures its layers, and the job is planned by what it found.
"""

import secrets
import socket
from asyncio import Runner
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from os import getcwd
from pathlib import Path
from typing import Any

from planaria.checkpoint.disk.storage import is_same_place
from planaria.checkpoint.disk.tiers import Start
from planaria.core.inject import Injection
from planaria.core.job import ClusterConfig, JobConfig
from planaria.core.machine_messages import JobOffered, SourceFile
from planaria.core.specs import Prepared, PrepareRequest
from planaria.errors import ConfigError, DoneError, InsufficientError, TrainingError
from planaria.job.lost_heads import (
    ANY_HOST,
    call_nodes,
    newest_parts,
    next_parts,
    nodes_that_may_live,
    reachable_addresses,
)
from planaria.job.machine_kinds import of_fastest_kind, with_measured_links, with_memory_limit
from planaria.job.places import check_not_done, find_start, look_in_time, wait_released
from planaria.job.planning import cache_directory, given_profile, mistake_error
from planaria.job.user_sources import user_sources
from planaria.nodes.head.journal_place import is_in_use, left_directories
from planaria.nodes.head.process_events import wait_until
from planaria.nodes.head.remote.kind_speeds import Kind, kind_of
from planaria.nodes.head.remote.machine_checks import MachineChecks
from planaria.nodes.head.remote.machine_operator import MachineOperator, open_platform
from planaria.nodes.head.remote.machines import Machines
from planaria.nodes.head.remote.open_head import OpenHead
from planaria.nodes.head.remote.run_record import (
    LIVING_LEASES,
    RunRecord,
    has_nodes,
    may_have_nodes,
    read_run,
    record_age_s,
)
from planaria.nodes.shared_saves import place_mark, remove_other_marks
from planaria.show.words import count_text
from planaria.transport.acceptor import listen
from planaria.transport.credentials import Credentials
from planaria.transport.sockets import Address, address_text

# A node ends itself once its lease and its patience are over. Before that, a machine notices within
# as long again as its lease that a head is lost, and needs a few seconds to find the next one.
_TAKE_UP_LEASES, _TAKE_UP_S = LIVING_LEASES, 5.0
_DONE_S = 10.0  # Time for machines that are started with the head, or look for it, to come.


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """How a head waits for machines.

    Attributes:
        address: "ADDR:PORT" at which it listens; port 0: any free one.
        credentials: contents of the token file that all machines have.
        nodes_min: number of machines with which training begins.
        nodes_max: number of machines that may train at once.
        wait_s: seconds that it waits for `nodes_min` machines.
        reattaches: whether the run that a killed head has left is taken up.
        may_begin: whether a job that is to resume begins anew if nothing is saved.
        operator: platform that is asked for machines in place of lost ones
            (nodes/head/remote/platforms.py); "": none is.
        advertised: "HOST:PORT" at which those find the head; "": any address of its interfaces.
        token_file: path of the token file on machines that come for that; "": the default one.
    """

    address: str
    credentials: Credentials
    nodes_min: int
    nodes_max: int
    wait_s: float
    reattaches: bool = False
    may_begin: bool = False
    operator: str = ""
    advertised: str = ""
    token_file: str = ""


@dataclass(frozen=True, slots=True)
class LeftRun:
    """A run that a killed head has left.

    Attributes:
        directory: directory of its journal.
    """

    directory: Path
    record: RunRecord


def look_for_left_run(
    config: JobConfig,
    listening: Listening | None,
    *,
    state: str,
    resume: bool,
    injections: Sequence[Injection],
    note: Callable[[str], None],
) -> LeftRun | None:
    """See `find_left_run`; a head whose machine may have died is waited for if the job may go on.

    Args:
        note: shows the user a text.

    Raises:
        ConfigError: the same; or the disk does not answer, or a job on another machine keeps the
            lock of the saves.
    """
    if resume or (listening is not None and listening.reattaches):
        wait_released(config, note=note)
    find = partial(find_left_run, config, listening, state=state, resume=resume)
    return look_in_time(config, partial(find, injections=injections), state=state)


def find_left_run(
    config: JobConfig,
    listening: Listening | None,
    *,
    state: str,
    resume: bool,
    injections: Sequence[Injection] = (),
) -> LeftRun | None:
    """The run of this job that a killed head has left, if it is to be taken up; None: it is not.

    Args:
        state: see `journal_place`.
        resume: whether the job is to go on from a save if no machine of the run is left.
        injections: faults that are to happen.

    Raises:
        ConfigError: there is one, and the user has not said what is to become of it; or there is
            none to reattach to, or more than one. Or faults are to be injected into its nodes, or a
            head of this job is at work.
    """
    runs = _left_runs(config, state)
    reattaches = listening is not None and listening.reattaches
    recent = [run for run in runs if may_have_nodes(run.record, run.directory)]
    if len(recent) > 1:
        remedy = "several heads of this job were lost; remove the directories of those you give up"
        raise ConfigError("--state", ", ".join(str(run.directory) for run in recent), remedy)
    if runs and listening is not None and (reattaches or resume):
        if injections:
            remedy = (
                "the nodes of the lost head know of no faults; take them up without --inject, or "
                f"remove {runs[-1].directory} to give them up"
            )
            raise ConfigError("--inject", injections[0].spec, remedy)
        return runs[-1]
    if runs and (not resume or recent):
        remedy = (
            "a head of this job was lost and has left its journal there; its machines may still "
            "hold the newest state. Go on from it with --listen and --reattach, or from the newest "
            "save with --resume, or remove that directory to give both up"
        )
        raise ConfigError("--state", str(runs[-1].directory), remedy)
    if reattaches:
        remedy = (
            "no head of this job has left its journal here; name the same --state or "
            "checkpoint.directory as then, or go on from the newest save with --resume"
        )
        raise ConfigError("--reattach", True, remedy)
    return None


def _left_runs(config: JobConfig, state: str) -> list[LeftRun]:
    """The runs that save where this job does and have lost their heads, the newest last.

    Raises:
        ConfigError: a head of this job is at work.
    """
    runs = []
    for directory in left_directories(config, state):
        record = read_run(directory)
        if record is None or not has_nodes(directory):
            continue
        if not is_same_place(record.job.checkpoint.directory, config.checkpoint.directory):
            continue
        if is_in_use(directory):
            remedy = "a head of this job is at work, with its journal there; end it first"
            raise ConfigError("--state", str(directory), remedy)
        runs.append(LeftRun(directory, record))
    return sorted(runs, key=lambda run: -record_age_s(run.directory))


def take_up(head: OpenHead, left: LeftRun, *, resume: bool, note: Callable[[str], None]) -> bool:
    """Waits for machines of a run that a killed head has left; returns whether any has come.

    They are waited for as long as a node may look for a head, but no longer than until their
    machines have told that none lives. If none has come by then and `resume` is given, the head
    goes on with a new run.

    Args:
        note: shows the user a text.

    Raises:
        InsufficientError: none has come, and there is no other way to go on.
    """
    cluster = left.record.job.cluster
    timeout_s = _TAKE_UP_LEASES * cluster.lease_s + _TAKE_UP_S
    timeout_s += max(0.0, cluster.patience_s - record_age_s(left.directory))
    note(
        f"waiting up to {timeout_s:.0f} s for nodes of the run that was left in {left.directory}, "
        "which may live so long"
        + (
            "; to go on from the newest save at once, stop this and remove that directory"
            if resume
            else ""
        )
    )
    # Machines with nodes give no digests, and fresh ones may come before them.
    checks = head.machines.checks
    checks.digests, checks.is_planned = dict(left.record.digests), True
    if run := left.record.parts:
        head.runner.run(call_nodes(head, left.record.job, run=run))
    nodes = nodes_that_may_live(left.record, left.directory, note=note)
    waiting = head.machines.wait_living(nodes, timeout_s=timeout_s)
    head.is_taken_up = head.runner.run(waiting)
    if head.is_taken_up:
        return True
    if not resume:
        raise InsufficientError(
            f"no machine has come with a living node of the run that was left in {left.directory}, "
            f"which were waited for up to {timeout_s:.0f} s; go on from the newest save with "
            "--resume"
        )
    head.begin_run(secrets.token_hex(8))
    return False


def kept_settings_text(config: JobConfig, kept: JobConfig) -> str:
    """What to tell a user whose job differs from that of the run that goes on; "": it does not.

    Args:
        kept: job of the run. Its number of nodes is that of the machines with which it began.
    """
    new, old = (dict(_leaves(asdict(each))) for each in (config, kept))
    # Callbacks are those of the new head. Some tables have any keys.
    keys = sorted({*new, *old} - {"cluster.nodes", "training.callbacks"})
    differing = [key for key in keys if new.get(key) != old.get(key)]
    if not differing:
        return ""
    listed = ", ".join(f"{key} = {old.get(key)!r} (not {new.get(key)!r})" for key in differing)
    return (
        f"the run goes on with the settings with which it began: {listed}. For other settings, "
        "stop it, which saves it, and start it again with --resume"
    )


def kept_modules_text(sources: Sequence[SourceFile], kept: Sequence[SourceFile]) -> str:
    """The same for the user's modules.

    Args:
        sources: modules beside the job now.
        kept: modules of the run.
    """
    new, old = ({each.path: each.sha256 for each in files} for files in (sources, kept))
    differing = sorted(path for path in {*new, *old} if new.get(path) != old.get(path))
    if not differing:
        return ""
    return (
        "the run goes on with the modules with which it began, which are not those beside the job: "
        f"{', '.join(differing)}. For other modules, stop it, which saves it, and start it again "
        "with --resume"
    )


def note_kept(
    head: OpenHead, config: JobConfig, record: RunRecord, *, note: Callable[[str], None]
) -> None:
    """Tells the user what a run that goes on keeps of the job with which it began."""
    note_all = (
        kept_settings_text(config, record.job),
        kept_modules_text(head.new_offer.sources, record.sources),
    )
    for text in filter(None, note_all):
        note(text)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted keys of nested tables, and their values."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@contextmanager
def open_head(
    config: JobConfig,
    listening: Listening,
    *,
    search_path: Sequence[str],
    left: RunRecord | None,
    note: Callable[[str], None],
) -> Iterator[OpenHead]:
    """A head at which machines can arrive, for the length of the context.

    Args:
        search_path: directories in which the job's modules are looked for first.
        left: run that a head before this one has left, which goes on with the modules and settings
            with which it began; None: a new one begins.
        note: shows the user a text.

    Raises:
        ConfigError: nobody can listen at the address, the job's modules cannot be sent, or nothing
            can be written to the place of saves. Or failure domains are given by numbers of nodes,
            or machines are to be granted.
    """
    if domains := config.checkpoint.failure_domains:
        remedy = (
            "numbers of nodes cannot name machines that come by themselves; leave the key out, and "
            "start each agent with --domain NAME"
        )
        raise ConfigError("checkpoint.failure_domains", domains, remedy)
    if grant_s := config.cluster.grant_s:
        remedy = (
            "machines come by themselves here, and nobody is asked to grant one; leave the key "
            "out. cluster.wait_s says how long the job waits for another machine"
        )
        raise ConfigError("cluster.grant_s", grant_s, remedy)
    with suppress(FileNotFoundError):  # The current directory may have been removed.
        search_path = [*search_path, getcwd()]
    sources = user_sources(config, search_path)
    with place_mark(config.checkpoint.directory) as mark, Runner() as runner:
        listeners, address = listen(listening.address)
        new_offer = JobOffered(run=secrets.token_hex(8), job=config, mark=mark, sources=sources)
        offer = new_offer if left is None else _offer_of(left, mark)
        checks = MachineChecks(offer.job, mark, cache_directory=cache_directory(), note=note)
        machines = Machines(
            offer, listening.credentials, num_max=listening.nodes_max, checks=checks, note=note
        )
        operator = _machine_operator(listening, address, machines, note=note)
        note(f"listening at {address_text(address)}; on each machine: {join_text(address)}")
        head = OpenHead(
            runner, listeners, address, machines, keeps_run=left is not None, operator=operator
        )
        head.new_offer = new_offer
        try:
            with head:
                yield head
        finally:
            if head.keeps_run and not head.is_taken:
                note(_kept_text(offer.job.cluster.patience_s))


def _offer_of(left: RunRecord, mark: str) -> JobOffered:
    """A run as it is offered to the machines that have come, or come back, since it was left."""
    return JobOffered(run=left.run, job=left.job, mark=mark, sources=left.sources)


def _machine_operator(
    listening: Listening, address: Address, machines: Machines, *, note: Callable[[str], None]
) -> MachineOperator | None:
    """Who asks for machines in place of lost ones; None: nobody does."""
    if not listening.operator:
        return None
    own = map(address_text, reachable_addresses(address))
    heads = list(dict.fromkeys(filter(None, (listening.advertised, *own))))
    platform = open_platform(listening.operator, heads=heads, token_file=listening.token_file)
    return MachineOperator(platform, machines, note=note)


def _kept_text(patience_s: float) -> str:
    return (
        "the nodes of the run that was left, and its journal, are as they were; the nodes look for "
        f"a head for up to {patience_s:.0f} s more: try again with --reattach"
    )


def join_text(address: Address) -> str:
    """The command that brings a machine to the head that listens at an address.

    A head that listens at all its addresses is named by its machine's name. Other machines may not
    know that name, so an address is told as well.
    """
    command = "planaria agent --join "
    if address[0] not in ANY_HOST:
        return command + address_text(address)
    named = address_text((socket.gethostname(), address[1]))
    others = "".join(f" (or {address_text(each)})" for each in reachable_addresses(address)[:1])
    return f"{command}{named}{others}"


def gather(head: OpenHead, config: JobConfig, listening: Listening) -> tuple[JobConfig, Prepared]:
    """The job with the machines that have come as its nodes, and the facts on it.

    The first machine of each kind looks for the facts, and those of the fastest kind count.

    Raises:
        ConfigError: the job is wrong.
        TrainingError: the user's code raised.
        InsufficientError: too few machines came in time, or the process that examined the job was
            killed.
    """
    machines = head.machines
    remove_other_marks(config.checkpoint.directory, machines.checks.mark)
    wait_ready = partial(machines.wait_ready, listening.nodes_min, timeout_s=listening.wait_s)
    head.runner.run(wait_ready())
    measured: dict[Kind, Prepared] = {}
    while not measured or _has_other_kinds(machines, config, measured):
        measured = head.runner.run(machines.prepare(_prepare_request(config), measured))
        for answer in measured.values():
            if answer.mistake is not None:
                raise mistake_error(answer.mistake)
            if answer.traceback:
                raise TrainingError(-1, answer.traceback)
        head.runner.run(wait_ready())  # Some may have gone meanwhile.
    prepared = of_fastest_kind(measured)
    prepared = with_memory_limit(prepared, config, machines.facts)
    if not config.model.profile:
        links = head.runner.run(machines.measure_links())
        prepared = with_measured_links(prepared, links)
    begin_kinds(head, config, prepared, measured)
    head.runner.run(wait_ready())  # Those that came last are compared again.
    num_nodes = num_first_nodes(machines.num_ready, config.cluster, listening)
    return replace(config, cluster=replace(config.cluster, nodes=num_nodes)), prepared


def _has_other_kinds(
    machines: Machines, config: JobConfig, measured: Mapping[Kind, Prepared]
) -> bool:
    """Whether machines are ready whose kind has to be measured and was not, as they came later."""
    others = [facts for facts in machines.facts if kind_of(facts) not in measured]
    return bool(others) and not config.model.profile


def new_run(
    head: OpenHead,
    config: JobConfig,
    listening: Listening,
    show_step: Callable[[str], None],
    *,
    resume: bool,
    note: Callable[[str], None],
) -> RunRecord:
    """The record of a run that begins on the machines that come.

    Args:
        show_step: shows the user that a step begins that takes seconds.
        resume: whether the job goes on from the newest save.
        note: shows the user a text.

    Raises:
        ConfigError, TrainingError, InsufficientError: the same as in `gather`.
        DoneError: the job was started again, and has nothing left to train.
    """
    may_begin = listening.may_begin
    find = partial(find_start, config, resume=resume, may_begin=may_begin, note=note)
    # Nodes of a lost head save what they hold when their machines come here.
    left = newest_parts(config) if resume else ""
    if left:
        head.runner.run(call_nodes(head, config, run=left))
    with _awaiting_machines_of_done_job(head, listening):
        if left and may_begin:
            check_not_done(config)
        start = Start() if left else find()
    show_step(f"waiting for {count_text(listening.nodes_min, 'machine')}")
    config, prepared = gather(head, config, listening)
    if left:
        start = find(runner=head.runner)
    parts = next_parts(config, head.run)
    return RunRecord(
        run=head.run,
        job=config,
        prepared=prepared,
        resumed=start.manifest,
        epoch=start.epoch,
        parts=parts,
        digests=head.machines.checks.digests,
        sources=head.machines.offer.sources,
    )


@contextmanager
def _awaiting_machines_of_done_job(head: OpenHead, listening: Listening) -> Iterator[None]:
    """Lets machines come for a while if the job is done, so that they are told, and end."""
    try:
        yield
    except DoneError:
        machines, num_nodes = head.machines, listening.nodes_min
        have_come = wait_until(lambda: len(machines.connected) >= num_nodes, timeout_s=_DONE_S)
        head.runner.run(have_come)
        raise


def num_first_nodes(num_ready: int, cluster: ClusterConfig, listening: Listening) -> int:
    """The number of nodes with which the job begins, as many as can; the others wait (`standby`).

    Args:
        num_ready: number of machines that are ready, of which some may be left over.
    """
    most = listening.nodes_max - cluster.standby
    return max(listening.nodes_min, min(num_ready - cluster.standby, most))


def begin_kinds(
    head: OpenHead, config: JobConfig, prepared: Prepared, measured: Mapping[Kind, Prepared]
) -> None:
    """Tells the head by what the job is planned, so that it knows what to ask of later machines.

    Those that are ready already are asked, too.

    Args:
        measured: facts that the first machine of each kind has found.
    """
    machines, request = head.machines, _prepare_request(config)
    machines.kinds.begin(request, prepared, measured)
    profile = prepared.profile
    assert profile is not None
    # The limit of an accelerator is that of its own memory, and says nothing of its machine's.
    is_of_machines = request.profile is None and profile.device == "cpu"
    if is_of_machines and not config.cluster.device_memory_bytes:
        limit_bytes = profile.device_memory_bytes
        machines.checks.memory_bytes_min = limit_bytes * config.cluster.devices_per_node
    machines.compare_again()


def _prepare_request(config: JobConfig) -> PrepareRequest:
    profile = given_profile(config)
    return PrepareRequest(job=config, cache_directory="", profile=profile, keeps_tokenizer=True)
