"""What `planaria doctor` finds out: single checks, and paths between machines."""

from typing import Final

import msgspec

HEAD: Final = "head"  # Name of the head in paths; no machine has it.


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at.

    Attributes:
        subject: name of the thing.
        value: state in which it is.
        remedy: change that is needed; "": none.
        is_fatal: whether no job works until it is changed.
    """

    subject: str
    value: str
    remedy: str = ""
    is_fatal: bool = False

    @property
    def verdict(self) -> str:
        """The result in a word: "ok", "warning" or "problem"."""
        if not self.remedy:
            return "ok"
        return "problem" if self.is_fatal else "warning"


class MachineCheckup(msgspec.Struct, frozen=True, kw_only=True):
    """What `planaria doctor` finds out of one machine of a job.

    Attributes:
        name: name of the machine.
        host: address at which others reach it.
        domain: name of its failure domain; "": none was given.
        node: node that it runs; -1: none.
        processor: model of its processor.
        versions: version by package name.
        checks: checks of the machine; none if it did not answer.
        clock_offset_s: time of its clock minus that of the head's.
        clock_error_s: bound on the error of that; -1.0: the machine did not answer.
    """

    name: str
    host: str
    domain: str = ""
    node: int
    processor: str
    versions: dict[str, str]
    checks: tuple[CheckResult, ...] = ()
    clock_offset_s: float = 0.0
    clock_error_s: float = -1.0


class PathCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The path from one machine to another.

    Attributes:
        source: name of the machine that connects, or HEAD.
        target: name of the machine that listens, or HEAD.
        latency_s: measured latency.
        bandwidth_bytes_per_s: measured bandwidth; 0.0: it was not measured.
        problem: reason why there is no path; "": there is one.
    """

    source: str
    target: str
    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = 0.0
    problem: str = ""


class ClusterCheckup(msgspec.Struct, frozen=True, kw_only=True):
    """What `planaria doctor HOST:PORT` finds out.

    Attributes:
        head_versions: version by package name, at the head.
        machines: machines that are connected to the head.
        paths: paths between machines, both directions of each pair, and those from the head.
        num_paths_left: number of paths for which there was no time.
        note: reason why the bandwidth of no path, or not of all, was measured; "": it was.
    """

    head_versions: dict[str, str]
    machines: tuple[MachineCheckup, ...]
    paths: tuple[PathCheck, ...]
    num_paths_left: int = 0
    note: str = ""
