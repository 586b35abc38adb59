"""The search for what pays most."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from planaria.coordinator import step
from planaria.errors import ConfigError
from planaria.job.scenario_file import scenario_from_tables
from planaria.job.what_if import Grounds, answer, choice_space
from planaria.simulator.economics import advice as advice_module
from planaria.simulator.economics import planaria_run
from planaria.simulator.economics.advice import Choice, SparesPay, Trials
from planaria.simulator.economics.compare import ClusterScenario, JobOutcome, compare, play
from planaria.simulator.economics.planaria_system import PlanariaSystem
from planaria.simulator.economics.question import Question, Recommendation
from planaria.systems.equal_pipelines import fastest_equal_pipelines
from planaria.systems.restart import Restart, StaticRestart
from planaria.systems.system import Setting


def question(losses_per_hour: float, **options: object) -> Question:
    """A question on GPT-2 and 6 nodes."""
    given: dict[str, object] = {
        "model": "gpt2",
        "nodes": 6,
        "devices_per_node": 1,
        "failures": {"kind": "poisson", "per_node_hour": losses_per_hour / 6, "repair_s": 3600.0},
        "price": 2.0,
        "hours": 6.0,
        "batch": 0,
        "policies": ("reinstantiate",),
    }
    return Question(**(given | options))  # type: ignore[arg-type]


def answer_to(asked: Question) -> Recommendation:
    """The answer, by three seeds in this process."""
    return answer(Grounds(asked), num_seeds=3, num_processes=1, watch=lambda *_: None)


def small(**job: object) -> ClusterScenario:
    """GPT-2 on 6 nodes that fail often."""
    tables = {
        "cluster": {"nodes": 6, "profile": "gpt2"},
        "job": {"resilience": {"policy": "rollback"}, **job},
        "failures": {"per_node_hour": 0.05, "repair_s": 7200.0},
    }
    return scenario_from_tables(tables, name="small", directory=Path())


def test_spares_never_pay_where_nothing_fails() -> None:
    """A node that waits trains nothing, and no rate is said at which it would pay."""
    advice = answer_to(question(0.0)).advice

    assert advice.leader.num_spares == 0
    assert advice.spares_pay is None
    gains = [advice.gains[c] for c in advice.gains if c.num_spares and c.system == "planaria"]
    assert gains
    assert all(gain is not None and gain.low is not None and gain.low > 0.1 for gain in gains)


@pytest.mark.parametrize(
    ("given", "hours"),
    [
        ({}, {1: 80.0, 4: 20.0, 32: 10.0}),
        ({"hours": 6.0}, {1: 6.0, 2: 6.0, 32: 6.0}),
        ({"failures": {"preset": "opt"}, "nodes": 512}, {1: 1332.0, 2: 1332.0, 32: 1332.0}),
        (
            {"failures": {"kind": "poisson", "per_node_hour": 1 / 48, "repair": "never"}},
            {1: 80.0, 2: 40.0, 32: 2.5},
        ),
    ],
)
def test_runs_at_a_higher_rate_last_until_as_many_nodes_are_away_as_usual(
    given: dict[str, Any], hours: dict[int, float]
) -> None:
    """They were as much shorter as the rate was higher: at 32 times less than two repairs."""
    asked = question(1 / 8, **{"hours": 0.0, **given})

    assert {multiple: asked.hours_at(multiple) for multiple in hours} == pytest.approx(hours)


def test_keys_of_the_scenario_can_be_set() -> None:
    """Costs, by hand or from a run; spares leave the batch as it is."""
    grounds = Grounds(question(0.5, overrides=("costs.restart_s=7.5",)))
    settings = [
        grounds.setting(Choice(system="planaria", policy="morph", num_spares=spares))
        for spares in (0, 2)
    ]

    assert [setting.costs.restart_s for setting in settings] == [7.5, 7.5]
    assert [setting.job.training.global_batch_size for setting in settings] == [768, 768]
    assert [setting.num_nodes for setting in settings] == [6, 4]
    assert [setting.num_machines for setting in settings] == [6, 6]


@pytest.mark.parametrize(
    ("override", "option"),
    [
        ("failures.per_node_hour=0.5", "--failure-rate"),
        ("failures.preset=llama3", "--failure-rate"),
        ("failures.repair_s=60", "--repair"),
        ("failures.notice_s=60", "--notice"),
        ("run.hours=2", "--hours"),
        ("cluster.devices_per_node=2", "--devices-per-node"),
        ("cluster.profile=llama2-7b", "--model"),
        ("cluster.price_per_node_hour=5", "--price"),
        ("job.training.global_batch_size=64", "--batch"),
        ("failures={per_node_hour=0.5}", "--failure-rate"),
    ],
)
def test_keys_that_options_say_are_not_set_beside_them(override: str, option: str) -> None:
    """Runs at a higher rate, the hours of a run and the words of the answer are by the options."""
    with pytest.raises(ConfigError, match=f"what is chosen; use {option}"):
        Grounds(question(0.5, overrides=(override,)))


def test_a_larger_cluster_takes_longer_to_recover() -> None:
    """As 5,000 simulated nodes do: each rank is one more to hear, to tell and to link."""

    def setting(nodes: int, **costs: float) -> Setting:
        tables = {"cluster": {"nodes": nodes, "profile": "gpt2"}, "costs": costs}
        return scenario_from_tables(tables, name="large", directory=Path()).setting

    few, many = setting(4).costs, setting(64).costs

    for cost in ("answer_s", "decide_s", "regroup_s"):
        assert getattr(many, cost) - getattr(few, cost) == pytest.approx(60 * 1e-4)
    assert many.per_rank_s == 0.0
    assert setting(64, per_rank_s=0.0).costs.regroup_s == 0.05


def test_choices_that_are_alike_leave_the_plainest() -> None:
    """Without failures neither saves nor copies nor f matter."""
    leader = answer_to(question(0.0)).advice.leader

    assert leader == Choice(system="planaria", policy="reinstantiate", failures_tolerated=1)


def test_no_seed_that_chose_the_advice_measures_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would look better than it is. Here seeds 3 to 6 choose one policy, and the first that
    measure, 0 to 2, are for another; so others measure that one."""

    def play_group(_: object, trials: Sequence[Any]) -> list[tuple[JobOutcome, ...]]:
        return [tuple(played(trial.choice, seed) for seed in trial.seeds) for trial in trials]

    def played(choice: Choice, seed: int) -> JobOutcome:
        is_favoured = choice.policy == ("reinstantiate" if seed in range(3, 7) else "morph")
        return replace(an_outcome, seed=seed, samples=2000 if is_favoured else 1000)

    an_outcome = play(small(), Restart(), 0)
    monkeypatch.setattr(advice_module, "_play_group", play_group)
    asked = answer_to(question(0.5, policies=("reinstantiate", "morph"))).advice

    assert asked.leader.policy == "morph"
    for outcomes in asked.outcomes.values():
        assert [outcome.seed for outcome in outcomes] == [7, 8, 9]


def test_what_split_backwards_give_is_measured_and_never_advised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of policies that may split them, also where whole ones are better; no key has them whole."""

    def play_group(_: object, trials: Sequence[Any]) -> list[tuple[JobOutcome, ...]]:
        return [tuple(played(trial.choice, seed) for seed in trial.seeds) for trial in trials]

    def played(choice: Choice, seed: int) -> JobOutcome:
        samples = 2000 if choice.whole_backwards else 1500 if choice.policy == leading else 1000
        return replace(an_outcome, seed=seed, samples=samples)

    an_outcome = play(small(), Restart(), 0)
    monkeypatch.setattr(advice_module, "_play_group", play_group)
    for leading in ("reinstantiate", "repartition"):
        policies = ("reinstantiate", "repartition")
        advice = answer_to(question(0.5, policies=policies)).advice

        whole = [choice for choice in advice.gains if choice.whole_backwards]
        assert advice.leader.policy == leading
        assert not advice.leader.whole_backwards
        expected = [replace(advice.leader, whole_backwards=True)]
        assert whole == (expected if leading == "repartition" else [])


def test_a_policy_with_whole_backwards_finds_no_faster_plan_for_the_same_nodes() -> None:
    """On equal nodes to which nothing happens; with split ones it finds one."""
    asked = question(0.0, model="gpt3-2.7b", nodes=4, policies=("repartition",), hours=1.0)
    grounds = Grounds(asked)
    choice = Choice(system="planaria", policy="repartition", failures_tolerated=1)
    rates = []
    for whole in (False, True):
        setting = grounds.setting(replace(choice, whole_backwards=whole))
        of = replace(grounds.scenario(1), setting=setting)
        rates.append(play(of, PlanariaSystem(), 0).samples)

    assert rates[0] > 1.05 * rates[1]


def spares_pay_by(
    samples_of: Callable[[Choice, int], int], patch: pytest.MonkeyPatch
) -> SparesPay | None:
    """What the answer says of spares.

    Args:
        samples_of: function from a choice and a seed to the samples at a higher failure rate; at
            the asked one all train 1,000.
    """
    an_outcome = play(small(), Restart(), 0)

    def play_group(
        scenario: ClusterScenario, trials: Sequence[Any]
    ) -> list[tuple[JobOutcome, ...]]:
        is_higher_rate = scenario.horizon_s < 60 * 3600.0

        def played(choice: Choice, seed: int) -> JobOutcome:
            samples = samples_of(choice, seed) if is_higher_rate else 1000
            return replace(an_outcome, seed=seed, samples=samples)

        return [tuple(played(trial.choice, seed) for seed in trial.seeds) for trial in trials]

    patch.setattr(advice_module, "_play_group", play_group)
    return answer_to(question(0.5, hours=60.0)).advice.spares_pay


@pytest.mark.parametrize(("lucky_seeds", "multiple"), [(range(3, 7), 0), (range(7), 2)])
def test_spares_pay_only_where_other_seeds_show_it_than_those_that_chose_their_number(
    lucky_seeds: range, multiple: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best of several numbers looks good to the seeds that choose it, 3 to 6."""

    def samples_of(choice: Choice, seed: int) -> int:
        return 2000 if choice.num_spares == 2 and seed in lucky_seeds else 1000

    pay = spares_pay_by(samples_of, monkeypatch)

    assert pay is not None
    assert pay.multiple == multiple


def test_spares_with_which_nothing_is_trained_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them nothing is trained with one seed, and with them with two."""

    def samples_of(choice: Choice, seed: int) -> int:
        return 0 if seed < (2 if choice.num_spares else 1) else 1000

    pay = spares_pay_by(samples_of, monkeypatch)

    assert pay is not None
    assert pay.multiple == 0


def test_a_policy_that_searches_long_is_left_out_on_many_nodes_unless_it_is_named() -> None:
    """And the answer says so."""
    many = question(0.0, nodes=70, policies=())
    space, left_out = choice_space(many)
    named, _ = choice_space(replace(many, policies=("reinstantiate", "reroute")))

    assert set(left_out) == {"adaptive", "reroute", "repartition"}
    assert not space.slow_policies
    assert named.slow_policies == ("reroute",)


def test_restarts_save_about_as_often_as_youngs_formula_says() -> None:
    """The best time between saves is sqrt(2 * save * time between failures)."""
    between_s = 4 * 3600.0
    saves_min = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    scenario = scenario_from_tables(
        {
            "cluster": {"nodes": 16, "profile": "llama2-7b"},
            "failures": {"per_node_hour": 3600.0 / between_s / 16, "repair_s": 1.0},
            "run": {"hours": 200.0},
        },
        name="young",
        directory=Path(),
    )

    def setting_of(choice: Choice) -> Setting:
        every = max(1, round(60.0 * choice.save_min / scenario.setting.failure_free_s))
        job = scenario.setting.job
        checkpoint = replace(job.checkpoint, persist_every=every)
        return replace(scenario.setting, job=replace(job, checkpoint=checkpoint))

    trials = Trials(scenario, setting_of, num_processes=1, watch=lambda *_: None)
    choices = [Choice(system="restart", save_min=minutes) for minutes in saves_min]
    trials.play("test", choices, range(4))
    grid = fastest_equal_pipelines(scenario.setting, 16)
    assert grid is not None
    rank_bytes = scenario.setting.node_bytes([grid.template])
    save_s = rank_bytes / scenario.setting.costs.save_bytes_per_s
    # A node that is back restarts the job as well.
    young_min = sqrt(2.0 * save_s * between_s / 2.0) / 60.0

    best = trials.ranking(choices, range(4))[0]
    assert young_min / 2.0 < best.save_min < 2.0 * young_min


def test_runs_that_share_the_answers_of_a_policy_do_as_runs_of_their_own() -> None:
    """A search that was made for another seed is not made again."""
    scenario = small()

    def setting_of(_: Choice) -> Setting:
        return scenario.setting

    choice = Choice(system="planaria", policy="rollback", failures_tolerated=1)
    trials = Trials(scenario, setting_of, num_processes=1, watch=lambda *_: None)
    trials.play("test", [choice], range(3))
    own = [play(scenario, PlanariaSystem(), seed) for seed in range(3)]

    shared = trials.outcomes(choice, range(3))
    assert [run.samples for run in shared] == [run.samples for run in own]


def test_standby_nodes_are_there_from_the_start_and_take_the_places_of_lost_ones() -> None:
    """They cost as much as the others, and the plan stays that of the nodes at work."""
    job = {"cluster": {"standby": 2}, "training": {"global_batch_size": 768}}
    with_standby = small(**job)
    without = small(training={"global_batch_size": 768})
    runs = [play(scenario, PlanariaSystem(), 0) for scenario in (with_standby, without)]

    assert runs[0].num_failures > 0
    assert runs[0].node_hours > 6 * 24.0 > runs[1].node_hours
    assert runs[0].samples > 1.02 * runs[1].samples
    free = 768 / with_standby.setting.failure_free_s
    assert runs[0].samples_per_s == pytest.approx(free, rel=0.02)


def test_iterations_are_jumped_over_while_standby_nodes_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is decided then: a year of a few failures took minutes."""
    num_steps = 0

    def step_together(*arguments: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        return step.step_together(*arguments)

    monkeypatch.setattr(planaria_run, "step_together", step_together)
    run = PlanariaSystem().begin(small(cluster={"standby": 2}).setting)
    run.run_until(3600.0)
    num_steps = 0
    run.run_until(361_000.0)

    assert num_steps < 1000  # There are 200 saves.


def test_other_systems_are_not_compared_where_there_are_standby_nodes() -> None:
    """They have none."""
    scenario = small(cluster={"standby": 1})

    with pytest.raises(ConfigError, match="standby"):
        compare(scenario, (Restart(),), num_seeds=1, num_processes=1, on_done=lambda: None)


def test_a_static_job_waits_without_spares_and_goes_on_with_one() -> None:
    """It never trains on another number of nodes."""
    setting = small().setting
    samples = {}
    for num_spares in (0, 1):
        run = StaticRestart(num_spares).begin(setting)
        run.lose((2,), 3600.0)
        run.run_until(7200.0)
        lost = run.account.num_iterations
        run.take_back((2,), 7200.0)
        run.run_until(10_800.0)
        samples[num_spares] = (lost, run.account.num_iterations, run.account.num_restarts)

    assert samples[0][0] < 0.6 * samples[1][0]
    assert samples[0][1] > 1.5 * samples[0][0]
    assert samples[0][2] == samples[1][2] == 1


def test_the_loss_of_a_spare_node_interrupts_nothing() -> None:
    """No process runs there."""
    setting = small().setting
    run = StaticRestart(1).begin(setting)
    run.lose((5,), 3600.0)
    run.take_back((5,), 4000.0)

    assert run.account.num_failures == 1
    assert run.account.num_restarts == 0


def test_a_choice_that_is_barely_better_does_not_beat_a_plainer_one() -> None:
    """Less than a thousandth is none of anybody's business."""
    scenario = small()
    trials = Trials(scenario, lambda _: scenario.setting, num_processes=1, watch=lambda *_: None)
    plain, other = (Choice(system="restart", save_min=minutes) for minutes in (30, 5))
    trials.play("test", [plain, other], (0,))
    (outcome,) = trials.outcomes(plain, (0,))

    best = {}
    for factor in (1.0005, 1.002):
        better = replace(outcome, samples=round(factor * outcome.samples))
        trials._outcomes[other] = {0: better}
        best[factor] = trials.best([other, plain], (0,))
    assert best == {1.0005: plain, 1.002: other}
