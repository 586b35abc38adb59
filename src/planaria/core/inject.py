"""Faults on demand: specs `KIND[=VALUE]:NODES@ITERATION[.STEP]`, read and written.

    kill:2@5             SIGKILL node 2 when iteration 5 starts
    kill:2,4@5.reduce    SIGKILL nodes 2 and 4 when the first of them reduces in iteration 5
    hang=8:1@3           stop node 1 for 8 seconds when iteration 3 starts
    leader:@4.commit     kill the coordinator, which is no node
    forkserver:@4        kill the fork server, from which all others are forked; it is no node
    head:@4.reduce       kill the head of a job on several machines, with its coordinator
    kill:0@5.transfer    kill node 0 in the first recovery that begins at or after iteration 5
    kill:0@~2.5          kill node 0 2.5 seconds after training starts
    flip:2@5             flip a bit of a parameter on node 2 right after the commit of iteration 5
    preempt=5:1@3        tell node 1 that it will be gone after 5 seconds, and kill it then
    join:2@5             two more nodes join
    slow=2:3@4           from iteration 4 on node 3 takes twice as long; slow=1:3@9 ends that
    cut=4:2,3@5          nodes 2 and 3 have no network to all other nodes for 4 seconds
    store=2:@5           from then on each request to the checkpoint directory takes 2 s longer
    disk=4:@5            the disk of the coordinator's journal does not answer for 4 seconds
    refuse=2:@5          the checkpoint directory refuses everything for 2 seconds, as if full

All specs with the same place take effect together.

Source: torchft's failure injection at (rank, step).
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planaria.errors import ConfigError

# Faults of disks: they delay or refuse requests in the processes that make them.
DISKS = ("store", "disk", "refuse")
# Faults outside the nodes, whose specs name no nodes.
NODELESS_KINDS = ("leader", "forkserver", "head", *DISKS)
# Faults that may strike a job whose nodes are processes of one machine.
LOCAL_KINDS = (
    *("kill", "hang", "stall", "crash", "leader", "flip", "preempt", "join", "slow", "cut"),
    *("forkserver", *DISKS),
)
KINDS = (*LOCAL_KINDS, "head")
# Kinds whose VALUE is a number of seconds, with the default; 0: for ever.
SECONDS = {"hang": 0.0, "preempt": 30.0, "cut": 0.0, "store": 1.0, "disk": 5.0, "refuse": 2.0}
ITERATION_STEPS = ("start", "forward", "backward", "reduce", "commit", "optimizer")
RECOVERY_STEPS = ("detect", "decide", "regroup", "transfer", "resume")
STEPS = (*ITERATION_STEPS, *RECOVERY_STEPS)
# Steps of the coordinator; all other steps are those of each node.
COORDINATOR_STEPS = ("detect", "decide")
# The step of kind flip only: the iteration is applied, but not saved yet.
AFTER_COMMIT = "applied"

_SPEC = re.compile(
    r"(?P<kind>[a-z]+)(=(?P<value>[0-9.]+))?:(?P<nodes>[0-9,]*)"
    r"@(~(?P<at_s>[0-9.]+)|(?P<iteration>[0-9]+)(\.(?P<step>[a-z]+))?)",
    re.ASCII,
)
_FORM = "write KIND[=VALUE]:NODES@ITERATION[.STEP], as in kill:2@5 or kill:2,4@5.reduce"


@dataclass(frozen=True, slots=True)
class Place:
    """A moment of a job: a step of an iteration, or a time.

    Attributes:
        at_s: seconds since training started; -1: iteration and step tell the moment.
    """

    iteration: int
    step: str
    at_s: float = -1.0

    @property
    def is_in_recovery(self) -> bool:
        return self.step in RECOVERY_STEPS


@dataclass(frozen=True, slots=True)
class Injection:
    """A fault that is to be injected.

    Attributes:
        nodes: nodes that the fault hits; empty for faults outside the nodes and for joins.
        value: meaning by kind. hang, cut, disk, refuse: seconds that the fault lasts (0: for ever).
            preempt: seconds from the notice until the node is killed. slow: factor on the node's
            seconds. store: seconds that each request to the checkpoint directory takes longer.
        num_nodes: number of nodes that join; 0 for other kinds.
    """

    kind: str
    nodes: tuple[int, ...]
    place: Place
    value: float = 0.0
    num_nodes: int = 0

    @property
    def spec(self) -> str:
        """The SPEC of this injection, as `parse_injection` reads it."""
        place = self.place
        is_default = self.value == SECONDS.get(self.kind, 0.0)
        value = "" if is_default else f"={_digits(self.value)}"
        target = str(self.num_nodes) if self.num_nodes else ",".join(map(str, self.nodes))
        step = "" if place.step in ("start", AFTER_COMMIT) else f".{place.step}"
        moment = f"{place.iteration}{step}" if place.at_s < 0.0 else f"~{_digits(place.at_s)}"
        return f"{self.kind}{value}:{target}@{moment}"


def _digits(number: float) -> str:
    """The number in decimal digits, without an exponent."""
    return f"{number:.9f}".rstrip("0").rstrip(".")


def parse_injection(text: str) -> Injection:
    """The injection that a SPEC describes.

    Raises:
        ConfigError: the text does not have the form, or names no known kind or step.
    """
    match = _SPEC.fullmatch(text.strip())
    if match is None:
        raise ConfigError("--inject", text, _FORM)
    kind, step = match["kind"], match["step"] or "start"
    if kind not in KINDS:
        raise ConfigError("--inject", text, f"KIND is one of {', '.join(KINDS)}")
    if step not in STEPS:
        raise ConfigError("--inject", text, f"STEP is one of {', '.join(STEPS)}")
    if match["value"] is not None and kind not in (*SECONDS, "slow"):
        raise ConfigError("--inject", text, f"{kind} takes no value")
    try:
        nodes = tuple(sorted({int(node) for node in match["nodes"].split(",") if node}))
        value = float(match["value"] or SECONDS.get(kind, 0.0))
        at_s = float(match["at_s"]) if match["at_s"] else -1.0
        iteration = int(match["iteration"] or 0)
    except ValueError as error:
        raise ConfigError("--inject", text, _FORM) from error
    if iteration >= 2**63 or not math.isfinite(value) or not math.isfinite(at_s):
        raise ConfigError("--inject", text, _FORM)
    if kind == "join":
        return _join(text, nodes, Place(iteration, step, at_s))
    if (kind in NODELESS_KINDS) == bool(nodes):
        remedy = f"{kind} names no nodes" if nodes else f"say which nodes, as in {kind}:2@5"
        raise ConfigError("--inject", text, remedy)
    if kind == "flip" and (match["step"] or match["at_s"]):
        remedy = (
            "a flip always strikes right after the commit of an iteration; name only the "
            "iteration, as in flip:2@5"
        )
        raise ConfigError("--inject", text, remedy)
    if kind == "slow" and (value < 1.0 or match["at_s"]):
        remedy = (
            "say how many times as long the node takes, and from which iteration on, as in "
            "slow=2:3@4"
        )
        raise ConfigError("--inject", text, remedy)
    place = Place(iteration, AFTER_COMMIT if kind == "flip" else step, at_s)
    return Injection(kind, nodes, place, value)


def _join(text: str, nodes: tuple[int, ...], place: Place) -> Injection:
    """The injection of a join, whose SPEC has a number of nodes where others name nodes."""
    if len(nodes) != 1 or nodes == (0,):
        raise ConfigError("--inject", text, "say how many nodes join, as in join:2@5")
    return Injection("join", (), place, num_nodes=nodes[0])


def check_on_one_machine(injections: Sequence[Injection]) -> None:
    """Refuses injections that make sense only where the nodes run on other machines.

    Raises:
        ConfigError: the head is to be killed.
    """
    for injection in injections:
        if injection.kind not in LOCAL_KINDS:
            remedy = (
                "the nodes here end with it; start the job with --listen, or kill its coordinator: "
                f"{replace(injection, kind='leader').spec}"
            )
            raise ConfigError("--inject", injection.spec, remedy)


def check_on_machines(injections: Sequence[Injection]) -> None:
    """Refuses injections that cannot reach nodes on other machines than their head.

    Raises:
        ConfigError: a node is to be cut off.
    """
    for injection in injections:
        if injection.kind == "cut":
            remedy = (
                "the network between machines is not this program's to cut; take the machine's "
                "interface down and up again (ip link set DEV down), or stop its node for as "
                f"long: {replace(injection, kind='hang').spec}"
            )
            raise ConfigError("--inject", injection.spec, remedy)


def check_injections(injections: Sequence[Injection], *, num_nodes: int) -> None:
    """Refuses injections at nodes that a job never has.

    Args:
        num_nodes: number of nodes that the job starts with.

    Raises:
        ConfigError: a node does not exist.
    """
    num_nodes += sum(injection.num_nodes for injection in injections)
    for injection in injections:
        for node in injection.nodes:
            if node >= num_nodes:
                remedy = f"the job has nodes 0 to {num_nodes - 1}"
                raise ConfigError("--inject", injection.spec, remedy)
