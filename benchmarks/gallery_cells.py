"""The cells of the gallery, and the file that keeps those that are finished.

A cell is one system in one case with a range of seeds, or a published table or figure. A case is a
job on a cluster, and how its nodes fail. A finished cell is a line of JSON with the commit and a
digest of the code that it ran: of all modules that it imports, and of the profile. A cell whose
digest is another today is stale and runs again; the file then has the new line only.
"""

import ast
import hashlib
import json
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import planaria
from planaria.cli.simulate.simulate_command import SYSTEMS
from planaria.core.job import PolicyName
from planaria.job.scenario_file import scenario_from_tables
from planaria.papers.experiments import EXPERIMENTS
from planaria.papers.rows import Claim, How, PublishedRow
from planaria.profiles.shipped import profile_path
from planaria.simulator.economics.compare import ClusterScenario, play
from planaria.simulator.failures.planned_losses import EC2_NOTICE_S, GCP_NOTICE_S
from planaria.simulator.failures.presets import PRESETS
from planaria.systems.system import Setting, System

VERSION: Final = 1  # Version of the lines and of what the cells are.
SEED_BLOCKS: Final = (0, 2, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
DEFAULT_POLICY: Final[PolicyName] = "adaptive"
PLANARIA: Final = "planaria"
PLANARIAS: Final = (PLANARIA, f"{PLANARIA}, reinstantiate")


@dataclass(frozen=True, slots=True)
class Entrant:
    """A system as it takes part.

    Attributes:
        policy: policy of the job; it matters to planaria alone.
    """

    name: str
    system: System
    policy: PolicyName = DEFAULT_POLICY


def _entrants() -> Iterator[Entrant]:
    planaria_system, *others = SYSTEMS
    yield Entrant(PLANARIAS[0], planaria_system)
    yield Entrant(PLANARIAS[1], planaria_system, "reinstantiate")
    for system in others:
        yield Entrant(system.name, system)


ENTRANTS: Final[Mapping[str, Entrant]] = {entrant.name: entrant for entrant in _entrants()}


@dataclass(frozen=True, slots=True)
class Case:
    """A job on a cluster, and what happens to its nodes.

    Attributes:
        profile: name of a shipped profile; each node has one device.
        failures: name of a recorded trace, or "preset NAME" for a published rate.
        hours: simulated hours.
        notice_s: seconds before a loss at which its nodes are told; 0: they are not.
    """

    profile: str
    nodes: int
    failures: str
    hours: float
    notice_s: float = 0.0

    def __str__(self) -> str:
        notice = f", told {self.notice_s:g} s before" if self.notice_s else ""
        return f"{self.failures}{notice}, {self.profile} on {self.nodes} nodes, {self.hours:g} h"

    @property
    def table(self) -> dict[str, Any]:
        """The case as lines of the file have it: the first ones knew of no notices."""
        return {key: value for key, value in asdict(self).items() if key != "notice_s" or value}

    def scenario(self, policy: PolicyName) -> ClusterScenario:
        """The scenario with a policy; all policies see the same failures."""
        preset = self.failures.removeprefix("preset ")
        failures = (
            {"kind": "preset", "preset": preset}
            if preset != self.failures
            else {"kind": "trace", "path": self.failures}
        )
        tables = {
            "cluster": {"nodes": self.nodes, "profile": self.profile},
            "job": {"resilience": {"policy": policy}},
            "failures": failures | {"notice_s": self.notice_s},
            "run": {"hours": self.hours},
        }
        return scenario_from_tables(tables, name=str(self))


# At 16 nodes, most of these have 6 to 14 losses: then 100 seeds of the adaptive policy fit into a
# few minutes of a processor. A spot machine is lost within hours, so 2 hours have as many losses as
# 30 days have elsewhere.
_HOURS: Final[Mapping[str, float]] = {
    "bamboo-p3": 2.0,
    "oobleck-ec2-p3": 2.0,
    "oobleck-ec2-g4dn": 2.0,
    "oobleck-5m": 1.2,
    "oobleck-10m": 2.4,
    "oobleck-30m": 7.2,
    "oobleck-1h": 15.0,
    "oobleck-3h": 45.0,
    "oobleck-6h": 90.0,
    "infinitehbd": 720.0,
    **{f"preset {name}": 720.0 for name in PRESETS},
    "preset spot-p3": 2.0,
    "preset odyssey": 9.0,
}
# Machines that are taken back at short notice. Traces hold no notices: with and without them.
_SPOT: Final = ("bamboo-p3", "oobleck-ec2-p3", "oobleck-ec2-g4dn", "preset spot-p3")
_LARGER: Final = (
    *(("gpt2", 32, name) for name in ("bamboo-p3", "oobleck-1h", "preset opt")),
    *(("llama2-7b", 64, name) for name in ("bamboo-p3", "infinitehbd", "preset opt")),
)


def _cases() -> Iterator[Case]:
    smaller = (("gpt3-6.7b", 16, name) for name in _HOURS)
    for profile, nodes, name in (*smaller, *_LARGER):
        case = Case(profile, nodes, name, _HOURS[name])
        yield case
        if name in _SPOT:
            yield replace(case, notice_s=EC2_NOTICE_S)
    yield Case("gpt3-6.7b", 16, _SPOT[0], _HOURS[_SPOT[0]], GCP_NOTICE_S)


CASES: Final = tuple(_cases())


@dataclass(frozen=True, slots=True)
class Cell:
    """Runs of one system in one case.

    Attributes:
        seeds: seeds of the runs, in a row.
    """

    case: Case
    entrant: str
    seeds: range

    @property
    def name(self) -> str:
        """The name in a line of progress."""
        return f"{self.entrant}, seeds {self.seeds.start} to {self.seeds.stop - 1}: {self.case}"

    @property
    def key(self) -> str:
        """What tells the cell from all others."""
        return json.dumps([self.case.table, self.entrant, self.seeds.start, self.seeds.stop])

    @property
    def digest(self) -> str:
        """The digest of the code that the cell runs, and of its profile."""
        system = type(ENTRANTS[self.entrant].system).__module__
        modules = (system, "planaria.simulator.economics.compare", "planaria.job.scenario_file")
        return _code_digest(modules, self.case.profile)

    def result(self) -> dict[str, Any]:
        """The samples per second and the number of losses for each seed."""
        entrant = ENTRANTS[self.entrant]
        scenario = _scenario(self.case, entrant.policy)
        setting = scenario.setting
        outcomes = [play(scenario, entrant.system, seed) for seed in self.seeds]
        return {
            "case": self.case.table,
            "system": self.entrant,
            "seeds": [self.seeds.start, self.seeds.stop],
            "first_samples_per_s": setting.job.training.global_batch_size / setting.failure_free_s,
            "samples_per_s": [outcome.samples_per_s for outcome in outcomes],
            "losses": [outcome.num_failures for outcome in outcomes],
        }


@cache
def _scenario(case: Case, policy: PolicyName) -> ClusterScenario:
    """The scenario; a process keeps it with what was found for it."""
    scenario = case.scenario(policy)
    known = _settings.setdefault((case.profile, case.nodes, policy), scenario.setting)
    return replace(scenario, setting=known)


# The settings of a process: cases that differ in their failures alone have the same job and the
# same plans, and what the searches of one have found the others need not search again.
_settings: dict[tuple[str, int, PolicyName], Setting] = {}


@dataclass(frozen=True, slots=True)
class ExperimentCell:
    """A published table or figure."""

    experiment: str

    @property
    def name(self) -> str:
        """The name in a line of progress."""
        return self.experiment

    @property
    def key(self) -> str:
        """What tells the cell from all others."""
        return json.dumps(self.experiment)

    @property
    def digest(self) -> str:
        """The digest of the code that computes the rows."""
        return _code_digest(("planaria.papers.experiments",), "")

    def result(self) -> dict[str, Any]:
        """All rows of the experiment."""
        rows = [asdict(row) for row in EXPERIMENTS[self.experiment].rows()]
        for row in rows:
            row["how"], row["claim"] = row["how"].name, row["claim"].name
        return {"experiment": self.experiment, "rows": rows}


AnyCell = Cell | ExperimentCell


def cells(num_seeds: int) -> Iterator[AnyCell]:
    """All cells: tables and figures, then a few seeds of every case and system, then more."""
    yield from map(ExperimentCell, EXPERIMENTS)
    bounds = [bound for bound in SEED_BLOCKS if bound < num_seeds] + [num_seeds]
    for first, end in pairwise(bounds):
        for case in CASES:
            for name in ENTRANTS:
                yield Cell(case, name, range(first, end))


def line_of(cell: AnyCell) -> dict[str, Any]:
    """Runs a cell; its line, with the seconds of a processor that it took.

    A process searches for the plans of a job once, in the first of its cells that needs them.
    """
    start_s = time.process_time()
    content = cell.result()
    took_s = time.process_time() - start_s
    origin = {"processor_s": round(took_s, 3), "commit": _commit(), "digest": cell.digest}
    return {"version": VERSION, "key": cell.key, **content, **origin}


@cache
def _commit() -> str:
    """The commit of the code; empty where there is no git."""
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=60
        )
    except OSError:
        return ""
    return done.stdout.strip()


@cache
def _code_digest(modules: tuple[str, ...], profile: str) -> str:
    """The digest of the source of modules and of all modules of planaria that they import."""
    root = Path(planaria.__file__).parent.parent
    reached: dict[str, bytes] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        path = root / (module.replace(".", "/") + ".py")
        if module not in reached and path.is_file():
            reached[module] = path.read_bytes()
            waiting += _imports(path)
    digest = hashlib.sha256(b"".join(reached[module] for module in sorted(reached)))
    if profile:
        digest.update(profile_path(Path(), profile).read_bytes())
    return digest.hexdigest()[:16]


@cache
def _imports(path: Path) -> tuple[str, ...]:
    """The names of modules that a file may import; not all of them are there."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    return tuple(names)


# -- the file --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Runs:
    """What is known of one system in one case.

    Attributes:
        first_samples_per_s: samples per second of the plan with which a job begins.
        samples_per_s: goodput by seed.
        losses: number of losses by seed.
    """

    first_samples_per_s: float
    samples_per_s: dict[int, float] = field(default_factory=dict)
    losses: dict[int, int] = field(default_factory=dict)


Line = Mapping[str, Any]


def read_lines(path: Path) -> dict[str, Line]:
    """The lines of a file of this version, by key; the last one of each key, at its place.

    A cell of a file that was cut in the middle of its last line counts as missing.
    """
    lines: dict[str, Line] = {}
    if path.exists():
        for text in path.read_text("utf-8").splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            if line.get("version") == VERSION:
                lines.pop(line["key"], None)  # The newest line of a cell comes last.
                lines[line["key"]] = line
    return lines


def append_line(path: Path, line: Line) -> None:
    """Adds a finished cell to the file."""
    with path.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(line) + "\n")


def write_lines(path: Path, lines: Iterable[Line]) -> None:
    """Writes the file anew."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def missing_cells(wanted: Iterable[AnyCell], known: Mapping[str, Line]) -> list[AnyCell]:
    """The cells that have not run with today's code."""
    return [
        cell for cell in wanted if cell.key not in known or known[cell.key]["digest"] != cell.digest
    ]


def runs_by_case(lines: Sequence[Line]) -> dict[Case, dict[str, Runs]]:
    """The runs of each case by system, in the order of the gallery.

    Only runs of one code count for a system in a case: that of its last line.
    """
    newest = {_runs_key(line): line["digest"] for line in lines if "case" in line}
    found: dict[Case, dict[str, Runs]] = {}
    for line in lines:
        if "case" in line and line["digest"] == newest[_runs_key(line)]:
            systems = found.setdefault(Case(**line["case"]), {})
            runs = systems.setdefault(line["system"], Runs(line["first_samples_per_s"]))
            seeds = range(*line["seeds"])
            runs.samples_per_s.update(zip(seeds, line["samples_per_s"], strict=True))
            runs.losses.update(zip(seeds, line["losses"], strict=True))
    known = [case for case in CASES if case in found]
    ordered = [*known, *(case for case in found if case not in known)]
    return {
        case: {name: found[case][name] for name in ENTRANTS if name in found[case]}
        for case in ordered
    }


def _runs_key(line: Line) -> tuple[str, str]:
    return json.dumps(line["case"]), line["system"]


def rows_by_experiment(lines: Iterable[Line]) -> dict[str, Sequence[PublishedRow]]:
    """The rows of each published table and figure."""
    found = {line["experiment"]: line["rows"] for line in lines if "experiment" in line}
    return {
        name: [
            PublishedRow(**{**row, "how": How[row["how"]], "claim": Claim[row["claim"]]})
            for row in found[name]
        ]
        for name in EXPERIMENTS
        if name in found
    }
