"""Every mistake of the user's is one clear line and exit code 2, and nothing half-written."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.command import CHECKPOINTS, PACED, assert_mistake, command, train
from helpers.mistaken_models import LATE_ITERATION, LATE_SAMPLE
from planaria.nodes.forkserver import ForkServer

FAST_S = 1.0  # Of this process alone, whatever else the machine does.


class _Shared:
    """The session's fork server, which a job must not close."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def close(self) -> None:
        """Stays for the next test."""


@pytest.fixture(autouse=True)
def _in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _no_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts one, waits for torch."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a fork server was started")

    monkeypatch.setattr("planaria.job.training_job.fork_server", refuse)


@pytest.fixture
def shared(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    """The command forks from the session's fork server; whoever it forks is gone in the end."""
    before = set(psutil.Process(server.pid).children())
    monkeypatch.setattr("planaria.job.training_job.fork_server", lambda *_, **__: _Shared(server))
    yield server
    assert set(psutil.Process(server.pid).children()) <= before


def job_file(text: str) -> Path:
    path = Path("job.toml").absolute()
    path.write_text(text)
    return path


TINY = """
[model]
kind = "hf"
[model.config]
model_type = "gpt2"
n_layer = 2
n_embd = 16
n_head = 2
n_positions = 32
[data]
sequence_length = 16
[training]
iterations = 4
global_batch_size = 8
microbatch_size = 2
[resilience]
failures_tolerated = 0
[cluster]
nodes = 2
"""
PYTHON = """
[model]
kind = "python"
target = "{model}"
[data]
kind = "python"
target = "{data}"
[training]
iterations = 30
global_batch_size = 8
microbatch_size = 2
[resilience]
failures_tolerated = 0
[cluster]
nodes = 2
"""


def python_job(model: str, data: str = "helpers.user_models:points") -> Path:
    return job_file(PYTHON.format(model=model, data=data))


@pytest.mark.usefixtures("_no_fork_server")
@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("modle.kind=hf", ("modle = ", "did you mean model?")),
        ("training.iteration=3", ("training.iteration = 3", "did you mean iterations?")),
        ("training.iterations=many", ("training.iterations = 'many'", "an integer")),
        ("training.iterations=0", ("at least 1",)),
        ("training.microbatch_size=3", ("global_batch_size = 8", "6 or 9 would work")),
        ("training.global_batch_size=1_000_000_000_000", ("1 to 65536 times", "131072 would work")),
        ("data.path=nothing.txt", ("data.path = ", "no such file")),
        ("cluster.nodes=0", ("cluster.nodes = 0", "at least 1")),
        ("cluster.nodes=-1", ("cluster.nodes = -1", "at least 1")),
        ("cluster.nodes=1_000_000_000_000", ("cluster.nodes", "at most")),
        ("cluster.devices_per_node=1_000_000_000_000", ("devices_per_node", "at most")),
        ("training.iterations=100_000_000_000_000_000_000", ("64 bits",)),
        ("checkpoint.directory=job.toml", ("checkpoint.directory", "must name a directory")),
        ("checkpoint.directory=job.toml/below", ("checkpoint.directory", "is not a directory")),
        ("data.path=empty.txt", ("data.path", "the file is empty")),
        (
            "checkpoint={copies=2,failure_domains=[[0,99]]}",
            ("failure_domains = 99", "has nodes 0 to 1"),
        ),
        ("nonsense", ("--set = 'nonsense'", "TABLE.KEY=VALUE")),
    ],
)
def test_a_wrong_value_is_told_at_once(setting: str, parts: tuple[str, ...]) -> None:
    """Nobody waits for torch to hear of a typing mistake."""
    Path("empty.txt").touch()
    start_s = time.process_time()

    result = train(job_file(TINY), setting)

    assert_mistake(result, *parts)
    assert time.process_time() - start_s < FAST_S


@pytest.mark.usefixtures("_no_fork_server")
@pytest.mark.parametrize(
    ("content", "part"),
    [(None, "no such file"), (b"[model\n", "is not TOML"), (b"\xff\xfe", "is not UTF-8")],
)
def test_a_job_file_that_cannot_be_read_is_named(content: bytes | None, part: str) -> None:
    """A missing, a malformed and a binary file."""
    path = Path("job.toml")
    if content is not None:
        path.write_bytes(content)

    assert_mistake(train(path), "job file = 'job.toml'", part)


@pytest.mark.usefixtures("_no_fork_server")
def test_a_directory_is_no_job_file() -> None:
    """An easy slip with tab completion."""
    assert_mistake(train(Path(".")), "job file = '.'", "Is a directory")


@pytest.mark.usefixtures("_no_fork_server")
@pytest.mark.parametrize("option", ["--report", "--timeline"])
@pytest.mark.parametrize("path", ["missing/out.json", "."])
def test_an_output_that_cannot_be_written_is_refused_before_training(
    option: str, path: str
) -> None:
    """Not after hours of it."""
    result = command("train", str(job_file(TINY)), option, path)

    assert_mistake(result, f"{option} = ", "a writable directory")


@pytest.mark.usefixtures("_no_fork_server")
@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (["cluster.nodes=5"], ("cluster.nodes = 5",)),
        (["resilience.failures_tolerated=3"], ("cluster.nodes = 9", "failures_tolerated = 2")),
        (
            ["training.global_batch_size=1"],
            ("training.global_batch_size = 1", "values that work: training.global_batch_size = 2"),
        ),
        (["cluster.device_memory_bytes=100"], ("device_memory_bytes = 100",)),
        (["cluster.nodes=1000"], ("cluster.nodes = 1000", "at most 432 nodes")),
        (["cluster.max_nodes=1000"], ("cluster.max_nodes = 1000", "at most 432 nodes")),
    ],
)
def test_a_job_that_does_not_fit_its_cluster_names_what_would_do(
    settings: list[str], parts: tuple[str, ...]
) -> None:
    """A given profile tells it without torch."""
    directory = f"checkpoint.directory={CHECKPOINTS}"

    assert_mistake(train(PACED, *settings, directory), *parts)


@pytest.mark.usefixtures("shared")
def test_settings_apply_on_top_of_a_scripts_job() -> None:
    """The options of the command line are the same for both."""
    Path("mine.py").write_text(
        "import planaria\n"
        "job = planaria.Job(planaria.JobConfig(\n"
        "    model=planaria.ModelConfig(kind='python', target='helpers.user_models:sequential'),\n"
        "    data=planaria.DataConfig(kind='python', target='helpers.user_models:points'),\n"
        "))\n"
    )

    result = command(
        *("train", "mine.py", "--nodes", "3", "--report", "r.json"),
        *("--set", "training.iterations=2", "--set", "training.global_batch_size=12"),
    )

    report = json.loads(Path("r.json").read_text())
    assert result.exit_code == 0
    assert report["final"]["nodes"] == [0, 1, 2]
    assert [record["samples"] for record in report["iterations"]] == [12, 12]


@pytest.mark.usefixtures("_no_fork_server")
def test_resume_without_a_checkpoint_is_refused() -> None:
    """It would silently start anew."""
    result = command("train", str(job_file(TINY)), "--resume")

    assert_mistake(result, "checkpoint.directory", "no complete checkpoint")


@pytest.mark.usefixtures("shared")
def test_a_checkpoint_is_neither_mixed_with_another_run_nor_with_another_job() -> None:
    """Each refusal names the key that differs and what it was saved with."""
    job = python_job("helpers.user_models:sequential")
    assert train(job, "training.iterations=2").exit_code == 0
    files = sorted(Path(CHECKPOINTS).rglob("*"))

    for arguments, parts in (
        ([], ("checkpoint of iteration 2", "--resume")),
        (["--resume", "--set", "training.seed=8"], ("seed = 8", "saved with 0")),
        (["--resume", "--set", "training.microbatch_size=4"], ("microbatch_size = 4",)),
        (
            ["--resume", "--set", "data.sequence_length=8"],
            ("data.sequence_length = 8:", "saved with"),
        ),
        (["--resume", "--set", "training.iterations=2"], ("training.iterations = 2",)),
    ):
        result = command("train", str(job), *arguments)
        assert result.exit_code == 2, result.output
        assert all(part in result.stderr for part in parts), result.stderr

    assert sorted(Path(CHECKPOINTS).rglob("*")) == files


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("model.config={model_type='t5'}", ("t5",)),
        ("model.config.model_type=gpt3", ("model.config.model_type",)),
        ("model.config.n_layers=2", ("model.config.n_layers = 2:", "n_layer")),
        ("data.sequence_length=64", ("data.sequence_length", "32")),
        ("data.sequence_length=1_000_000_000", ("data.sequence_length",)),
        ("data.path=short.txt", ("data.",)),
        ("training.optimizer.name=Adamm", ("training.optimizer.name = 'Adamm'", "Adam")),
        ("training.optimizer.weight_decya=1", ("weight_decya", "weight_decay")),
        ("training.schedule.name=cosin", ("training.schedule", "cosine")),
        ("cluster.nodes=17", ("cluster.nodes = 17", "at most 16 nodes")),
        ("cluster.device_memory_bytes=5", ("cluster.device_memory_bytes",)),
    ],
)
@pytest.mark.usefixtures("shared")
def test_a_mistake_that_only_torch_can_see_is_told_before_nodes_start(
    setting: str, parts: tuple[str, ...]
) -> None:
    """In the same words as the others."""
    Path("short.txt").write_text("short")

    assert_mistake(train(job_file(TINY), setting), *parts)


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("helpers.mistaken_models:with_batch_norm", ("BatchNorm", "GroupNorm")),
        ("helpers.mistaken_models:nothing_there", ("model.target", "no function 'nothing_there'")),
        ("no_such_module:layers", ("model.target", "no module 'no_such_module'")),
        ("helpers.mistaken_models:returns_nothing", ("model.target", "NoneType", "nn.Sequential")),
    ],
)
@pytest.mark.usefixtures("shared")
def test_layers_that_cannot_be_trained_are_refused_with_the_way_out(
    target: str, parts: tuple[str, ...]
) -> None:
    """What the user's function returns is looked at before anything trains."""
    assert_mistake(train(python_job(target)), *parts)


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(
    ("model", "data", "error"),
    [
        ("raises_at_once", "helpers.user_models:points", "a mistake in the user's constructor"),
        ("raises", "helpers.user_models:points", "a mistake in the user's model"),
        (
            "multiplies_wrongly",
            "helpers.user_models:points",
            "mat1 and mat2 shapes cannot be multiplied",
        ),
        ("with_raising_loss", "helpers.user_models:points", "a mistake in the user's loss"),
        ("raises", "helpers.mistaken_models:raising_data", "a mistake in the user's data"),
        ("leaves", "helpers.user_models:points", "SystemExit: 5"),
        ("interrupts", "helpers.user_models:points", "KeyboardInterrupt"),
    ],
)
def test_what_the_users_code_raises_is_shown_once_from_its_first_own_frame(
    model: str, data: str, error: str
) -> None:
    """Two ranks raise; nobody wants to read our frames, or the same mistake twice."""
    result = train(python_job(f"helpers.mistaken_models:{model}", data))

    assert result.exit_code == 1
    assert result.stderr.count("Traceback") == 1
    assert len(re.findall(rf"(?:Error: |^){re.escape(error)}", result.stderr, re.M)) == 1
    frames = re.findall(r'File "(.*?)", line', result.stderr)
    assert "mistaken_models" in frames[0]
    assert re.search(
        r"the job's own code raised an error (in rank \d|before training)", result.stderr
    )
    assert Path(CHECKPOINTS).exists() == (model != "raises_at_once")


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(("data", "count"), [("mistaken", 1), ("user", 0)])
def test_a_data_set_that_keeps_a_generator_is_warned_of(data: str, count: int) -> None:
    """Its job trains, but a loss would change its result."""
    function = {"mistaken": "kept_generator", "user": "points"}[data]
    job = python_job("helpers.user_models:sequential", f"helpers.{data}_models:{function}")

    result = train(job, "training.iterations=2")

    assert result.exit_code == 0
    assert result.output.count("differs each time that it is read") == count


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(
    ("data", "code", "parts"),
    [
        ("one_label", 2, (" is out of bounds", f"in iteration {LATE_ITERATION} for a microbatch")),
        ("one_shape", 2, ("different shapes", f"sample {LATE_SAMPLE} has [7], and sample ")),
        ("one_raises", 1, ("Traceback", f"planaria: raised for sample {LATE_SAMPLE}")),
    ],
)
def test_a_sample_that_is_wrong_is_named(data: str, code: int, parts: tuple[str, ...]) -> None:
    """Among a million. Of a loss only the microbatch is known."""
    job = python_job("helpers.user_models:sequential", f"helpers.mistaken_models:{data}")

    result = train(job, "training.microbatch_size=4")  # Three are as they should be.

    assert result.exit_code == code, result.output
    for part in (*parts, f" {LATE_SAMPLE}"):
        assert part in result.stderr


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(
    ("data", "part"), [("one_label", " is out of bounds"), ("one_shape", "[7]")]
)
def test_a_held_out_sample_that_is_wrong_is_told_as_such(data: str, part: str) -> None:
    """The model and its loss, which the message named, have trained for an iteration."""
    job, target = python_job("helpers.user_models:sequential"), f"helpers.mistaken_models:{data}"

    result = train(job, "evaluation.every=1", f"evaluation.target={target}")

    first = LATE_SAMPLE - LATE_SAMPLE % 2
    where = f"samples {first} to {first + 1} in the evaluation after 1 iterations: "
    assert result.exit_code == 2, result.output
    assert f"planaria: evaluation.target = '{target}': {where}" in result.stderr
    assert part in result.stderr


@pytest.mark.usefixtures("shared")
def test_a_process_killed_while_it_looks_at_the_job_is_told() -> None:
    """As the kernel does where a model is too large to be built."""
    result = train(python_job("helpers.mistaken_models:killed_at_once"))

    assert_mistake(result, "was killed by signal 9", code=3)


@pytest.mark.usefixtures("shared")
def test_a_loss_that_is_no_number_ends_training_and_is_in_the_report() -> None:
    """The step that would have made every parameter a NaN is not taken."""
    job = python_job("helpers.mistaken_models:overflows")

    result = command("train", str(job), "--report", "r.json", "--set", "checkpoint.persist_every=1")

    report = json.loads(Path("r.json").read_text())
    committed, told = len(report["iterations"]), (result.stderr, report["events"])
    assert result.exit_code == 2, told
    # The last reports may be on their way when the first rank ends the job.
    (iteration,) = re.findall(
        r"^planaria: training diverged in iteration (\d+), which", result.stderr
    )
    assert 0 < committed <= int(iteration), told
    assert result.stderr.count("\n") == 1, told
    event = report["events"][-1]  # On a busy machine the job may have planned anew before.
    assert (event["kind"], event["iteration"]) == ("failed", committed), told
    assert {each["kind"] for each in report["events"]}.isdisjoint({"lost", "restarted"}), told
    assert "diverged" in event["reason"]


@pytest.mark.usefixtures("shared")
def test_a_profile_of_another_model_is_refused() -> None:
    """Planning with it would be planning for something else."""
    job = job_file(TINY)
    # What the job names is not read: it is what this command writes.
    words = ("profile", str(job), "--set", "model.profile=tiny.json", "-o", "tiny.json")
    assert command(*words).exit_code == 0
    assert_mistake(command("profile", str(PACED), "-o", "paced.json"), "has no layers to measure")

    for setting, part in (
        ("model.config.n_layer=3", "number of layers is 4 in the profile and 5 in the job"),
        ("model.config.n_embd=8", "parameter_bytes of layer"),
        ("training.microbatch_size=1", "microbatch_size is 2 in the profile and 1 in the job"),
    ):
        assert_mistake(train(job, "model.profile=tiny.json", setting), "model.profile", part)
