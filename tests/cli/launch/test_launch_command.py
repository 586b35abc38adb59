"""`planaria launch`: what it writes, what it refuses, and what the files do with exit codes."""

import itertools
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import pytest
import yaml

from helpers.command import assert_mistake, command, wait_for
from helpers.fake_scheduler import FakeScheduler
from planaria.nodes.machine import EXIT_AGAIN, EXIT_DONE, EXIT_UNFINISHED

ROOT: Final = Path(__file__).resolve().parents[3]
CLUSTERS: Final = ROOT / "examples" / "clusters"
HOSTS: Final = "examples/clusters/hosts.txt"
COMMON: Final = ("launch", "examples/cluster.toml", "--nodes", "2:4")
ARGUMENTS: Final = {
    "cluster.sbatch": ("--on", "slurm", "--time", "12:00:00"),
    "cluster.yaml": ("--on", "kubernetes", "--image", "registry.example.com/planaria:1"),
    "cluster_ray.py": ("--on", "ray"),
    "cluster-ssh.sh": ("--on", "ssh", "--hosts", HOSTS),
}
# The process of rank $rank: it ends with $HEAD or $OTHER first, then with 0. A head ends once the
# other one has been started so often.
FAKE_PLANARIA: Final = """\
echo "$*" >> "$FAKES/planaria.words"
rank=${SLURM_PROCID:-${JOB_COMPLETION_INDEX:-$(grep -oP -- '--node-rank \\K[0-9]+' <<< "$*")}}
echo start >> "$FAKES/starts.$rank"
[ "$(wc -l < "$FAKES/starts.$rank")" = 1 ] || exit 0
if [ "$rank" = 0 ]; then
    until [ "$(cat "$FAKES/starts.1" 2> /dev/null | wc -l)" -ge "${STARTS:-0}" ]; do :; done
    if [ "$HEAD" = told ]; then
        trap 'exit 130' TERM
        touch "$FAKES/ready"
        while :; do sleep 0.01; done
    fi
    exit "$HEAD"
fi
exit "$OTHER"
"""


@pytest.fixture(autouse=True)
def _at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture
def fakes(tmp_path: Path) -> FakeScheduler:
    made = FakeScheduler(tmp_path / "fakes")
    made.write("planaria", FAKE_PLANARIA)
    return made


# -- what is written ------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ARGUMENTS)
def test_the_examples_are_what_the_command_writes(file: str) -> None:
    """Whoever reads them reads what planaria does."""
    printed = command(*COMMON, *ARGUMENTS[file], "--dry-run").output

    assert printed == (CLUSTERS / file).read_text()


@pytest.mark.parametrize("on", ["slurm", "ssh"])
def test_a_shell_reads_what_every_option_adds(on: str) -> None:
    """A long command goes over several lines."""
    options = ("--devices-per-node", "8", "--token-file", "a token", "--port", "7000")
    own = ("--partition", "gpus") if on == "slurm" else ("--hosts", HOSTS)
    settings = ("--set", "training.iterations=7", "--domain", "$RACK")
    script = command(*COMMON, "--on", on, *options, *own, *settings, "--dry-run").output
    read = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)

    assert (read.returncode, read.stderr) == (0, "")
    assert '--domain "$RACK"' in script
    assert "--token-file 'a token'" in script
    assert "--nproc-per-node 8" in script
    assert all(len(line) <= 100 for line in script.splitlines())
    if on == "slurm":
        assert "#SBATCH --gpus-per-node=8\n" in script
        assert "#SBATCH --partition=gpus\n" in script


def test_the_job_of_kubernetes_is_indexed_and_finds_its_head_by_the_service() -> None:
    """The names of both must fit, and a failed pod must be made again by its exit code."""
    service, *rights, job = yaml.safe_load_all((CLUSTERS / "cluster.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    [container] = pod["containers"]

    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    selector = {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert service["spec"]["selector"] == selector
    assert service["spec"]["publishNotReadyAddresses"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (20, 2)
    assert pod["restartPolicy"] == "Never"  # Else there may be no podFailurePolicy.
    assert pod["terminationGracePeriodSeconds"] > 30
    assert pod["tolerations"]
    head = f"{job['metadata']['name']}-0.{pod['subdomain']}:29400"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert f"--rdzv-endpoint {head}" in container["args"][0]
    assert "--operator kubernetes" in container["args"][0]
    account, role, binding = rights
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account["metadata"]["name"]}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "delete"]}
    ]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


def test_options_of_kubernetes_are_in_the_manifest() -> None:
    options = ("--image", "planaria", "--namespace", "team", "--volume", "disk", "--name", "run-1")
    text = command(
        *COMMON, "--on", "kubernetes", *options, "--devices-per-node", "8", "--dry-run"
    ).output
    objects = list(yaml.safe_load_all(text))
    pod = objects[-1]["spec"]["template"]["spec"]

    assert {one["metadata"]["namespace"] for one in objects} == {"team"}
    assert {one["metadata"]["name"] for one in objects} == {"run-1"}
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "disk"
    assert pod["volumes"][1]["secret"]["secretName"] == "run-1-token"


# -- what is refused ------------------------------------------------------------------------------


def test_an_actor_of_ray_asks_for_no_more_than_its_bundle_has() -> None:
    """Ray gives an actor that asks for GPUs alone a CPU as well, which no bundle had."""
    options = ("--on", "ray", "--devices-per-node", "8", "--dry-run")
    text = command(*COMMON, *options).output

    assert '{"CPU": 1, "GPU": 8}' in text
    assert "num_cpus=1, num_gpus=8" in text


@pytest.mark.parametrize(
    ("on", "tool"),
    [("slurm", "sbatch"), ("kubernetes", "kubectl"), ("ray", "ray"), ("ssh", "ssh")],
)
def test_without_the_scheduler_nothing_is_written(
    on: str, tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way out is to print the file."""
    monkeypatch.setenv("PATH", str(tmp_path))
    own = next(words for words in ARGUMENTS.values() if words[1] == on)
    result = command(*COMMON, *own, "-o", str(tmp_path / "file"))

    assert_mistake(result, f"no {tool}", "--dry-run", str(tmp_path / "file"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--on", "slurm", "--image", "x"), ("--image", "slurm has no use for it")),
        (("--on", "kubernetes"), ("--image", "planaria is installed")),
        (("--on", "ssh"), ("--hosts", "HOST [DOMAIN]")),
        (("--on", "ssh", "--hosts", "none"), ("--hosts", "cannot be read")),
        (("--on", "slurm", "--partition", "a b"), ("--partition", "without spaces")),
        (("--on", "slurm", "--name", "A_b"), ("--name", "lower-case")),
        (("--on", "slurm", "--nodes", "4:2"), ("--nodes", "MIN <= MAX")),
        (("--on", "slurm", "--set", "training.iteration=3"), ("training.iteration",)),
    ],
)
def test_a_mistake_is_told_before_a_machine_is_asked_for(
    arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    """A job waits for hours in a queue, and should not end at once then."""
    assert_mistake(command(*COMMON, *arguments, "--dry-run"), *parts)


@pytest.mark.parametrize(
    ("text", "part"), [("a\n# b\n", "names 1 machines"), ("a\nb\na\n", "a machine twice")]
)
def test_a_file_of_too_few_machines_is_refused(text: str, part: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(text)

    assert_mistake(command(*COMMON, "--on", "ssh", "--hosts", str(hosts), "--dry-run"), part)


def test_a_file_that_somebody_has_changed_is_not_written_over(
    fakes: FakeScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are meant to be changed."""
    fakes.write("sbatch", 'echo "submitted $*"\n')
    monkeypatch.setenv("PATH", fakes.environment["PATH"])
    path = tmp_path / "mine.sbatch"
    path.write_text("mine")

    assert_mistake(command(*COMMON, "--on", "slurm", "-o", str(path)), "differs")
    assert path.read_text() == "mine"


def test_the_file_is_written_and_submitted(fakes: FakeScheduler, tmp_path: Path) -> None:
    """The exit code is that of the program that submits it."""
    fakes.write("sbatch", 'echo "submitted $*"; exit 5\n')
    path = tmp_path / "mine.sbatch"
    words = [sys.executable, "-m", "planaria", *COMMON, *ARGUMENTS["cluster.sbatch"]]
    ended = subprocess.run(
        [*words, "-o", str(path)],
        env=fakes.environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ended.returncode, ended.stderr) == (5, "")
    assert ended.stdout.splitlines()[-1] == f"submitted {path}"
    assert path.read_text() == (CLUSTERS / "cluster.sbatch").read_text()


# -- exit codes -----------------------------------------------------------------------------------


def exit_code_table() -> list[tuple[int, str, str]]:
    """The codes of docs/CLUSTER.md, with their meanings on the head's machine and on another."""
    page = (ROOT / "docs" / "CLUSTER.md").read_text()
    section = page.partition("\n## Exit codes\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([0-9]+)[^|]*\| ([^|]*) \| ([^|]*) \|$", section, re.MULTILINE)
    table = [(int(code), head, other) for code, head, other in rows]
    return [*table, (137, *table[-1][1:])]


TABLE: Final = exit_code_table()


def is_again(text: str) -> bool:
    """Whether a cell of the table says that the scheduler starts it again by itself."""
    return text.startswith("again")


def run_script(fakes: FakeScheduler, words: list[str], directory: Path, **variables: str) -> int:
    """The exit code of a script of two machines."""
    environment = {**fakes.environment, "NUM_MACHINES": "2", **variables}
    script = subprocess.run(
        words, env=environment, cwd=directory, timeout=60, capture_output=True, check=False
    )
    return script.returncode


def num_starts(fakes: FakeScheduler, rank: int) -> int:
    return len((fakes.directory / f"starts.{rank}").read_text().split())


def test_the_table_has_the_codes_that_the_code_ends_with() -> None:
    """An agent's are defined beside it; a command's others are those of cli/main.py."""
    codes = [code for code, _, _ in TABLE]

    assert {EXIT_DONE, 1, 2, EXIT_UNFINISHED, EXIT_AGAIN, 130} <= set(codes)
    assert len(codes) == len(set(codes)) == 8


@pytest.mark.parametrize(("code", "text"), [(code, head) for code, head, _ in TABLE])
def test_slurm_acts_on_the_exit_code_of_the_head(
    code: int, text: str, fakes: FakeScheduler, tmp_path: Path
) -> None:
    """Other machines may be lost meanwhile: that is nothing, as the exit code of srun would be.

    Whoever stops a job there does that by Slurm, which does not queue it again then. So Slurm has
    other reasons where a signal has stopped a job that is not cancelled.
    """
    again = is_again(text) or code == 130
    other = {"HEAD": str(code), "OTHER": "1"}
    ended = run_script(fakes, ["bash", str(CLUSTERS / "cluster.sbatch")], tmp_path, **other)
    requeues = fakes.words("scontrol")

    assert requeues in ([], ["requeue 7"])
    assert bool(requeues or num_starts(fakes, 0) > 1) == again
    assert ended == (0 if again else code)
    assert "--no-kill -K0 --wait=0" in fakes.words("srun")[0]
    assert not list(tmp_path.glob(".cluster-*"))


@pytest.mark.parametrize(("code", "text"), [(code, other) for code, _, other in TABLE])
@pytest.mark.parametrize("on", ["slurm", "ssh"])
def test_a_machine_is_started_again_if_its_exit_code_asks_for_it(
    on: str, code: int, text: str, fakes: FakeScheduler, tmp_path: Path
) -> None:
    """The head goes on meanwhile."""
    (tmp_path / "examples" / "clusters").mkdir(parents=True)
    (tmp_path / HOSTS).write_text("127.0.0.1\n# none\nme@127.0.0.2 rack-2\n")
    again = is_again(text) or (on == "ssh" and text.startswith("with the job"))
    file = "cluster.sbatch" if on == "slurm" else "cluster-ssh.sh"
    other = {"HEAD": "0", "OTHER": str(code), "STARTS": "2" if again else "1"}
    ended = run_script(fakes, ["bash", str(CLUSTERS / file)], tmp_path, **other)

    assert (ended, num_starts(fakes, 0), num_starts(fakes, 1)) == (0, 1, 2 if again else 1)
    if on == "ssh":
        own = next(words for words in fakes.words("planaria") if "--node-rank 1" in words)
        assert "--rdzv-endpoint 127.0.0.1:29400 --domain rack-2" in own


@pytest.mark.parametrize(("code", "text"), [(code, head) for code, head, _ in TABLE])
def test_ssh_acts_on_the_exit_code_of_the_head(
    code: int, text: str, fakes: FakeScheduler, tmp_path: Path
) -> None:
    (tmp_path / "examples" / "clusters").mkdir(parents=True)
    (tmp_path / HOSTS).write_text("127.0.0.1\n127.0.0.2\n")
    codes = {"HEAD": str(code), "OTHER": "0", "STARTS": "1"}
    ended = run_script(fakes, ["bash", str(CLUSTERS / "cluster-ssh.sh")], tmp_path, **codes)

    assert (ended, num_starts(fakes, 0)) == ((0, 2) if is_again(text) else (code, 1))


def test_slurm_queues_a_job_again_that_its_signal_has_stopped(
    fakes: FakeScheduler, tmp_path: Path
) -> None:
    """At most 20 times."""
    for num_requeues, words in ((19, ["requeue 7"]), (20, ["requeue 7"])):
        for file in fakes.directory.glob("starts.*"):
            file.unlink()
        (fakes.directory / "ready").unlink(missing_ok=True)
        variables = {"NUM_MACHINES": "2", "HEAD": "told", "OTHER": "0"}
        script = subprocess.Popen(
            ["bash", str(CLUSTERS / "cluster.sbatch")],
            env={**fakes.environment, **variables, "SLURM_RESTART_COUNT": str(num_requeues)},
            cwd=tmp_path,
            start_new_session=True,
        )
        try:
            wait_for((fakes.directory / "ready").exists, what="the head is started")
            script.send_signal(signal.SIGUSR1)
            ended = script.wait(timeout=60)
        finally:
            if script.poll() is None:
                os.killpg(script.pid, signal.SIGKILL)

        assert (ended, fakes.words("scontrol")) == (0 if num_requeues < 20 else 130, words)


def action_of_kubernetes(fakes: FakeScheduler, *, index: int, code: int) -> str:
    """What becomes of a pod: what its command makes of the code, and the policy of that."""
    *_, job = yaml.safe_load_all((CLUSTERS / "cluster.yaml").read_text())
    [container] = job["spec"]["template"]["spec"]["containers"]
    variables = {"HEAD": str(code), "OTHER": str(code), "JOB_COMPLETION_INDEX": str(index)}
    words = [*container["command"], *container["args"]]
    ended = run_script(fakes, words, fakes.directory, **variables)
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        if ended in rule.get("onExitCodes", {"values": []})["values"]:
            return str(rule["action"])
    return "Count" if ended else "Succeed"


@pytest.mark.parametrize(("code", "head", "other"), TABLE)
def test_kubernetes_acts_on_exit_codes(
    code: int, head: str, other: str, fakes: FakeScheduler
) -> None:
    """What counts is made again; a head that was stopped was stopped by its pod's end."""
    actions = [action_of_kubernetes(fakes, index=index, code=code) for index in (0, 1)]

    is_head_again = is_again(head) or "again if the scheduler sent it" in head
    is_other_again = is_again(other) or other.startswith("with the job")
    assert actions[0] == ("Succeed" if code == 0 else "Count" if is_head_again else "FailJob")
    assert actions[1] == ("Succeed" if code == 0 else "Count" if is_other_again else "FailIndex")


def test_a_pod_that_left_in_peace_is_made_again(fakes: FakeScheduler) -> None:
    """Its index would count as done, and no other machine would take its place."""
    fakes.write(
        "planaria", "trap 'exit 0' TERM; touch \"$FAKES/ready\"; while :; do sleep 0.01; done"
    )
    *_, job = yaml.safe_load_all((CLUSTERS / "cluster.yaml").read_text())
    [container] = job["spec"]["template"]["spec"]["containers"]
    pod = subprocess.Popen(
        [*container["command"], *container["args"]],
        env={**fakes.environment, "JOB_COMPLETION_INDEX": "3"},
    )
    wait_for((fakes.directory / "ready").exists, what="the command is started")
    pod.send_signal(signal.SIGTERM)

    assert pod.wait(timeout=60) == EXIT_AGAIN


# -- Ray ------------------------------------------------------------------------------------------


class ActorLost(Exception):
    """When the machine of an actor is lost."""


class FakeRef:
    """A call of an actor's method, made when its result is asked for."""

    def __init__(self, call: Callable[[], Any], rank: int) -> None:
        self.call = call
        self.rank = rank


class FakeMethod:
    """A method of an actor."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def remote(self, *arguments: Any) -> FakeRef:
        rank = arguments[0] if arguments else -1
        return FakeRef(lambda: self._method(*arguments), rank)


class FakeActor:
    """A handle of an actor."""

    def __init__(self, instance: Any) -> None:
        self._instance = instance

    def __getattr__(self, name: str) -> FakeMethod:
        return FakeMethod(getattr(self._instance, name))


class FakeGroup:
    """A placement group that is there at once."""

    def __init__(self, bundles: list[dict[str, int]], strategy: str = "PACK") -> None:
        self.bundles = bundles
        self.strategy = strategy

    def ready(self) -> FakeRef:
        return FakeRef(lambda: self, -1)


def fake_ray(
    monkeypatch: pytest.MonkeyPatch, draining: Callable[[], dict[str, int]] = dict
) -> list[dict[str, Any]]:
    """Puts a module in the place of ray; returns the options with which actors will be started.

    Args:
        draining: returns what is drained; this machine is "here".
    """
    started: list[dict[str, Any]] = []
    num_asked = itertools.count()
    ray, util = ModuleType("ray"), ModuleType("ray.util")
    groups, strategies = (ModuleType(f"ray.util.{n}") for n in ("placement_group", "strategies"))

    def remote(**options: Any) -> Callable[[type], Any]:
        started.append(options)
        return lambda cls: type("Remote", (), {"remote": staticmethod(lambda: FakeActor(cls()))})

    ray.__dict__.update(
        util=util,
        init=lambda: None,
        remote=remote,
        get=lambda ref: ref.call(),
        # The head ends last, or nothing else would be seen to end.
        wait=lambda refs: ([max(refs, key=lambda ref: ref.rank)], []),
        exceptions=type("exceptions", (), {"RayActorError": ActorLost}),
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "here"),
        _private=SimpleNamespace(
            state=SimpleNamespace(state=SimpleNamespace(get_draining_nodes=draining))
        ),
    )

    def address() -> str:
        if next(num_asked) % 2 == 0:  # Ray has not replaced the machine yet, or none is there yet.
            raise ActorLost
        return "127.0.0.1"

    util.__dict__.update(get_node_ip_address=address)
    groups.__dict__.update(placement_group=FakeGroup, PlacementGroup=FakeGroup)
    strategies.__dict__.update(
        PlacementGroupSchedulingStrategy=lambda group, **index: (group, index)
    )
    modules = {
        "ray": ray,
        "ray.util": util,
        "ray.util.placement_group": groups,
        "ray.util.scheduling_strategies": strategies,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return started


@pytest.mark.parametrize(("code", "head", "other"), TABLE)
def test_ray_acts_on_exit_codes(
    code: int,
    head: str,
    other: str,
    fakes: FakeScheduler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The head's machine first, then another one; Ray replaces the actors themselves."""
    for name, text in fakes.environment.items():
        monkeypatch.setenv(name, text)
    started = fake_ray(monkeypatch)
    monkeypatch.chdir(ROOT)
    for ends, rank, text in (
        ({"HEAD": str(code), "OTHER": "0"}, 0, head),
        ({"HEAD": "0", "OTHER": str(code)}, 1, other),
    ):
        for name, value in ends.items():
            monkeypatch.setenv(name, value)
        for file in fakes.directory.glob("starts.*"):
            file.unlink()
        program = runpy.run_path(str(CLUSTERS / "cluster_ray.py"))
        program["main"].__globals__["PAUSE_S"] = 0.0
        ended = program["main"]()

        again = is_again(text) or text.startswith("with the job")
        assert num_starts(fakes, rank) == (2 if again else 1)
        assert ended == (0 if again or rank else code)
    assert {options["max_restarts"] for options in started} == {-1}
    places = [options["scheduling_strategy"] for options in started[:4]]
    assert [len(group.bundles) for group, _ in places] == [2, 2, 1, 1]
    assert places[0][0].strategy == "STRICT_SPREAD"


@pytest.mark.parametrize(("end_s", "told"), [(0, ""), (50, r"\d\d")])
def test_a_machine_that_ray_drains_is_told_so_once_and_is_to_run_elsewhere(
    end_s: int, told: str, fakes: FakeScheduler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It leaves in peace, with 0, which would count as done. Ray refuses to answer at times."""
    fakes.write(
        "planaria",
        f"notice=$(grep -oP -- '--notice \\K\\S+' <<< \"$*\"); touch {tmp_path}/runs\n"
        'until [ -e "$notice" ]; do sleep 0.01; done\n'
        f'cat "$notice" > {tmp_path}/told; exit 0',
    )
    for name, text in fakes.environment.items():
        monkeypatch.setenv(name, text)
    answers = itertools.count()

    def draining() -> dict[str, int]:
        if next(answers) % 2:
            raise OSError("no answer")
        is_running = (tmp_path / "runs").exists()
        return {"here": int(1000 * (time.time() + end_s)) if end_s else 0} if is_running else {}

    fake_ray(monkeypatch, draining)
    program = runpy.run_path(str(CLUSTERS / "cluster_ray.py"))
    program["main"].__globals__["POLL_S"] = 0.01
    machine = program["Machine"]()

    assert machine.run(1, "127.0.0.1") == EXIT_AGAIN
    assert re.fullmatch(told, (tmp_path / "told").read_text())
