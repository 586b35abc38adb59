"""Every exception that planaria raises.

PlanariaError
|-- ConfigError          the user's mistake: exit code 2; 75 if it is a place that may be back later
|   `-- DivergedError    training diverged
|-- DoneError            the job that somebody starts again is done: exit code 0
|-- InfeasibleError      no plan satisfies what is asked for; callers turn it into a ConfigError
|-- InsufficientError    too few nodes or copies are left to go on: exit code 3
|-- TrainingError        the user's code raised, or workers failed again and again: exit code 1
|-- ScheduleError        a schedule breaks a rule
|   `-- DeadlockError    a schedule cannot finish
|-- CheckpointError      a checkpoint cannot be written or read: exit code 1
|   |-- UnreadableError  a disk or store refuses to give what it has
|   |   `-- LateError    it does not answer at all
|   |-- UnwritableError  a disk or store refuses to take what it is given
|   `-- SpoiltError      a version on disk is not what was saved
|-- AuthenticationError  the other end of a connection does not know the job's token
|-- PeerLostError        a link to another rank is gone
|-- AbortedError         an operation was freed because its epoch is over
|-- CorruptedError       holders of a layer have different parameters
`-- StoreError           the store of coordination cannot go on
    |-- ConflictError    a guard of a write does not hold
    |-- LeaseLostError   a lease has ended
    `-- CompactedError   a watch wants changes that are no longer kept
"""

from enum import Enum
from typing import NamedTuple


class PlanariaError(Exception):
    """Raised only as one of its subclasses; catch it to catch all."""


class ConfigError(PlanariaError):
    """When what the user asked for is wrong or impossible.

    Attributes:
        field: the key or argument at fault, as the user writes it ("training.iterations"); "" where
            no single one is at fault: then the message is the remedy alone.
        value: the value that was given.
        remedy: a sentence without a full stop that says which value works.
    """

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(f"{field} = {value!r}: {remedy}" if field else remedy)
        self.field = field
        self.value = value
        self.remedy = remedy

    def __reduce__(self) -> tuple[object, ...]:  # Else pickle would give it the message alone.
        return type(self), (self.field, self.value, self.remedy)


class DivergedError(ConfigError):
    """When a loss or a gradient norm is not finite any more."""


class DoneError(PlanariaError):
    """When a job that is started again by the same command has nothing left to train."""


class Limit(Enum):
    """The quantities whose values decide whether there is a plan."""

    NODES = "nodes"
    MAX_NODES = "most nodes"
    KINDS = "nodes of different kinds"
    DEVICES_PER_NODE = "devices per node"
    DEVICE_MEMORY = "bytes of device memory"
    FAILURES = "failures tolerated"
    MICROBATCHES = "microbatches"


class FeasibleValue(NamedTuple):
    """A value with which there would be a plan.

    Attributes:
        or_more: whether larger values would work, too.
    """

    limit: Limit
    value: int
    or_more: bool = False

    def __str__(self) -> str:
        more = "or more " if self.or_more else ""
        return f"{self.value} {more}{self.limit.value}"


class InfeasibleError(PlanariaError):
    """When no plan satisfies what is asked for.

    The planner does not know where the values come from: a job file, or the options of a command.
    The caller knows, and names the keys or options in its own error (job/planning.py).

    Attributes:
        limit: the quantity that is too small or too large.
        value: present value of that quantity.
        why: the reason, in words that name no key and no option.
        remedies: the nearest values that would work, each of them alone.
    """

    def __init__(self, limit: Limit, value: int, why: str, *remedies: FeasibleValue) -> None:
        would_do = f"; values that work: {', '.join(map(str, remedies))}" if remedies else ""
        super().__init__(f"{value} {limit.value}: {why}{would_do}")
        self.limit = limit
        self.value = value
        self.why = why
        self.remedies = remedies

    def __reduce__(self) -> tuple[object, ...]:  # Else pickle would give it the message alone.
        return type(self), (self.limit, self.value, self.why, *self.remedies)


class InsufficientError(PlanariaError):
    """When the job cannot go on: too few nodes or copies are left, or no process or record of the
    job can be kept around them."""


class TrainingError(PlanariaError):
    """When the user's model, data or optimizer raised in a worker; or a worker failed again and
    again for another reason, on a node that the job needs, or on two.

    Attributes:
        rank: the rank that failed, -1 where no rank was involved.
        traceback: the formatted traceback of the user's error, if any, and what else is known.
        checkpoint_text: description of the newest checkpoint to go on from; "" where the job had
            not begun.
        blame: "job" where the user's code raised; else "node", or "memory" that did not do.
    """

    def __init__(
        self, rank: int, traceback: str, *, checkpoint_text: str = "", blame: str = "job"
    ) -> None:
        super().__init__(traceback)
        self.rank = rank
        self.traceback = traceback
        self.checkpoint_text = checkpoint_text
        self.blame = blame


class ScheduleError(PlanariaError):
    """When a schedule breaks a rule; the message holds the table with the step marked."""


class DeadlockError(ScheduleError):
    """When a schedule cannot finish.

    Attributes:
        waiting: text of the action that a rank waits in, for each rank that is stuck.
    """

    def __init__(self, message: str, waiting: dict[int, str]) -> None:
        super().__init__(message)
        self.waiting = waiting


class CheckpointError(PlanariaError):
    """When a checkpoint cannot be written whole, or fails its checks when it is read."""


class UnreadableError(CheckpointError):
    """When a disk or a store refuses to give what it has, which may be whole."""


class LateError(UnreadableError):
    """When a disk or a store does not answer for as long as it is waited for."""


class UnwritableError(CheckpointError):
    """When a disk or a store refuses to take what it is given; it may take it another time."""


class SpoiltError(CheckpointError):
    """When a layer of a complete version of the disk tier cannot be read as it was saved.

    Attributes:
        source: the name of the version.
        layer: the layer; -1: the manifest.
    """

    def __init__(self, source: str, reason: str, *, layer: int = -1) -> None:
        super().__init__(reason)
        self.source = source
        self.layer = layer


class AuthenticationError(PlanariaError):
    """When the other end of a connection does not prove that it knows the job's token."""


class StrangerError(AuthenticationError):
    """When the other end of a connection is no process of planaria at all."""


class PeerLostError(PlanariaError):
    """When the link to another rank closed or broke.

    Attributes:
        rank: the peer at the other end.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"lost rank {rank}: {reason}")
        self.rank = rank


class AbortedError(PlanariaError):
    """When a blocked operation is freed because its links were aborted."""


class CorruptedError(PlanariaError):
    """When holders of a layer turn out to have different parameters.

    Attributes:
        age: number of iterations applied to the parameters.
        hashes: hashes of this rank's parameters, by layer concerned.
    """

    def __init__(self, age: int, hashes: dict[int, int], layers: tuple[int, ...]) -> None:
        super().__init__(
            f"holders differ in layer {', '.join(map(str, layers))} after {age} iterations"
        )
        self.age = age
        self.hashes = hashes


class StoreError(PlanariaError):
    """When the store cannot go on: its journal is damaged, in use by another process, or full."""


class ConflictError(StoreError):
    """When a guard of a write does not hold; nothing was written.

    Attributes:
        key: key of the first guard that does not hold.
        actual_revision: revision of that key, 0 where there is no such key.
    """

    def __init__(self, key: str, revision: int, actual_revision: int) -> None:
        super().__init__(
            f"{key} is at revision {actual_revision}, not {revision}: somebody else has written "
            "it or its lease has ended (0 means that it is not there)"
        )
        self.key = key
        self.actual_revision = actual_revision


class LeaseLostError(StoreError):
    """When a lease has ended: the process that held `lease` counts as dead and stops itself."""

    def __init__(self, lease: int) -> None:
        super().__init__(f"lease {lease} has ended; its holder no longer belongs to the job")
        self.lease = lease


class CompactedError(StoreError):
    """When a watch wants changes older than `first_revision`: read the range, go on from there."""

    def __init__(self, wanted_revision: int, first_revision: int) -> None:
        super().__init__(
            f"changes from revision {wanted_revision} on were asked for, and only those "
            f"from {first_revision} on are kept"
        )
        self.first_revision = first_revision
