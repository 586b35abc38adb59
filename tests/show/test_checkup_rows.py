"""The rows of `planaria doctor HOST:PORT`: each difference and fault is told, with what to do."""

from dataclasses import dataclass

import msgspec
import pytest

from planaria.core.checkups import CheckResult, ClusterCheckup, MachineCheckup, PathCheck
from planaria.show.checkup_rows import checkup_rows

MEMORY = CheckResult(subject="memory", value="8.0 GiB")
SMALL = CheckResult(subject="open files", value="64", remedy="raise the hard limit")
VERSIONS = {"planaria": "1", "python": "3.12", "torch": "2.9"}
RATE = 1e9


@dataclass
class Told:
    """The rows of a checkup as text."""

    rows: list[tuple[str, str, str, str, str]]

    def of(self, subject: str) -> list[tuple[str, str, str, str, str]]:
        return [row for row in self.rows if row[1] == subject]


def machine(
    name: str,
    *checks: CheckResult,
    host: str = "",
    versions: dict[str, str] = VERSIONS,
    processor: str = "x",
    offset_s: float = 0.0,
    error_s: float = 0.001,
) -> MachineCheckup:
    return MachineCheckup(
        name=name,
        host=host or f"10.0.0.{ord(name[0])}",
        node=-1,
        processor=processor,
        versions=versions,
        checks=checks or (MEMORY,),
        clock_offset_s=offset_s,
        clock_error_s=error_s,
    )


def path(source: str, target: str, rate: float = RATE, problem: str = "") -> PathCheck:
    return PathCheck(
        source=source,
        target=target,
        latency_s=0.0 if problem else 1e-4,
        bandwidth_bytes_per_s=0.0 if problem else rate,
        problem=problem,
    )


def told(
    *machines: MachineCheckup, paths: tuple[PathCheck, ...] = (), note: str = "", left: int = 0
) -> Told:
    checkup = ClusterCheckup(
        head_versions=VERSIONS, machines=machines, paths=paths, note=note, num_paths_left=left
    )
    rows = checkup_rows(checkup)
    return Told(
        [(row.where, row[1].subject, row[1].value, row[1].verdict, row[1].remedy) for row in rows]
    )


def test_machines_that_are_alike_are_one_row() -> None:
    rows = told(machine("a"), machine("b"), machine("c", MEMORY, SMALL))

    assert rows.of("memory") == [("a, b, c", "memory", "8.0 GiB", "ok", "")]
    assert rows.of("open files")[0][0] == "c"
    assert rows.rows[0][1] == "open files"  # What needs a change comes first.
    assert not rows.of("versions of torch")


def test_versions_and_processors_that_differ_are_told() -> None:
    other = machine("b", versions={**VERSIONS, "torch": "2.8"}, processor="y")
    rows = told(machine("a"), other, machine("c"))

    [(_, _, value, verdict, remedy)] = rows.of("versions of torch")
    assert (value, verdict) == ("2.9 on a, c; 2.8 on b", "warning")
    assert "one version" in remedy
    assert rows.of("processor models")[0][2] == "x on a, c; y on b"
    assert not rows.of("versions of planaria")


def test_the_version_of_the_head_counts_too() -> None:
    new = {**VERSIONS, "planaria": "2"}

    assert told(machine("a", versions=new), machine("b", versions=new)).of("versions of planaria")


def test_a_clock_that_is_wrong_is_told_and_one_that_may_be_right_is_not() -> None:
    """A slow answer proves nothing."""
    rows = told(
        machine("a"), machine("b", offset_s=-60.0), machine("c", offset_s=2.0, error_s=1.5)
    ).of("clock offset")

    assert [row[0] for row in rows] == ["b", "a, c"]
    assert rows[0][2] == "60.00 s behind the head's"
    assert [row[3] for row in rows] == ["warning", "ok"]


def test_a_machine_at_a_loopback_address_is_a_problem_unless_all_are() -> None:
    here = machine("a", host="127.0.0.1")

    [row] = told(here, machine("b")).of("address")
    assert (row[0], row[3]) == ("a", "problem")
    assert "--advertise" in row[4]
    assert not told(here, machine("b", host="127.0.0.2")).of("address")


def test_broken_paths_are_problems_and_slow_ones_warnings() -> None:
    paths = (
        path("a", "b"),
        path("b", "a", RATE / 4),
        path("a", "c"),
        path("c", "a", problem="10.0.0.97:5 cannot be reached: timed out"),
    )
    rows = told(machine("a"), machine("b"), machine("c"), paths=paths).of("path")

    assert [(row[0], row[3]) for row in rows] == [
        ("c to a", "problem"),
        ("b to a", "warning"),
        ("a to b", "ok"),
        ("a to c", "ok"),
    ]
    assert rows[2][2] == "100.0 us, 8.00 Gbit/s"


def test_a_slow_machine_is_told_once_and_not_with_each_of_its_paths() -> None:
    """Most paths of three machines are slow if one machine is, and the median with them."""
    names = "abc"
    paths = tuple(
        path(one, other, RATE / 100 if "c" in (one, other) else RATE)
        for one in (*names, "head")
        for other in names
        if one != other
    )
    rows = told(*map(machine, names), paths=paths)

    assert [(row[0], row[2], row[3]) for row in rows.of("network")] == [
        ("c", "0.08 Gbit/s at best", "warning")
    ]
    assert {row[3] for row in rows.of("path")} == {"ok"}


def test_paths_between_failure_domains_are_compared_with_one_another() -> None:
    """They are slower than those within a domain, as it has to be."""
    domains = {"a": "x", "b": "x", "c": "y", "d": "y"}
    machines = [
        msgspec.structs.replace(machine(name), domain=domain) for name, domain in domains.items()
    ]
    paths = tuple(
        path(one, other, RATE if domains[one] == domains[other] else RATE / 10)
        for one in domains
        for other in domains
        if one != other
    )

    assert {row[3] for row in told(*machines, paths=paths).of("path")} == {"ok"}


def test_a_path_from_the_head_is_needed_by_nobody() -> None:
    broken = path("head", "a", problem="no route")

    assert told(machine("a"), machine("b"), paths=(broken,)).of("path")[0][3] == "warning"


@pytest.mark.parametrize(
    ("num_fatal", "verdict"), [(0, "warning"), (12, "warning"), (13, "problem")]
)
def test_broken_paths_that_are_left_out_are_a_problem_only_if_one_of_them_is(
    num_fatal: int, verdict: str
) -> None:
    """Those that nothing needs are told last."""
    names = [f"m{index}" for index in range(13)]
    paths = [path("head", name, problem="no route") for name in names]
    paths += [path("m0", name, problem="no route") for name in names[1:]][:num_fatal]
    paths += [path("m1", "m0", problem="no route")] * (num_fatal - 12)
    rows = told(*map(machine, names), paths=tuple(paths))

    shown = [row[3] for row in rows.of("path")]
    assert shown == ["problem"] * min(num_fatal, 12) + ["warning"] * max(0, 12 - num_fatal)
    (left,) = (row for row in rows.of("paths") if "more are broken" in row[2])
    assert left[2:4] == (f"{len(paths) - 12} more are broken", verdict)


def test_many_paths_are_one_row() -> None:
    names = "abcdefgh"
    paths = tuple(path(one, other) for one in names for other in names if one != other)
    rows = told(*map(machine, names), paths=paths, note="not measured", left=3)

    assert not rows.of("path")
    assert [row[2] for row in rows.of("paths")] == [
        "56: 100-100 us, 8.00-8.00 Gbit/s",
        "3 paths not measured, for want of time",
    ]
    assert rows.of("bandwidth")[0][2] == "not measured"


def test_machines_that_are_missing_are_told() -> None:
    rows = told(machine("a", error_s=-1.0))

    assert rows.of("answer")[0][3] == "problem"
    assert "planaria agent --join" in rows.of("connected")[0][4]
