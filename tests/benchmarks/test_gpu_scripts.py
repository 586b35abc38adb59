"""The scripts that prove planaria on a machine with one GPU, as far as they work without one."""

import json
import multiprocessing
import os
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import psutil
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import gpu2
import gpu_bits
import gpu_speed
from gpu.jobs import JobRun, Runner, Started, toml_text, write_text
from gpu.memory_watch import Sample, growth
from gpu.running import Ended, NotRunError, Parts, Row, comm_tests, last_json, run_command
from helpers.command import wait_for
from planaria.core.inject import check_injections, parse_injection
from planaria.core.job import JobConfig
from planaria.core.specs import Prepared
from planaria.engine.prepare import load_data, load_model
from planaria.engine.profiler import profile_model
from planaria.job.config import load_job
from planaria.job.planning import plan_job
from planaria.transport.timekeeping import Timekeeper

sys.path.pop()  # Or a script of benchmarks/ would be taken for a folder of tests/.

MEBI = 1 << 20


@pytest.mark.parametrize("script", [gpu_bits, gpu_speed], ids=["bits", "speed"])
def test_without_a_gpu_a_script_says_so_and_ends_with_2(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make bench` takes exit code 2 for a script that cannot run here."""
    monkeypatch.setattr(script, "accelerator", lambda: "")
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py"])

    assert script.main() == 2
    assert "torch finds no GPU" in capsys.readouterr().out


def _parts(results: Path | None = None, *, minutes: float = 1.0) -> Parts:
    return Parts(script="script", facts={"gpu": "none"}, minutes=minutes, results=results)


def test_a_part_that_fails_keeps_no_other_part_from_running(tmp_path: Path) -> None:
    """Time on a GPU is scarce: each part's results are on disk before the next one begins."""
    results = tmp_path / "results.json"
    parts = _parts(results)

    def fail() -> list[Row]:
        raise RuntimeError("out of memory")

    def refuse() -> list[Row]:
        raise NotRunError("no such key")

    def pass_second() -> list[Row]:
        assert [part["outcome"] for part in json.loads(results.read_text())["parts"]] == ["failed"]
        return [{"is_met": True}]

    parts.run("first", fail, least_s=0.0)
    parts.run("second", pass_second, least_s=0.0)
    parts.run("third", lambda: [{"is_met": True}, {"is_met": False}], least_s=0.0)
    parts.run("fourth", refuse, least_s=0.0)

    outcomes = [(part["outcome"], part["reason"]) for part in parts.done]
    assert outcomes == [
        ("failed", "RuntimeError: out of memory"),
        ("met", ""),
        ("MISSED", ""),
        ("not run", "no such key"),
    ]
    assert parts.report() == 1


def test_a_part_without_time_is_reported_as_not_run() -> None:
    """The limit of minutes holds for all parts together."""
    parts = _parts(minutes=0.5)

    parts.run("long", lambda: [{"is_met": True}], least_s=31.0)
    is_good_without = parts.report() == 0
    parts.run("short", lambda: [{"is_met": True}], least_s=0.0)

    assert [part["outcome"] for part in parts.done] == ["not run", "met"]
    assert "it needs 31 s" in parts.done[0]["reason"]
    assert not is_good_without
    assert parts.report() == 0


def test_a_command_over_its_time_is_killed_with_its_descendants(tmp_path: Path) -> None:
    """Its output is told; what it started in a session of its own dies, too."""
    script = "setsid sleep 60 & echo pid $!; wait"

    ended = run_command(["sh", "-c", script], log=tmp_path / "log", timeout_s=2.0)

    assert ended.code is None
    assert "killed at its time limit" in ended.problem
    assert "pid " in ended.problem
    pid = int((tmp_path / "log").read_text().split()[1])
    wait_for(lambda: _is_gone(pid), what="the end of what it started")


def test_a_command_dies_with_a_script_that_is_killed(tmp_path: Path) -> None:
    """It has a session of its own, and would take the GPU from the next measurement."""
    log = tmp_path / "log"
    words = ["sh", "-c", "echo pid $$; exec sleep 60"]
    script = multiprocessing.get_context("fork").Process(
        target=run_command, args=(words,), kwargs={"log": log, "timeout_s": 60.0}
    )
    script.start()
    wait_for(lambda: log.exists() and "\n" in log.read_text(), what="the pid")

    script.kill()

    pid = int(log.read_text().split()[1])
    wait_for(lambda: _is_gone(pid), what="the end of the command")
    script.join()


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_problem_of_a_command_shows_the_end_of_its_output(tmp_path: Path) -> None:
    """On a machine that nobody can log in to, the output is all there is to debug with."""
    ended = run_command(["sh", "-c", "seq 100; exit 3"], log=tmp_path / "log", timeout_s=60.0)

    assert ended.problem.startswith("exit code 3 after")
    assert ended.problem.splitlines()[-1] == "100"
    assert len(ended.problem.splitlines()) < 50


def test_the_figures_of_a_script_are_found_among_warnings(tmp_path: Path) -> None:
    """A library may print when the interpreter ends, after the script's last line."""
    log = tmp_path / "log"
    log.write_text('iteration 0\n{"seconds": [1.5]}\nwarning: a process group was not destroyed\n')

    assert last_json(log) == {"seconds": [1.5]}


def _bits(directory: Path, *, size: "gpu_bits.Size") -> "gpu_bits._Bits":
    runner = Runner(directory, "cpu", directory / "saves")
    return gpu_bits._Bits(
        size=size, runner=runner, parts=_parts(), job_s=100.0, at_once=1, iterations=10
    )


@pytest.mark.parametrize("size", [gpu_bits.SMALL, gpu_bits.LARGE], ids=["small", "large"])
def test_every_job_file_and_fault_of_the_bits_is_accepted(
    size: "gpu_bits.Size", tmp_path: Path
) -> None:
    """A mistake in one would be found only on the GPU."""
    bits = _bits(tmp_path, size=size)
    started = [bits._six(f"{model}-six") for model in ("gpt2", "llama", "bfloat16")]
    started += [bits._six(name) for name in gpu_bits.FAULTS]
    started += [bits._six("gpt2-stage-lost", gpu_bits.COPIES)]
    started += [bits._six("gpt2-over-devices", bits.over_devices())]
    started += [Started("memory", bits._memory_tables(nodes=4), gpu_bits.memory_faults())]

    for one in started:
        job = _loaded(toml_text(one.tables), tmp_path)
        faults = tuple(map(parse_injection, one.injections))
        check_injections(faults, num_nodes=job.cluster.nodes)
        assert all(fault.place.iteration < job.training.iterations for fault in faults)


def test_the_memory_part_has_twenty_faults_and_strikes_no_node_twice_dead() -> None:
    """Node 0 lives throughout; a node is killed once, and only after it may have joined."""
    faults = [parse_injection(spec) for spec in gpu_bits.memory_faults()]
    killed = [(fault.nodes[0], fault.place.iteration) for fault in faults if fault.kind == "kill"]
    joins = [fault.place.iteration for fault in faults if fault.kind == "join"]

    assert len([fault for fault in faults if fault.kind != "join"]) == gpu_bits.NUM_RECOVERIES
    assert [node for node, _ in killed] == [2, 3, 4, 5]
    assert all(joins[node - 4] < iteration for node, iteration in killed if node >= 4)
    assert not any(0 in fault.nodes for fault in faults)


@pytest.mark.parametrize("words", [["--small"], []], ids=["small", "large"])
def test_the_job_file_of_the_speed_is_accepted(
    words: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The large one has 0.5 million tokens in an iteration."""
    monkeypatch.setattr(sys, "argv", ["gpu_speed.py", *words])

    tables = gpu_speed._tables(gpu_speed._options(), text=tmp_path / "text")

    job = _loaded(toml_text(tables), tmp_path)
    tokens = job.training.global_batch_size * job.data.sequence_length
    assert tokens == (256 if words else 1 << 19)


def test_the_comm_of_a_device_is_tested_if_there_is_pytest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests of its kind alone, and that of NCCL itself, which is skipped without a GPU."""
    bits = _bits(tmp_path, size=gpu_bits.SMALL)
    real = comm_tests
    monkeypatch.setattr(
        gpu_bits, "comm_tests", lambda chosen: (*real(chosen), "--collect-only", "-vv")
    )

    (row,) = bits.comm()
    names = (tmp_path / "comm" / "log").read_text().splitlines()
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda _: None)
        with pytest.raises(NotRunError, match="no pytest"):
            bits.comm()

    assert row["is_met"]
    tests = [name for name in names if "<Function" in name]
    assert len(tests) >= 10
    assert all("host cpu" in name or "nccl_itself" in name for name in tests)


def test_the_tests_on_two_gpus_need_no_package_but_pytest(tmp_path: Path) -> None:
    """A machine without a network has no others, and `tests/conftest.py` imports hypothesis."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['hypothesis'] = None\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

    words = ["gloo" if word == "nccl" else word for word in gpu2.TESTS]  # There are no GPUs.
    log = tmp_path / "log"
    ended = run_command(
        [*words, "--collect-only"], log=log, timeout_s=100.0, environment=environment
    )

    assert not ended.problem


def test_the_jobs_on_two_gpus_send_from_stage_to_stage_and_sum_over_pipelines(
    tmp_path: Path,
) -> None:
    """With one pipeline for each node, nothing but sums would go over NCCL."""
    write_text(tmp_path / "text", num_bytes=1 << 16)
    jobs = {
        name: _loaded(toml_text(gpu2.tables_of(name, tmp_path)), tmp_path) for name in gpu2.JOBS
    }
    one = jobs["one"]
    model = load_model(one, cache_directory=tmp_path, profile=None, timekeeper=Timekeeper())
    dataset = load_data(one, objective=model.objective, cache_directory=tmp_path)
    profile = profile_model(one, model, dataset)

    for name, job in jobs.items():
        faults = tuple(map(parse_injection, gpu2.FAULTS[name]))
        check_injections(faults, num_nodes=job.cluster.nodes)
        limited = replace(profile, device_memory_bytes=job.cluster.device_memory_bytes)
        plan = plan_job(job, Prepared(profile=limited)).plan
        assert "+".join(str(len(each.nodes)) for each in plan.pipelines) == gpu2.SHAPES[name]


def _loaded(text: str, directory: Path) -> JobConfig:
    path = directory / "job.toml"
    path.write_text(text)
    return load_job(path)


def test_a_job_file_has_a_heading_for_each_table() -> None:
    """TOML has no null and no quotes but its own."""
    tables = {"name": "job", "model": {"config": {"n": 2}, "kind": "hf"}, "data": {"path": 'a"b'}}

    assert tomllib.loads(toml_text(tables)) == tables


def _run(directory: Path, hashes: tuple[str, str], *, fired: bool = True) -> JobRun:
    event = {
        **dict.fromkeys(("detect_s", "decide_s", "regroup_s", "transfer_s"), 0.25),
        "kind": "kill",
        "nodes": [1],
        "iteration": 3,
        "step": "forward",
        "fired": fired,
        "answer": "merge",
        "downtime_s": 1.0,
        "transfer_bytes": 8,
        "source_tier": "live",
    }
    report = {
        "final": {"parameters_sha256": hashes[0], "optimizer_sha256": hashes[1]},
        "events": [event],
        "iterations": [{"seconds": 1.0, "peak_bytes": 10, "predicted_peak_bytes": 9}],
    }
    ended = Ended(0, 5.0, directory / "log")
    return JobRun(started=Started("six", {}), ended=ended, report=report, saves=directory)


@pytest.mark.parametrize(
    ("hashes", "fired", "is_met", "text"),
    [
        (("a", "b"), True, True, "hashes equal; 1 recoveries: kill 1.00 s"),
        (("a", "c"), True, False, "hashes DIFFER"),
        (("", ""), True, False, "hashes MISSING"),
        (("a", "b"), False, False, "NOT INJECTED: kill@3"),
    ],
)
def test_a_job_is_right_only_with_equal_hashes_and_all_its_faults(
    hashes: tuple[str, str],
    fired: bool,
    is_met: bool,
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A fault that never struck proves nothing."""
    bits = _bits(tmp_path, size=gpu_bits.SMALL)

    row = bits._row(_run(tmp_path, hashes, fired=fired), expected=("a", "b"))

    assert row["is_met"] is is_met
    assert text in capsys.readouterr().out


@pytest.mark.parametrize(("leak", "is_flat"), [(0, True), (20 * MEBI, False)])
def test_memory_that_grows_with_each_recovery_is_found(leak: int, *, is_flat: bool) -> None:
    """Peaks are compared: a recovery takes memory for a while."""
    samples = [
        Sample(n, 4000 * MEBI + n * leak, {7: 500 * MEBI + n * leak + n % 2 * MEBI})
        for n in range(21)
        for _ in range(3)
    ]

    found = growth(samples, pid=7, settled=5, num_recoveries=20)

    slack, share = gpu_bits.GROWTH_SLACK_BYTES, gpu_bits.GROWTH_SHARE
    assert found.is_flat(slack_bytes=slack, share=share) is is_flat


def test_the_text_is_the_same_each_time(tmp_path: Path) -> None:
    """It is all that the jobs train on, and of the length that was asked for."""
    for name in ("one", "other"):
        write_text(tmp_path / name, num_bytes=10_000)

    text = (tmp_path / "one").read_bytes()
    assert len(text) == 10_000
    assert text == (tmp_path / "other").read_bytes()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_bits_are_proved_on_a_processor(tmp_path: Path) -> None:
    """All parts, with tiny models."""
    assert _small_run("gpu_bits", tmp_path) == dict.fromkeys(gpu_bits.PARTS, "met")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_speed_is_measured_on_a_processor(tmp_path: Path) -> None:
    """Its goals are for GPUs: no part may fail, but here one may miss its goal."""
    outcomes = _small_run("gpu_speed", tmp_path)

    assert list(outcomes) == list(gpu_speed.PARTS)
    assert "failed" not in outcomes.values()


def _small_run(script: str, directory: Path) -> dict[str, str]:
    """The outcome of each part of a script on a processor."""
    path = Path(__file__).parents[2] / "benchmarks" / f"{script}.py"
    results = directory / "results.json"
    words = ["--device", "cpu", "--small", "--minutes", "25", "--results", str(results)]
    command = [sys.executable, str(path), *words, "--directory", str(directory / "runs")]
    ended = run_command(command, log=directory / "log", timeout_s=1700.0)
    assert ended.code in (0, 1), ended.problem
    return {part["name"]: part["outcome"] for part in json.loads(results.read_text())["parts"]}
