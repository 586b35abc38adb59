"""The rows of `planaria doctor HOST:PORT`: what the machines are like, and what to change.

What is the same at several machines is one row. What needs a change comes first.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

from planaria.core.checkups import HEAD, CheckResult, ClusterCheckup, MachineCheckup, PathCheck
from planaria.show.words import count_text, printable, seconds_range_text, seconds_text

CLOCK_OFFSET_S_MAX: Final = 1.0
SLOW_SHARE: Final = 0.5  # What is slower than this share of the median is told.
_SLOWER: Final = "slower than half of the median"
_ROWS_MAX: Final = 12  # Paths that are told one by one, of a sort.
_LOOPBACK: Final = ("127.", "::1", "localhost")

_Key = TypeVar("_Key", str, PathCheck)


class Row(NamedTuple):
    """A result, and where it was found."""

    where: str
    check: CheckResult


def checkup_rows(checkup: ClusterCheckup) -> list[Row]:
    """The rows of the table, those that need a change first."""
    machines = checkup.machines
    rows = [
        *_answer_rows(checkup),
        *_address_rows(machines),
        *_version_rows(checkup),
        *_clock_rows(machines),
        *_machine_rows(machines),
        *_path_rows(checkup),
    ]
    order = ("problem", "warning", "ok")
    return sorted(rows, key=lambda row: order.index(row.check.verdict))


def _answer_rows(checkup: ClusterCheckup) -> Iterator[Row]:
    """The machines that are missing."""
    names = [machine.name for machine in checkup.machines if machine.clock_error_s < 0.0]
    if names:
        remedy = "see whether it is overloaded or hangs, and start its agent again"
        check = CheckResult(subject="answer", value="none", remedy=remedy, is_fatal=True)
        yield Row(_names_text(names), check)
    if len(checkup.machines) < 2:
        remedy = "start planaria agent --join on the others, and ask again"
        value = count_text(len(checkup.machines), "machine")
        yield Row(HEAD, CheckResult(subject="connected", value=value, remedy=remedy))


def _address_rows(machines: Sequence[MachineCheckup]) -> Iterator[Row]:
    """The machines whose address means another machine elsewhere."""
    is_spread = not all(machine.host.startswith(_LOOPBACK) for machine in machines)
    for machine in machines:
        if is_spread and machine.host.startswith(_LOOPBACK):
            remedy = "start its agent with --advertise HOST, an address that others reach it by"
            value = f"{machine.host}, which others cannot reach"
            check = CheckResult(subject="address", value=value, remedy=remedy, is_fatal=True)
            yield Row(machine.name, check)


def _version_rows(checkup: ClusterCheckup) -> Iterator[Row]:
    """What differs between machines."""
    machines = checkup.machines
    remedy = "install one version on all machines, or bits and formats may differ"
    for package in sorted({name for machine in machines for name in machine.versions}):
        by_name = {machine.name: machine.versions.get(package, "") for machine in machines}
        if package == "planaria":
            by_name[HEAD] = checkup.head_versions.get(package, "")
        yield from _difference(f"versions of {package}", by_name, remedy)
    remedy = "processors of different models may round in other ways; take machines of one model"
    by_name = {machine.name: machine.processor for machine in machines}
    yield from _difference("processor models", by_name, remedy)


def _difference(subject: str, by_name: dict[str, str], remedy: str) -> Iterator[Row]:
    values = dict.fromkeys(by_name.values())
    if len(values) < 2:
        return
    texts = [
        f"{value or 'none'} on {_names_text([n for n, v in by_name.items() if v == value])}"
        for value in values
    ]
    yield Row("machines", CheckResult(subject=subject, value="; ".join(texts), remedy=remedy))


def _clock_rows(machines: Sequence[MachineCheckup]) -> Iterator[Row]:
    """The clocks that are wrong, and how far the others are from the head's at most."""
    known = [machine for machine in machines if machine.clock_error_s >= 0.0]
    right = []
    for machine in known:
        least_s = abs(machine.clock_offset_s) - machine.clock_error_s
        if least_s <= CLOCK_OFFSET_S_MAX:
            right.append(machine)
            continue
        side = "ahead of" if machine.clock_offset_s > 0.0 else "behind"
        value = f"{seconds_text(abs(machine.clock_offset_s))} {side} the head's"
        remedy = "set it, and run a time service: certificates and times in logs depend on it"
        yield Row(machine.name, CheckResult(subject="clock offset", value=value, remedy=remedy))
    if right:
        most_s = max(abs(machine.clock_offset_s) + machine.clock_error_s for machine in right)
        value = f"within {seconds_text(most_s)} of the head's"
        names = _names_text([machine.name for machine in right])
        yield Row(names, CheckResult(subject="clock offset", value=value))


def _machine_rows(machines: Sequence[MachineCheckup]) -> Iterator[Row]:
    """The checks of the machines; equal ones are one row."""
    names: dict[CheckResult, list[str]] = {}
    for machine in machines:
        for check in machine.checks:
            names.setdefault(check, []).append(machine.name)
    subjects = list(dict.fromkeys(check.subject for check in names))
    for check in sorted(names, key=lambda check: subjects.index(check.subject)):
        yield Row(_names_text(names[check]), check)


def _path_rows(checkup: ClusterCheckup) -> Iterator[Row]:
    """The paths between machines: broken ones, slow ones, and the others."""
    # Nothing needs those from the head.
    broken = sorted(
        (path for path in checkup.paths if path.problem), key=lambda path: path.source == HEAD
    )
    for path in broken[:_ROWS_MAX]:
        remedy = (
            "open all TCP ports between the machines, or have the target name another address with "
            "--advertise"
        )
        is_fatal = path.source != HEAD
        if not is_fatal:
            remedy = "nothing needs it while no agent runs on the head; else open all TCP ports"
        check = CheckResult(subject="path", value=path.problem, remedy=remedy, is_fatal=is_fatal)
        yield Row(_path_text(path), check)
    if len(broken) > _ROWS_MAX:
        value = f"{len(broken) - _ROWS_MAX} more are broken"
        remedy = "--json lists them"
        is_fatal = any(path.source != HEAD for path in broken[_ROWS_MAX:])
        check = CheckResult(subject="paths", value=value, remedy=remedy, is_fatal=is_fatal)
        yield Row("machines", check)
    well = [path for path in checkup.paths if not path.problem]
    best = _best_rates(well)
    slow_machines = _slow(best)
    for name in slow_machines:
        remedy = (
            f"{_SLOWER} machine: look at its cable and its switch, or give its agent --interface"
        )
        value = f"{best[name] * 8e-9:.2f} Gbit/s at best"
        yield Row(printable(name), CheckResult(subject="network", value=value, remedy=remedy))
    slow = _slow_paths(well, checkup.machines, slow_machines)
    for path in slow[:_ROWS_MAX]:
        remedy = f"{_SLOWER} path: look at what lies between the two"
        check = CheckResult(subject="path", value=_speed_text(path), remedy=remedy)
        yield Row(_path_text(path), check)
    if len(well) <= _ROWS_MAX:
        for path in well:
            if path not in slow:
                yield Row(_path_text(path), CheckResult(subject="path", value=_speed_text(path)))
    else:
        yield Row("machines", CheckResult(subject="paths", value=_range_text(well)))
    if checkup.note and checkup.paths:
        yield Row("machines", CheckResult(subject="bandwidth", value=checkup.note))
    if checkup.num_paths_left:
        value = f"{count_text(checkup.num_paths_left, 'path')} not measured, for want of time"
        yield Row("machines", CheckResult(subject="paths", value=value))


def _best_rates(paths: Iterable[PathCheck]) -> dict[str, float]:
    """The bandwidth of the fastest path of each machine to or from another one.

    Those of the head do not count: it may be on the same machine.
    """
    best: dict[str, float] = {}
    for path in paths:
        if path.bandwidth_bytes_per_s and HEAD not in (path.source, path.target):
            for name in (path.source, path.target):
                best[name] = max(best.get(name, 0.0), path.bandwidth_bytes_per_s)
    return best


def _slow_paths(
    paths: Iterable[PathCheck], machines: Sequence[MachineCheckup], slow_machines: Sequence[str]
) -> list[PathCheck]:
    """The paths that are slow though no machine at an end is.

    Paths within a failure domain are compared with one another, and so are those between domains.
    """
    domains = {machine.name: machine.domain for machine in machines}
    slow: list[PathCheck] = []
    for is_near in (True, False):
        rates = {
            path: path.bandwidth_bytes_per_s
            for path in paths
            if path.bandwidth_bytes_per_s
            and not {path.source, path.target} & {*slow_machines, HEAD}
            and (domains[path.source] == domains[path.target]) == is_near
        }
        slow += _slow(rates)
    return slow


def _slow(rates: Mapping[_Key, float]) -> list[_Key]:
    """The keys whose rate is far below the median."""
    if not rates:
        return []
    median = statistics.median(rates.values())
    return [key for key, rate in rates.items() if rate < SLOW_SHARE * median]


def _path_text(path: PathCheck) -> str:
    return f"{printable(path.source)} to {printable(path.target)}"


def _speed_text(path: PathCheck) -> str:
    text = seconds_text(path.latency_s)
    if path.bandwidth_bytes_per_s:
        text += f", {path.bandwidth_bytes_per_s * 8e-9:.2f} Gbit/s"
    return text


def _range_text(paths: Sequence[PathCheck]) -> str:
    latencies_s = [path.latency_s for path in paths]
    text = f"{len(paths)}: {seconds_range_text(min(latencies_s), max(latencies_s))}"
    rates = [path.bandwidth_bytes_per_s * 8e-9 for path in paths if path.bandwidth_bytes_per_s]
    return f"{text}, {min(rates):.2f}-{max(rates):.2f} Gbit/s" if rates else text


def _names_text(names: Sequence[str]) -> str:
    shown = ", ".join(printable(name) for name in names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
