"""What the processes of a job are told when they start.

Payloads of the fork server: they travel in memory, never in argv, for they hold the job's token.
"""

from typing import Any

import msgspec

from planaria.core.inject import Place
from planaria.core.job import JobConfig
from planaria.core.plan import ModelProfile


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent, and each of its workers, is told when it is forked.

    Attributes:
        worker: the worker's main function, "module:function".
        cache_directory: where tokens and profiles are kept between jobs.
        profile: of the model's layers, and of the links between nodes.
        machine: on which the node is; a node that takes the place of a lost one may be on its.
        trace: whether workers report the spans of every iteration.
        places: at which faults are to be injected on this node, and where the launcher listens
            for whoever gets there.
        heeds: whether workers keep a line to the launcher, for faults that no step brings about.
        device: given to a worker by its agent, like what follows.
        clocks_fd: of the clocks that pace the node's links, -1 where they are not paced.
        copies_fd: of the memory for copies of layers, -1 where there are none.
    """

    job: JobConfig
    node: int
    token: bytes
    coordinator: tuple[str, int]
    worker: str
    cache_directory: str
    machine: str = ""
    profile: ModelProfile | None = None
    trace: bool = False
    places: tuple[Place, ...] = ()
    injector: tuple[str, int] = ("", 0)
    heeds: bool = False
    device: int = 0
    clocks_fd: int = -1
    copies_fd: int = -1

    @property
    def rank(self) -> int:
        """The rank of the worker that this spec is given to."""
        return self.node * self.job.cluster.devices_per_node + self.device


class PrepareRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the process that looks at a job before it starts is told.

    Attributes:
        profile: given by the user; measured where it is None.
        processors: that all ranks share; 0: each has its own.
    """

    job: JobConfig
    cache_directory: str
    profile: ModelProfile | None = None
    processors: int = 0


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """What it found.

    Attributes:
        parameters: for each layer its parameters' names, without later uses of tied ones.
        config: of the model, as other tools read it from config.json; empty if it has none.
        mistake: (field, value, remedy) of a ConfigError; the rest is empty then.
        traceback: of what the user's code raised; the rest is empty then.
    """

    profile: ModelProfile | None = None
    num_samples: int = 0
    vocabulary_size: int = 0
    objective: str = ""
    parameters: tuple[tuple[str, ...], ...] = ()
    num_parameters: int = 0
    config: dict[str, Any] = {}
    mistake: tuple[str, str, str] | None = None
    traceback: str = ""
