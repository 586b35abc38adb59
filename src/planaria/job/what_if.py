"""A question without a scenario file: what pays most for a model on nodes that fail so often.

The question is turned into the tables of a scenario (job/scenario_file.py), which `--set` may
override, and into the choices among which simulator/economics/advice.py searches. The cluster has
the same nodes for every choice: spares are taken from them, so they cost as much as nodes at work,
and every choice meets the same failures.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from planaria.core.job import POLICIES, PolicyName
from planaria.errors import ConfigError
from planaria.job.config import with_override
from planaria.job.planning import worded_for_job
from planaria.job.scenario_file import scenario_from_tables
from planaria.planner.plans import PlanCatalog
from planaria.planner.reroute.shadows import first_plan_with_shadows
from planaria.policies.traits import TRAITS
from planaria.simulator.economics.advice import Choice, Space, Trials, Watch, advice
from planaria.simulator.economics.compare import ClusterScenario
from planaria.simulator.economics.question import Question, Recommendation
from planaria.systems.system import Setting

_NAME: Final = "what-if"
_FAILURES_TOLERATED: Final = (0, 1, 2)
_NUM_SPARES: Final = (0, 1, 2, 4)
_SAVE_MIN: Final = (5, 10, 15, 30, 60, 120, 240)
_COPIES: Final = (0, 2)
# Keys that the search or an option sets, and what the user can do instead. Not those of shapes, as
# failures.kind = "bursts" is one: the options say means.
_CHOSEN: Final[Mapping[str, str]] = {
    "cluster.nodes": "use --nodes",
    "cluster.devices_per_node": "use --devices-per-node",
    "cluster.profile": "use --model",
    "cluster.price_per_node_hour": "use --price",
    "failures.per_node_hour": "use --failure-rate",
    "failures.preset": "use --failure-rate",
    "failures.repair_s": "use --repair",
    "failures.notice_s": "use --notice",
    "run.hours": "use --hours",
    "job.training.global_batch_size": "use --batch",
    "job.resilience.policy": "use --policies",
    **dict.fromkeys(
        (
            "job.resilience.failures_tolerated",
            "job.cluster.standby",
            "job.checkpoint.persist_every",
            "job.checkpoint.copies",
        ),
        "name a scenario to simulate one value",
    ),
}
# Largest cluster on which a policy is tried unless the user names it: its search for an answer
# takes seconds of a processor there, and longer on more nodes.
_NODES_MAX: Final[Mapping[PolicyName, int]] = {"adaptive": 64, "repartition": 64, "reroute": 64}


def answer(
    grounds: "Grounds", *, num_seeds: int, num_processes: int, watch: Watch
) -> Recommendation:
    """What pays most.

    Args:
        num_seeds: number of seeds that measure, 2 or more; four more choose.

    Raises:
        ConfigError: none of the policies can be played.
    """
    question, scenario = grounds.question, grounds.scenario(1)
    space, left_out = choice_space(question)

    def trials_at(multiple: int) -> Trials:
        scenario = grounds.scenario(multiple)
        return Trials(scenario, grounds.setting, num_processes=num_processes, watch=watch)

    result = advice(
        space,
        Trials(scenario, grounds.setting, num_processes=num_processes, watch=watch),
        num_seeds=num_seeds,
        trials_at=trials_at if question.losses_per_hour else None,
    )
    return Recommendation(
        question=question,
        scenario=scenario,
        advice=result,
        left_out=left_out,
        num_seeds=num_seeds,
        persist_every=grounds.setting(result.leader).job.checkpoint.persist_every,
    )


def choice_space(question: Question) -> tuple[Space, Mapping[PolicyName, str]]:
    """The values among which is chosen, and why a policy is left out."""
    left_out = {
        policy: f"it searches long on more than {most} nodes; --policies {policy} tries it"
        for policy, most in _NODES_MAX.items()
        if question.nodes > most and not question.policies
    }
    chosen = [policy for policy in question.policies or POLICIES if policy not in left_out]
    slow = tuple(policy for policy in chosen if TRAITS[policy].can_look_ahead)
    space = Space(
        policies=tuple(policy for policy in chosen if policy not in slow),
        slow_policies=slow,
        failures_tolerated=_FAILURES_TOLERATED,
        num_spares=tuple(number for number in _NUM_SPARES if number < question.nodes),
        save_min=_SAVE_MIN,
        copies=tuple(number for number in _COPIES if number <= question.nodes),
    )
    return space, left_out


class Grounds:
    """The scenarios of a question, and the settings of its choices; each is planned once.

    Raises:
        ConfigError: a value is wrong, or the model does not fit on these nodes.
    """

    def __init__(self, question: Question) -> None:
        self.question = question
        self._scenarios: dict[tuple[int, int], ClusterScenario | ConfigError] = {}
        self._with_shadows: dict[tuple[int, int], ConfigError | None] = {}
        self._whole_catalogs: dict[tuple[int, int], PlanCatalog] = {}
        for override in question.overrides:
            key = override.partition("=")[0].strip()
            for chosen, remedy in _CHOSEN.items():
                if f"{chosen}.".startswith(f"{key}."):  # It may be that of a whole table.
                    raise ConfigError("--set", override, f"{chosen} is what is chosen; {remedy}")
        self._scenario_of(0, 0)

    def scenario(self, multiple: int) -> ClusterScenario:
        """The scenario at a multiple of the failure rate, whose runs are shorter."""
        if multiple == 1:
            return self._scenario_of(0, 0)
        tables = self._tables(0, 0)
        failures = {"per_node_hour": multiple * self.question.per_node_hour}
        tables["failures"] = {**tables["failures"], **failures}
        tables["run"] = {**tables["run"], "hours": self.question.hours_at(multiple)}
        return scenario_from_tables(tables, name=_NAME, directory=Path())

    def setting(self, choice: Choice) -> Setting:
        """The setting of a choice.

        Raises:
            ConfigError: there is no plan, or memory is too small.
        """
        key = (choice.failures_tolerated, choice.num_spares)
        setting = self._scenario_of(*(key if choice.policy else (0, 0))).setting
        job, n0 = setting.job, min(setting.catalog.templates)
        if choice.system == "static" and setting.num_nodes - choice.num_spares < n0:
            remedy = f"pipelines of {n0} or more nodes are needed"
            raise ConfigError("--nodes", setting.num_nodes, remedy)
        if choice.policy:
            self._check_shadows(choice.policy, key, setting)
            job = replace(job, resilience=replace(job.resilience, policy=choice.policy))
        if choice.whole_backwards:
            setting = replace(setting, catalog=self._whole_catalog(key, setting.catalog))
        every = max(1, round(60.0 * choice.save_min / setting.failure_free_s))
        checkpoint = replace(job.checkpoint, persist_every=every, copies=choice.copies)
        return replace(setting, job=replace(job, checkpoint=checkpoint))

    def _whole_catalog(self, key: tuple[int, int], catalog: PlanCatalog) -> PlanCatalog:
        """The catalog of a job whose backwards are whole; one object, by which what was found for
        it is known again."""
        if key not in self._whole_catalogs:
            problem = replace(catalog.problem, splits_backward=False)
            self._whole_catalogs[key] = replace(catalog, problem=problem)
        return self._whole_catalogs[key]

    def _scenario_of(self, failures_tolerated: int, num_spares: int) -> ClusterScenario:
        key = (failures_tolerated, num_spares)
        if key not in self._scenarios:
            try:
                self._scenarios[key] = scenario_from_tables(
                    self._tables(*key), name=_NAME, directory=Path()
                )
            except ConfigError as error:
                self._scenarios[key] = error
        known = self._scenarios[key]
        if isinstance(known, ConfigError):
            raise known
        return known

    def _check_shadows(self, policy: PolicyName, key: tuple[int, int], setting: Setting) -> None:
        """Refuses a policy whose ranks hold more layers than memory has room for."""
        if not TRAITS[policy].has_shadows:
            return
        if key not in self._with_shadows:
            self._with_shadows[key] = None
            catalog = setting.catalog
            try:
                with worded_for_job(setting.job):
                    plan = catalog.plans[setting.num_nodes]
                    first_plan_with_shadows(catalog.problem, plan, templates=catalog.templates)
            except ConfigError as error:
                self._with_shadows[key] = error
        error_or_none = self._with_shadows[key]
        if error_or_none is not None:
            raise error_or_none

    def _tables(self, failures_tolerated: int, num_spares: int) -> dict[str, Any]:
        """The tables of the scenario with which f and spares are planned."""
        question = self.question
        tables: dict[str, Any] = {
            "cluster": {
                "nodes": question.nodes,
                "devices_per_node": question.devices_per_node,
                "profile": question.model,
                "price_per_node_hour": question.price,
            },
            "failures": dict(question.failures),
            "run": {"hours": question.run_hours},
        }
        if question.batch:
            tables["job"] = {"training": {"global_batch_size": question.batch}}
        for override in question.overrides:
            tables = with_override(tables, override)
        if num_spares and not question.batch:
            # The batch is that of all nodes, however many of them are spares.
            batch = self._scenario_of(0, 0).setting.job.training.global_batch_size
            tables = with_override(tables, f"job.training.global_batch_size={batch}")
        policy = "reinstantiate"  # The plans are the same for all policies.
        for override in (
            f"job.resilience.policy={policy}",
            f"job.resilience.failures_tolerated={failures_tolerated}",
            f"cluster.nodes={tables['cluster']['nodes'] - num_spares}",
            f"job.cluster.standby={num_spares}",
        ):
            tables = with_override(tables, override)
        return tables
