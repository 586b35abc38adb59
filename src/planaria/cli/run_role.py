"""The part of `planaria run` on this machine: head of a job and agent, or agent alone.

The same command is started once on each machine. What it is follows from its options, which have
the names and meanings of torchrun's, and else from what torchrun, a scheduler or a cluster left in
the environment. Each fact is taken from the first source that has it:

    fact        option             environment
    machines    --nnodes           PET_NNODES, GROUP_WORLD_SIZE, WORLD_SIZE, SLURM_STEP_NUM_NODES,
                                   SLURM_NNODES, SLURM_JOB_NUM_NODES
    devices     --nproc-per-node   PET_NPROC_PER_NODE
    place       --rdzv-endpoint    PET_RDZV_ENDPOINT, PET_MASTER_ADDR, MASTER_ADDR (and their
                                   ..._PORT), SLURM_STEP_NODELIST, SLURM_JOB_NODELIST,
                                   SLURM_LAUNCH_NODE_IPADDR
    rank        --node-rank        PET_NODE_RANK, GROUP_RANK, NODE_RANK, RANK, SLURM_NODEID,
                                   SLURM_PROCID, JOB_COMPLETION_INDEX

The head is the machine of rank 0; where no rank is known, the machine that has the address of the
place. WORLD_SIZE and RANK count machines only in Kubeflow's PyTorchJob; torchrun sets LOCAL_RANK
beside them and counts workers.

Source: torch/distributed/run.py; srun(1), "OUTPUT ENVIRONMENT VARIABLES"; Kubernetes, "Indexed Job
for Parallel Processing with Static Work Assignment"; Kubeflow's PyTorchJob and TrainJob.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from planaria.errors import ConfigError
from planaria.show.words import count_text
from planaria.transport.acceptor import parse_address
from planaria.transport.sockets import Address, address_text, is_loopback

PORT: Final = 29400  # The port of torchrun's rendezvous.
_OWN_HOST: Final = "127.0.0.1"
_PORT_MAX: Final = (1 << 16) - 1
# Jobs of a scheduler that share a machine get different ports, below those that Linux gives to
# clients.
FIRST_PORT: Final = 20_000
NUM_PORTS: Final = 10_000
_HOSTS_MAX: Final = 1 << 16
_OWN_BACKENDS: Final = ("", "c10d", "static")  # Those of which a machine of the job is the place.
_JOB_DECIDES: Final = ("auto", "cpu", "gpu", "xpu")  # What torchrun counts the devices of.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFlags:
    """The options of `planaria run` that torchrun has, too; "" where one is not given."""

    nnodes: str = ""
    nproc_per_node: str = ""
    rdzv_endpoint: str = ""
    node_rank: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRole:
    """What `planaria run` is on one machine.

    Attributes:
        is_head: whether the machine runs the head; every machine runs an agent.
        join: "HOST:PORT" at which agents find the head.
        listen: "ADDR:PORT" at which the head listens; "" on other machines.
        min_nodes: number of machines with which the job begins; 0 on all but the head.
        max_nodes: largest number of machines at work; 0 on all but the head.
        devices_per_node: number of devices in each machine; 0: as many as the job says.
        why: one line that says what the machine is, and from what that follows.
    """

    is_head: bool
    join: str
    listen: str
    min_nodes: int
    max_nodes: int
    devices_per_node: int
    why: str = ""


class _Setting(NamedTuple):
    """What an option or a variable says; both fields are "" if nobody says it."""

    name: str = ""
    text: str = ""

    def __bool__(self) -> bool:
        return bool(self.name)


_NONE: Final = _Setting()


Environment = Mapping[str, str]


def run_role(
    environment: Environment,
    flags: RunFlags,
    *,
    hostname: str,
    is_here: Callable[[str], bool],
) -> RunRole:
    """What `planaria run` is on this machine.

    Args:
        environment: environment variables of the process.
        hostname: name of this machine.
        is_here: function that says whether a host name or address is one of this machine's.

    Raises:
        ConfigError: a fact is missing, makes no sense, or contradicts another one.
    """
    machines, min_nodes, max_nodes = _machines(environment, flags)
    rank, number = _rank(environment, flags)
    _check_once_per_machine(environment, {machines.name, rank.name}, max_nodes)
    if machines and number >= max_nodes:
        remedy = f"must be below {max_nodes}, as {machines.name} says; ranks count from 0"
        raise ConfigError(rank.name, rank.text, remedy)
    place, (host, port) = _place(environment, flags)
    if not place:
        if max_nodes > 1 or (rank and not machines):
            raise _missing_place(rank, hostname)
        host, port = _OWN_HOST, PORT
    if port == 0:
        if max_nodes > 1:
            raise ConfigError(place.name, place.text, "must name a port other than 0")
        port = PORT
    is_head = number == 0 if rank else is_here(host)
    _check_place(rank, place, is_head=is_head, is_at_place=lambda: is_here(host))
    if is_head and not machines and (rank or place):
        remedy = "must say with how many machines the job begins and how many it may use: MIN:MAX"
        raise ConfigError("--nnodes", flags.nnodes, remedy)
    join = address_text((host, port))
    role = RunRole(
        is_head=is_head,
        join=join,
        listen="" if not is_head else join if is_loopback(host) else f":{port}",
        min_nodes=min_nodes if is_head else 0,
        max_nodes=max_nodes if is_head else 0,
        devices_per_node=_devices(environment, flags),
    )
    why = _why(role, machines=machines, rank=rank, place=place, host=host)
    # Other ranks come from schedulers, whose machines may not have learned their own names yet.
    if is_head and place and rank.name == "--node-rank" and not is_here(host):
        why += (
            f"; {host} is no address of this machine, so agents find the head only if their "
            "connections to it are passed on to here"
        )
    return replace(role, why=why)


# -- the facts ------------------------------------------------------------------------------------


def _variable(environment: Environment, *names: str) -> _Setting:
    """The first of these variables that is set."""
    return next(
        (_Setting(name, environment[name]) for name in names if environment.get(name)), _NONE
    )


def _option(name: str, text: str) -> _Setting:
    """The setting of an option, if it is given."""
    return _Setting(name, text) if text else _NONE


def _number(setting: _Setting, *, minimum: int) -> int:
    text = setting.text.strip()
    if not (text.isascii() and text.isdigit()) or int(text[:9]) < minimum or len(text) > 9:
        raise ConfigError(setting.name, setting.text, f"must be an integer of at least {minimum}")
    return int(text)


def _machines(environment: Environment, flags: RunFlags) -> tuple[_Setting, int, int]:
    """The numbers of machines, least and most; 1 and 1 if nobody says them."""
    kubeflow = ("WORLD_SIZE",) if _has_kubeflow_ranks(environment) else ()
    setting = _option("--nnodes", flags.nnodes) or _variable(
        environment,
        *("PET_NNODES", "GROUP_WORLD_SIZE", *kubeflow),
        *("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    )
    if not setting:
        return setting, 1, 1
    texts = setting.text.split(":")
    try:
        bounds = [_number(_Setting(setting.name, text), minimum=1) for text in texts]
    except ConfigError:
        bounds = []
    if len(bounds) not in (1, 2) or bounds[0] > bounds[-1]:
        raise ConfigError(setting.name, setting.text, "must be N, or MIN:MAX with 1 <= MIN <= MAX")
    return setting, bounds[0], bounds[-1]


def _has_kubeflow_ranks(environment: Environment) -> bool:
    """Whether RANK and WORLD_SIZE, if they are set, count machines."""
    return "LOCAL_RANK" not in environment


def _devices(environment: Environment, flags: RunFlags) -> int:
    setting = _option("--nproc-per-node", flags.nproc_per_node) or _variable(
        environment, "PET_NPROC_PER_NODE"
    )
    if not setting or setting.text in _JOB_DECIDES:
        return 0
    return _number(setting, minimum=1)


def _rank(environment: Environment, flags: RunFlags) -> tuple[_Setting, int]:
    """The rank of this machine; -1 if nobody says it."""
    kubeflow = ("RANK",) if _has_kubeflow_ranks(environment) else ()
    setting = _option("--node-rank", flags.node_rank) or _variable(
        environment,
        *("PET_NODE_RANK", "GROUP_RANK", "NODE_RANK", *kubeflow),
        *("SLURM_NODEID", "SLURM_PROCID", "JOB_COMPLETION_INDEX"),
    )
    return setting, _number(setting, minimum=0) if setting else -1


def _place(environment: Environment, flags: RunFlags) -> tuple[_Setting, Address]:
    """The place at which the head is to be found; if nobody says it, the setting is empty."""
    place = _option("--rdzv-endpoint", flags.rdzv_endpoint)
    if not place and (place := _variable(environment, "PET_RDZV_ENDPOINT")):
        backend = environment.get("PET_RDZV_BACKEND", "")
        if backend not in _OWN_BACKENDS:
            remedy = (
                f"is a server of {backend}, as PET_RDZV_BACKEND says; name a machine of the job"
            )
            raise ConfigError(place.name, place.text, f"{remedy} by --rdzv-endpoint HOST:PORT")
    if place:
        has_port = ":" in place.text.rpartition("]")[2]
        host, port = parse_address(
            place.text if has_port else f"{place.text}:{PORT}", field=place.name
        )
        if host in ("", "0.0.0.0", "::"):
            raise ConfigError(place.name, place.text, "must name a host: HOST:PORT")
        return place, (host, port)
    if place := _variable(environment, "PET_MASTER_ADDR", "MASTER_ADDR"):
        return place, (place.text.strip("[]"), _master_port(environment, place))
    place = _variable(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    if place:
        return place, (slurm_hosts(place.text, field=place.name)[0], _slurm_port(environment))
    place = _variable(environment, "SLURM_LAUNCH_NODE_IPADDR")
    return place, (place.text, _slurm_port(environment))


def _master_port(environment: Environment, place: _Setting) -> int:
    setting = _variable(environment, place.name.replace("ADDR", "PORT"))
    port = _number(setting, minimum=1) if setting else PORT
    if port > _PORT_MAX:
        raise ConfigError(setting.name, setting.text, f"must be at most {_PORT_MAX}")
    # torchrun itself listens at the port that it names to what it starts.
    is_taken = place.name == "MASTER_ADDR" and "TORCHELASTIC_RUN_ID" in environment
    return port % _PORT_MAX + 1 if is_taken else port


def _slurm_port(environment: Environment) -> int:
    job = _variable(environment, "SLURM_JOB_ID")
    if not job:
        return PORT
    return FIRST_PORT + _number(job, minimum=0) % NUM_PORTS


def slurm_hosts(text: str, *, field: str) -> tuple[str, ...]:
    """The names in one of Slurm's lists, such as "n[001-003,7],m1", in their order.

    Args:
        field: variable that holds the list, for the error.

    Raises:
        ConfigError: it is no such list, or has too many names.
    """
    words = re.findall(r"(?:[^,\[\]\s]|\[[^\[\]]*\])+", text)
    hosts: list[str] = []
    try:
        if not words or ",".join(words) != text:
            raise ValueError("it is no list")
        for word in words:
            parts = re.split(r"\[([^\[\]]*)\]", word)  # Those with odd indices are numbers.
            choices = [_numbers(p) if i % 2 else [p] for i, p in enumerate(parts)]
            if len(hosts) + math.prod(map(len, choices)) > _HOSTS_MAX:
                raise ValueError("it is too long")
            hosts.extend(map("".join, itertools.product(*choices)))
    except ValueError:
        remedy = "must be a list of hosts as Slurm writes it, such as n[001-003,7],m1"
        raise ConfigError(field, text, remedy) from None
    return tuple(hosts)


def _numbers(text: str) -> list[str]:
    """The numbers in a list such as "001-003,7"; each range keeps its leading zeros."""
    numbers: list[str] = []
    for item in text.split(","):
        bounds = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", item)
        if bounds is None:
            raise ValueError("it is no number and no range")
        first, last = int(bounds[1]), int(bounds[2] or bounds[1])
        if not 0 <= last - first < _HOSTS_MAX:
            raise ValueError("it is an empty range, or too long")
        numbers.extend(str(n).zfill(len(bounds[1])) for n in range(first, last + 1))
    return numbers


# -- contradictions -------------------------------------------------------------------------------


def _check_once_per_machine(environment: Environment, names: set[str], max_nodes: int) -> None:
    """Refuses to run beside another `planaria run` of the machine, or without those of others.

    Args:
        names: options and variables that say how many machines there are, and which one this is.
    """
    has_slurm = any(name.startswith("SLURM_") for name in names)
    tasks = _variable(environment, "SLURM_STEP_TASKS_PER_NODE")
    if has_slurm and tasks and not re.fullmatch(r"1(\(x[0-9]+\))?(,1(\(x[0-9]+\))?)*", tasks.text):
        raise ConfigError(
            tasks.name, tasks.text, "must be 1: srun --ntasks-per-node=1 planaria run"
        )
    is_of_slurm = any(name in names for name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"))
    if is_of_slurm and max_nodes > 1 and "SLURM_STEP_ID" not in environment:
        remedy = (
            "only this one runs planaria; start it on all: srun --ntasks-per-node=1 planaria run"
        )
        raise ConfigError("", "", f"the job of Slurm has {max_nodes} machines, and {remedy}")
    workers = _variable(environment, "LOCAL_WORLD_SIZE")
    if "GROUP_RANK" in names and workers and workers.text != "1":
        remedy = "must be 1: torchrun --nproc-per-node=1, and cluster.devices_per_node in the job"
        raise ConfigError(workers.name, workers.text, remedy)


def _check_place(
    rank: _Setting, place: _Setting, *, is_head: bool, is_at_place: Callable[[], bool]
) -> None:
    """Refuses a place of which one says that the head is there, and another that it is elsewhere.

    Only schedulers give each rank a machine of its own; else several ranks may share one. The
    name of a service in Kubernetes may be none of the machine's own.

    Args:
        is_at_place: function that says whether the place is this machine; it may take seconds.
    """
    by_slurm = rank.name.startswith("SLURM_") and not place.name.startswith("SLURM_")
    by_kubernetes = rank.name == "JOB_COMPLETION_INDEX" and not is_head
    if not (by_slurm or by_kubernetes) or is_at_place() == is_head:
        return
    remedy = (
        "is not this machine, but the head is here"
        if is_head
        else "is this machine, but the head is on another one"
    )
    advice = (
        "leave it out, or name the first machine of the job"
        if by_slurm
        else "name the machine of index 0"
    )
    says = f"as {rank.name} = {rank.text} says"
    raise ConfigError(place.name, place.text, f"{remedy}, {says}; {advice}")


def _missing_place(rank: _Setting, hostname: str) -> ConfigError:
    """The error that nobody says where the head is."""
    example = f"HOST:{PORT}"
    if rank.name == "JOB_COMPLETION_INDEX" and hostname.endswith(f"-{rank.text}"):
        first = f"{hostname.removesuffix(rank.text)}0"
        example = f"{first}.SERVICE:{PORT}, where SERVICE is the job's headless service"
    remedy = f"must say where the head is, the same on each machine, such as {example}"
    return ConfigError("--rdzv-endpoint", "", remedy)


def _why(role: RunRole, *, machines: _Setting, rank: _Setting, place: _Setting, host: str) -> str:
    if not (machines or rank or place):
        return "this machine is the head and the only agent: nothing names another machine"
    is_not = "is" if role.is_head else "is not"
    reason = f"rank {int(rank.text)} ({rank.name})" if rank else f"{host} {is_not} this machine"
    at = f"at {role.join}" + (f" ({place.name})" if place else "")
    if not role.is_head:
        return f"this machine is an agent: {reason}; the head is {at}"
    num_text = count_text(role.max_nodes, "machine")
    if role.min_nodes < role.max_nodes:
        num_text = f"{role.min_nodes} to {num_text}"
    return f"this machine is the head and an agent: {reason}; {num_text} ({machines.name}) {at}"
