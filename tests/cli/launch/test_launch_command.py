"""`planaria launch`: what it writes and submits, and what it refuses."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import yaml

from helpers.command import assert_mistake, command
from helpers.fake_scheduler import FakeScheduler

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


@pytest.fixture(autouse=True)
def _at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture
def fakes(tmp_path: Path) -> FakeScheduler:
    return FakeScheduler(tmp_path / "fakes")


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
    settings = ("--set", "training.iterations=7", "--domain", "$RACK", "--interface", "ib0")
    script = command(*COMMON, "--on", on, *options, *own, *settings, "--dry-run").output
    read = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)

    assert (read.returncode, read.stderr) == (0, "")
    assert '--domain "$RACK"' in script
    assert "--token-file 'a token'" in script
    assert "--nproc-per-node 8" in script
    assert "--interface ib0" in script
    assert all(len(line) <= 100 for line in script.splitlines())
    if on == "slurm":
        assert "#SBATCH --gpus-per-node=8\n" in script
        assert "#SBATCH --partition=gpus\n" in script
        spare = """export PLANARIA_AGENT_OPTIONS='--interface ib0 --domain "$RACK"'\n"""
        assert spare in script


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
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "delete"]},
        {"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]},
    ]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


def test_a_pod_knows_the_machine_that_it_runs_on() -> None:
    """Its host name is that of its index, whichever machine it gets."""
    *_, job = yaml.safe_load_all((CLUSTERS / "cluster.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    fields = {each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in container["env"]}

    assert fields["PLANARIA_KUBERNETES_NODE"] == "spec.nodeName"


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


def _expand(text: str) -> str:
    """The text that a container gets for one of its args, by the rules of Kubernetes."""
    by_name = {"$$": "$", "$(NUM_FAILURES)": "0"}
    return re.sub(r"\$\$|\$\([^)]*\)", lambda match: by_name.get(match[0], match[0]), text)


DOLLARS: Final = ("a=$$", "b=$(NUM_FAILURES)", "c=$$(NUM_FAILURES) $$$", "d=$NUM", "e='$'")


def test_kubernetes_leaves_the_settings_as_they_are() -> None:
    """It halves $$, and puts the value of a variable in place of $(NAME)."""
    settings = [word for setting in DOLLARS for word in ("--set", setting)]
    words = ("--on", "kubernetes", "--image", "planaria", *settings, "--dry-run")
    *_, job = yaml.safe_load_all(command("launch", "away.toml", *COMMON[2:], *words).output)
    (container,) = job["spec"]["template"]["spec"]["containers"]

    text = _expand(container["args"][0]).replace("\\\n", "")
    assert all(shlex.join(("--set", setting)) in text for setting in DOLLARS)


def test_ray_has_the_letters_of_every_script() -> None:
    """One above U+FFFF became two halves, which no process can be given."""
    setting = 'name="\U00020bb7\\"'
    program = command(*COMMON, "--on", "ray", "--set", setting, "--dry-run").output

    texts = [node.value for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Constant)]
    assert setting in texts


def test_names_that_yaml_takes_for_something_else_are_quoted() -> None:
    """`on` is true, and 0x10 a number."""
    words = ("--on", "kubernetes", "--image", "x", "--name", "on", "--volume", "0x10")
    text = command(*COMMON, *words, "--namespace", "7", "--dry-run").output
    documents = list(yaml.safe_load_all(text))
    volumes = documents[-1]["spec"]["template"]["spec"]["volumes"]

    assert {document["metadata"]["name"] for document in documents} == {"on"}
    assert {document["metadata"]["namespace"] for document in documents} == {"7"}
    assert volumes[0]["persistentVolumeClaim"] == {"claimName": "0x10"}


def test_what_a_script_prints_is_no_part_of_the_file(tmp_path: Path) -> None:
    """Its printing would be the first lines of a shell script."""
    script = tmp_path / "trains.py"
    script.write_text(
        "import planaria\nprint('hello')\n"
        "model = planaria.ModelConfig(kind='python', target='trains:layers')\n"
        "job = planaria.Job(planaria.JobConfig(model=model))\n"
    )
    result = command("launch", str(script), "--nodes", "2", "--on", "slurm", "--dry-run")

    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("#!")
    assert "hello" not in result.stdout


def test_a_pod_is_given_the_time_of_a_notice_and_more() -> None:
    """Kubernetes killed it after a minute, in the midst of a longer notice."""
    longer = ("--set", "cluster.notice_s=299.5")
    text = command(*COMMON, *ARGUMENTS["cluster.yaml"], *longer, "--dry-run").output
    *_, job = yaml.safe_load_all(text)

    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 330
    assert "# More than cluster.notice_s, 299.5 s." in text


def test_a_pod_asks_kubernetes_for_what_it_takes() -> None:
    """One that asks for nothing is the first that is evicted, and a quota refuses it. An autoscaler
    that packs pods closer would take its machine."""
    options = (*ARGUMENTS["cluster.yaml"], "--cpus", "16", "--memory", "64Gi", "--dry-run")
    for gpus, own in (((), {}), (("--devices-per-node", "8"), {"nvidia.com/gpu": 8})):
        *_, job = yaml.safe_load_all(command(*COMMON, *options, *gpus).output)
        template = job["spec"]["template"]
        [container] = template["spec"]["containers"]

        assert container["resources"] == {
            "requests": {"cpu": 16, "memory": "64Gi"},
            "limits": {**own, "memory": "64Gi"},
        }
        memory = template["spec"]["volumes"][-1]["emptyDir"]
        assert memory == {"medium": "Memory", "sizeLimit": "64Gi"}
        assert template["metadata"]["annotations"] == {
            "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
            "karpenter.sh/do-not-disrupt": "true",
        }


# -- what is refused ------------------------------------------------------------------------------


def test_an_actor_of_ray_asks_for_no_more_than_its_bundle_has() -> None:
    """Ray gives an actor that asks for GPUs alone a CPU as well, which no bundle had."""
    options = ("--on", "ray", "--devices-per-node", "8", "--port", "7000", "--dry-run")
    text = command(*COMMON, *options).output

    assert "PORT = 7000\n" in text
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
        (("--on", "kubernetes", "--image", "x", "--cpus", "0"), ("--cpus", "at least 1")),
        (("--on", "kubernetes", "--image", "x", "--memory", "64"), ("--memory", "64Gi")),
        (("--on", "slurm", "--memory", "64Gi"), ("--memory", "slurm has no use for it")),
        (("--on", "ssh"), ("--hosts", "HOST [DOMAIN]")),
        (("--on", "ssh", "--hosts", "none"), ("--hosts", "cannot be read")),
        (("--on", "slurm", "--partition", "a b"), ("--partition", "without spaces")),
        (("--on", "slurm", "--name", "A_b"), ("--name", "lower-case")),
        (("--on", "slurm", "--nodes", "4:2"), ("--nodes", "MIN <= MAX")),
        (("--on", "slurm", "--set", "training.iteration=3"), ("training.iteration",)),
        (("--on", "slurm", "--set", "name=a\nb"), ("--set", "without line ends")),
        (("--on", "ray", "--domain", "rack\udcff"), ("--domain", "without line ends")),
        (("--on", "slurm", "--domain", 'a"b'), ("--domain", "without quotes")),
        (("--on", "ray", "--domain", "$(rack)"), ("--domain", "$NAME is a variable")),
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
    assert_mistake(command(*COMMON, "--on", "slurm", "-o", "x" * 300), "cannot be reached: File")
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


def test_a_job_is_submitted_from_within_another_one(fakes: FakeScheduler, tmp_path: Path) -> None:
    """As from a notebook on a machine of Slurm. What describes that job broke the srun of this one.
    What the user has set for sbatch is kept."""
    fakes.write("sbatch", 'env | grep -E "^(SLURM|SBATCH|SRUN)" | sort')
    others = {"SLURM_MEM_PER_CPU": "4G", "SLURM_CPU_BIND": "quiet", "SRUN_DEBUG": "3"}
    kept = {"SBATCH_ACCOUNT": "a", "SLURM_CLUSTERS": "c", "SLURM_CONF": "/etc/slurm.conf"}
    words = [sys.executable, "-m", "planaria", *COMMON, *ARGUMENTS["cluster.sbatch"]]
    ended = subprocess.run(
        [*words, "-o", str(tmp_path / "mine.sbatch")],
        env={**fakes.environment, **others, **kept},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.stdout.splitlines()[1:] == [f"{name}={text}" for name, text in kept.items()]


@pytest.mark.parametrize(
    ("conditions", "is_deleted"),
    [("", False), ("Suspended", False), ("SuccessCriteriaMet Complete", True), ("Failed", True)],
)
def test_a_job_of_kubernetes_that_is_over_is_deleted_before_it_is_started_anew(
    conditions: str, is_deleted: bool, fakes: FakeScheduler, tmp_path: Path
) -> None:
    """Kubernetes took the same object once more, and did nothing."""
    fakes.write(
        "kubectl",
        'echo "$*" >> "$FAKES/kubectl.words"\n'
        f'case "$*" in *"get jobs"*) [ "{conditions}" ] || exit 1; echo "{conditions}" ;; esac',
    )
    words = [sys.executable, "-m", "planaria", *COMMON, *ARGUMENTS["cluster.yaml"]]
    ended = subprocess.run(
        [*words, "--namespace", "team", "-o", str(tmp_path / "job.yaml")],
        env=fakes.environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ended.returncode, ended.stderr) == (0, "")
    told = fakes.words("kubectl")
    assert ("-n team delete job cluster" in told) == is_deleted
    assert told[-1] == f"-n team apply -f {tmp_path}/job.yaml"
