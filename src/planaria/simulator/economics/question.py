"""The question what pays most on a cluster whose nodes fail, and its answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

from planaria.core.job import PolicyName
from planaria.simulator.economics.advice import Advice
from planaria.simulator.economics.compare import ClusterScenario
from planaria.simulator.failures.presets import PRESETS

_FAILURES: Final = 10.0  # Expected failures of a run, unless the user says hours.
_S_PER_HOUR: Final = 3600.0
_HOURS_MIN: Final = 24.0
_HOURS_MAX: Final = 10_000.0
_REPAIRS: Final = 10.0  # Mean times of repair in a run: by then as many nodes are away as usual.


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a user asks.

    Attributes:
        model: a profile's file, or the name of a shipped one.
        nodes: number of nodes that the cluster has while none is lost, spares included.
        failures: table `[failures]`.
        price: dollars for each hour of each node; 0: unknown.
        hours: simulated hours of a run; 0: as many as have ten failures, a day and ten times the
            mean repair at least.
        batch: samples of an iteration; 0: 4 microbatches for each device.
        policies: policies to choose among; (): all that are fast enough.
        overrides: texts TABLE.KEY=VALUE for the scenario.
    """

    model: str
    nodes: int
    devices_per_node: int
    failures: Mapping[str, Any]
    price: float
    hours: float
    batch: int
    policies: tuple[PolicyName, ...] = ()
    overrides: tuple[str, ...] = ()

    @property
    def losses_per_hour(self) -> float:
        """Losses of nodes in an hour of the whole cluster, while none is lost."""
        return self.nodes * self.per_node_hour

    @property
    def per_node_hour(self) -> float:
        """Losses in an hour of a node."""
        rate = float(self.failures.get("per_node_hour", 0.0))
        if rate or "preset" not in self.failures:
            return rate
        preset = PRESETS[self.failures["preset"]]
        return preset.per_node_hour * (self.devices_per_node if preset.is_per_device else 1)

    @property
    def repair_hours(self) -> float:
        """Mean hours until a lost node is back; 0 if none ever is."""
        if self.failures.get("repair") == "never":
            return 0.0
        repair_s = float(self.failures.get("repair_s", 0.0))
        if not repair_s and "preset" in self.failures:
            repair_s = PRESETS[self.failures["preset"]].repair.mean_s
        return repair_s / _S_PER_HOUR if isfinite(repair_s) else 0.0

    @property
    def run_hours(self) -> float:
        """The simulated hours of a run."""
        if self.hours or not self.losses_per_hour:
            return self.hours or _HOURS_MIN
        hours = max(_HOURS_MIN, _FAILURES / self.losses_per_hour, _REPAIRS * self.repair_hours)
        return round(min(_HOURS_MAX, hours))

    def hours_at(self, multiple: int) -> float:
        """The simulated hours of a run at a multiple of the failure rate.

        They have as many failures, unless so many nodes are away only after longer.
        """
        hours = max(self.run_hours / multiple, _REPAIRS * self.repair_hours)
        return min(self.run_hours, hours)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The advice, and what it is for.

    Attributes:
        left_out: why a policy was not tried, by policy.
        persist_every: iterations from one save to the next, as advised.
    """

    question: Question
    scenario: ClusterScenario
    advice: Advice
    left_out: Mapping[PolicyName, str]
    num_seeds: int
    persist_every: int
