"""What the processes of a job are told when they start.

These payloads of the fork server travel in memory, never in argv, because they hold the job's
token.
"""

from typing import Any, NamedTuple

import msgspec

from planaria.core.inject import Place
from planaria.core.job import JobConfig
from planaria.core.plan import ModelProfile


class NumSamples(NamedTuple):
    """Numbers of samples of the data, and of the held-out data that are evaluated."""

    data: int = 0
    held_out: int = 0


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent, and each of its workers, is told when it is forked.

    Attributes:
        coordinator: host and port of the coordinator.
        worker: main function of workers, "module:function".
        checks_links: whether messages between ranks have checksums; the same on all nodes.
        host: name or address of the node's machine, at which other nodes reach its workers.
        cache_directory: directory in which tokens and profiles are kept between jobs.
        machine: name of the machine that the node runs on; a node that takes the place of a lost
            one may run on the same machine.
        slot: number among the nodes that share the machine, which no other live one has; -1: not
            known, and the node's number stands for it.
        domain: name of the failure domain of that machine; "": none is known.
        speed: speed of that machine relative to the job's profile, as far as it is known.
        patience_s: seconds in which the node looks for a head that it has lost; 0: the head is on
            this machine, and the node ends with it.
        notice: source of preemption notices for this machine (nodes/notices.py); empty: the job's
            own, `cluster.notice`.
        profile: costs of the model's layers and of the links between nodes.
        num_samples: numbers of samples that the job began with; 0: not known.
        trace: whether workers report the spans of every iteration.
        places: places at which faults are to be injected on this node.
        injector: host and port at which the launcher listens for processes that reach such a place.
        heeds: whether workers keep a connection to the launcher, for faults that no step triggers.
        other_coordinators: further addresses at which a coordinator on another machine may be, for
            after a head was lost with its machine.
        parts: directory of the run at the place of saves, in which ranks save what they hold if the
            head never comes back (checkpoint/disk/parts.py); "": they do not.
        credentials: contents of the token file with which the agent connects to a coordinator on
            another machine; b"": the coordinator is on this machine, and the token is enough.
        device: number of the worker's device; the agent fills in this and the following for each
            worker.
        clocks_fd: descriptor of the clocks that pace the node's links; -1: the links are not paced.
        copies_fd: descriptor of the memory for copies of layers; -1: the node keeps no copies.
    """

    job: JobConfig
    node: int
    token: bytes
    coordinator: tuple[str, int]
    worker: str
    cache_directory: str
    machine: str = ""
    slot: int = -1
    domain: str = ""
    speed: float = 1.0
    host: str = "127.0.0.1"
    checks_links: bool = False
    patience_s: float = 0.0
    notice: str = ""
    profile: ModelProfile | None = None
    num_samples: NumSamples = NumSamples()
    trace: bool = False
    places: tuple[Place, ...] = ()
    injector: tuple[str, int] = ("", 0)
    heeds: bool = False
    other_coordinators: tuple[tuple[str, int], ...] = ()
    parts: str = ""
    credentials: bytes = b""
    device: int = 0
    clocks_fd: int = -1
    copies_fd: int = -1

    def __repr__(self) -> str:
        """The node alone: logs and tracebacks must not show the secrets of the job."""
        return f"NodeSpec(node={self.node}, ...)"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """The node alone, for the same reason."""
        return [("node", self.node)]

    @property
    def device_number(self) -> int:
        """The number of the worker's device among those of the machine, modulo how many it has."""
        slot = self.node if self.slot < 0 else self.slot
        return slot * self.job.cluster.devices_per_node + self.device

    @property
    def rank(self) -> int:
        """The rank of the worker with this spec."""
        return self.node * self.job.cluster.devices_per_node + self.device


class PrepareRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the process that examines a job before it starts is told.

    Attributes:
        profile: profile given by the user; None: the process measures one.
        processors: number of processors that all ranks share; 0: each rank has its own.
        keeps_tokenizer: whether a tokenizer that is learned from text is kept beside the saves.
    """

    job: JobConfig
    cache_directory: str
    profile: ModelProfile | None = None
    processors: int = 0
    keeps_tokenizer: bool = False


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """What the process that examines a job found.

    Attributes:
        parameters: names of the parameters of each layer, by layer; later uses of tied ones are
            left out.
        notes: lines for the user.
        has_own_tokens: whether the data are text, whose tokens are planaria's own.
        tokenizer_file: path of the tokenizer that was learned from the text; empty: none was.
        config: configuration of the model, as other tools read it from config.json; empty: it has
            none.
        mistake: (field, value, remedy) of a ConfigError; all else is then empty.
        traceback: traceback of what the user's code raised; all else is then empty.
    """

    profile: ModelProfile | None = None
    num_samples: NumSamples = NumSamples()
    vocabulary_size: int = 0
    objective: str = ""
    parameters: tuple[tuple[str, ...], ...] = ()
    num_parameters: int = 0
    config: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    has_own_tokens: bool = False
    tokenizer_file: str = ""
    mistake: tuple[str, str, str] | None = None
    traceback: str = ""
