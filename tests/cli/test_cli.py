"""The parts of the command line that start no process."""

import io
import json
import os
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import pytest
import typer
from typer.testing import Result

import planaria
from helpers.command import PACED, assert_mistake, command, train
from planaria.checkpoint.disk.tiers import tier_of
from planaria.cli import command_line, train_command
from planaria.cli import main as cli
from planaria.cli.command_line import check_writable, exit_codes, write
from planaria.core.job import JobConfig
from planaria.core.kinds import Ending
from planaria.core.messages import WorkerFailed
from planaria.core.records import Ended
from planaria.errors import ConfigError, InsufficientError, PlanariaError, TrainingError
from planaria.job.on_machines import Listening
from planaria.job.planning import read_profile
from planaria.job.report import failure_of
from planaria.job.scripts import named_job
from planaria.nodes.head.process_events import LEAVE_SIGNALS, restore_handlers
from planaria.nodes.output import unfailing
from planaria.transport.credentials import write_credentials


@pytest.fixture(autouse=True)
def _in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_version_and_help_are_there() -> None:
    """A bare `planaria` says what there is; as any wrong use, it ends with 2."""
    assert command("--version").output == f"planaria {planaria.__version__}\n"
    assert "train" in command().output
    assert command().exit_code == 2


def test_a_terminal_that_is_gone_interrupts_a_command_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A shell tells of it once more, while files are removed for the first time that it is told."""

    def hang_up_twice() -> None:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)

    monkeypatch.setattr(cli, "app", hang_up_twice)
    with restore_handlers():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        cli.main()


def test_whatever_a_command_is_to_ignore_it_ignores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As nohup and `trap '' TERM` have it of what they start."""
    numbers = [signal.SIGTERM, signal.SIGHUP]

    def ignore() -> None:
        assert [signal.getsignal(number) for number in numbers] == [signal.SIG_IGN] * 2

    monkeypatch.setattr(cli, "app", ignore)
    with restore_handlers():
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        cli.main()


class Trained:
    """A job that has ended well, and is shown to nobody."""

    config = SimpleNamespace(
        cluster=SimpleNamespace(nodes=1, standby=0), model=SimpleNamespace(profile="")
    )
    output = None

    def run(self, **_: object) -> SimpleNamespace:
        return SimpleNamespace(report={"iterations": []}, error=None, stopped=False)

    def end(self, _: object) -> None:
        """It has nothing to say."""

    def close(self) -> None:
        """See `end`."""


@pytest.mark.parametrize("number", LEAVE_SIGNALS)
def test_what_follows_training_is_interrupted_by_ctrl_c_alone(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that told a job to leave once more ended it before its report was written."""
    job, was_told = Path("job.toml"), []
    job.touch()

    def told(act: Callable[..., None], *arguments: object) -> None:
        os.kill(os.getpid(), number)
        was_told.append(number)
        act(*arguments)

    trained = Trained()
    monkeypatch.setattr(train_command, "named_job", lambda *_: trained)
    monkeypatch.setattr(train_command, "ConsoleDisplay", lambda _: trained)
    monkeypatch.setattr(command_line, "write", partial(told, write))
    monkeypatch.setattr(trained, "close", partial(told, trained.close))
    with restore_handlers():
        signal.signal(number, signal.default_int_handler)
        result = command("train", str(job), "--report", "report.json")
        assert signal.getsignal(number) is signal.default_int_handler

    assert result.exit_code == 0, result.output
    assert was_told == [number, number]
    assert json.loads(Path("report.json").read_text()) == {"iterations": []}


@pytest.mark.parametrize(
    ("error", "stopped", "code", "told"),
    [
        (None, False, 1, ""),
        (None, True, 130, ""),
        (InsufficientError("too few nodes"), False, 3, "planaria: too few nodes\n"),
        (TrainingError(2, "a traceback\n"), False, 1, "a traceback\nplanaria: the job's own code"),
    ],
)
def test_a_file_that_cannot_be_written_after_training_does_not_hide_how_the_job_ended(
    error: PlanariaError | None,
    stopped: bool,
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A disk may have filled up meanwhile."""
    job, trained = Path("job.toml"), Trained()
    ended: list[object] = []
    job.touch()
    result = SimpleNamespace(report={"iterations": []}, error=error, stopped=stopped)
    monkeypatch.setattr(train_command, "named_job", lambda *_: trained)
    monkeypatch.setattr(train_command, "ConsoleDisplay", lambda _: trained)
    monkeypatch.setattr(trained, "run", lambda **_: result)
    monkeypatch.setattr(trained, "end", ended.append)

    shown = command("train", str(job), "--report", "/dev/full")

    failed = "planaria: --report = '/dev/full': cannot be written: No space left on device\n"
    assert shown.exit_code == code, shown.output
    assert shown.stderr.startswith(failed + told)
    assert ended == [result]


@pytest.mark.parametrize(("writable", "remedy"), [("new", "this file is not"), ("old", "")])
def test_a_file_that_is_there_has_to_be_writable_and_its_directory_does_not(
    writable: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written anew in its place."""
    path, places = tmp_path / "old", {"new": tmp_path, "old": tmp_path / "old"}
    path.touch()
    monkeypatch.setattr(os, "access", lambda place, _: Path(place) == places[writable])

    if remedy:
        with pytest.raises(ConfigError, match=remedy):
            check_writable("--report", path)
    else:
        check_writable("--report", path)


@pytest.mark.parametrize(
    "words",
    [
        ("train", str(PACED), "--report", "x" * 300),
        ("train", str(PACED), "--timeline", "x" * 300),
        ("train", "x" * 300 + ".py"),
        ("events", "x" * 300),
    ],
)
def test_a_file_that_the_system_refuses_is_a_mistake_of_the_user(words: tuple[str, ...]) -> None:
    """As it does where the user may not enter a directory, which root may: no traceback."""
    shown = command(*words)

    assert shown.exit_code == 2, shown.exception
    assert "x" * 300 in shown.output


PACED_COPY = "paced.toml"  # A job whose profile is job.toml.
SCENARIO_FILE = "scenario.toml"
SCENARIO = """
[cluster]
nodes = 4
profile = "job.toml"
[failures]
kind = "trace"
path = "trace.csv"
"""


@pytest.mark.parametrize(
    "words",
    [
        ("train", "job.toml", "--report", "job.toml"),
        ("train", "job.toml", "--report", "./x.json", "--timeline", "x.json"),
        ("profile", "job.toml", "-o", "job.toml"),
        ("chaos", "job.toml", "--minutes", "1", "--report", "job.toml"),
        ("simulate", "job.toml", "--json", "job.toml"),
        ("simulate", "--replay", "job.toml", "--json", "link"),
        ("simulate", "--model", "job.toml", "--json", "job.toml"),
        ("train", PACED_COPY, "--report", "job.toml"),
        ("train", PACED_COPY, "--timeline", "link"),
        ("chaos", PACED_COPY, "--minutes", "1", "--report", "job.toml"),
        ("simulate", SCENARIO_FILE, "--json", "job.toml"),
        ("simulate", SCENARIO_FILE, "--json", "trace.csv"),
        ("simulate", SCENARIO_FILE, "--plot", "link.svg"),
    ],
)
def test_no_output_is_written_over_what_a_command_reads(words: tuple[str, ...]) -> None:
    """A scenario, or the report of a run of days, was gone without a word."""
    Path("job.toml").write_text("here")
    Path("trace.csv").write_text("time_s,event,nodes\n10,lost,3\n")
    for link in ("link", "link.svg"):
        Path(link).symlink_to("job.toml")
    if {PACED_COPY, SCENARIO_FILE} & set(words):
        Path("job.toml").write_bytes(PACED.with_name("paced-profile.json").read_bytes())
        Path(PACED_COPY).write_text(PACED.read_text().replace("paced-profile.json", "job.toml"))
        Path(SCENARIO_FILE).write_text(SCENARIO)
    before = {path: path.read_bytes() for path in (Path("job.toml"), Path("trace.csv"))}

    assert_mistake(command(*words), "the command reads or writes that file, too")
    assert {path: path.read_bytes() for path in before} == before


UNGUARDED = f"""
planaria.Job.from_file({str(PACED)!r}).train()
"""


def test_a_script_without_a_job_is_refused_and_one_that_raises_shows_its_own_frames() -> None:
    """A script is run before anything else is known."""
    Path("empty.py").touch()
    Path("raises.py").write_text("def fail():\n    return 1 / 0\n\nfail()\n")

    assert_mistake(train(Path("missing.py")), "script = 'missing.py'", "no such file")
    assert_mistake(train(Path("empty.py")), "script = 'empty.py'", "job = planaria.Job(")
    Path("trains.py").write_text("import planaria\n" + UNGUARDED)
    assert_mistake(train(Path("trains.py")), "script = 'trains.py'", "if __name__ ==")
    result = train(Path("raises.py"))
    assert result.exit_code == 1
    assert re.findall(r'File "(.*?)", line', result.stderr) == ["raises.py", "raises.py"]


def test_a_line_of_code_is_no_picture() -> None:
    """A slice in a traceback had an arrow in it, :end:."""
    line = "[1, 2, 3][1:end:2]"
    Path("raises.py").write_text(f"end = 'all'\n{line}\n")

    assert line in train(Path("raises.py")).stderr


def test_the_inputs_of_a_script_are_those_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the command is given, and wherever the script goes."""
    Path("project").mkdir()
    profile = Path("project/own.json").absolute()
    profile.write_bytes(PACED.with_name("paced-profile.json").read_bytes())
    Path("project/defines.py").write_text(
        "import os, planaria\n"
        "os.chdir('/')\n"
        "model = planaria.ModelConfig(kind='paced', profile='own.json')\n"
        "job = planaria.Job(planaria.JobConfig(model=model))\n"
    )
    monkeypatch.chdir(Path())  # It comes back in the end.
    job = named_job(Path("project/defines.py"), [])

    assert Path(job.config.model.profile) == profile
    with pytest.raises(ConfigError, match="there is no such file"):
        named_job(Path("project/defines.py"), [])  # Which is relative, too.


def test_a_stream_that_never_fails_writes_at_once_and_drops_what_nobody_reads() -> None:
    """Nothing of it is left to a flush that would fail, or come after what others write."""
    source_fd, target_fd = os.pipe()
    with os.fdopen(target_fd, "w", encoding="ascii") as stream:
        unfailing_stream = unfailing(stream)
        print("no end of a line \u00e9", end="", file=unfailing_stream)
        assert os.read(source_fd, 100) == b"no end of a line ?"
        os.close(source_fd)
        print("nobody reads", file=unfailing_stream, flush=True)
        unfailing_stream.close()
        assert not stream.closed
    print("closed", file=unfailing(None))
    in_memory = io.StringIO()
    assert unfailing(in_memory) is in_memory


@pytest.mark.parametrize(
    ("blame", "told"),
    [
        ("job", "the job's own code raised an error in rank 3; see above; there is no checkpoint"),
        ("node", "the worker of rank 3 failed again and again; see above; there is no checkpoint"),
    ],
)
def test_what_ended_a_job_is_not_called_its_own_code_where_a_process_was_killed(
    blame: Literal["job", "node"], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody would look for a mistake that is not there."""
    failure = WorkerFailed(node=1, rank=3, traceback="what it was\n", blame=blame)
    ended = Ended(ending=Ending.FAILED, reason="", failure=failure, nodes=(0,), epoch=2)

    with pytest.raises(typer.Exit) as left, exit_codes():
        raise failure_of(ended, tier_of("nowhere")) or AssertionError
    assert left.value.exit_code == 1
    assert capsys.readouterr().err == f"what it was\nplanaria: {told}\n"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--token-file", "t"), "--token-file = 't': it is of use only with --listen"),
        (("--wait-nodes", "5"), "--wait-nodes = 5.0: it is of use only with --listen"),
        (
            ("--listen", "127.0.0.1:0", "--nodes", "3:2"),
            "--nodes = '3:2': must be N, or MIN:MAX wi",
        ),
        (("--listen", "127.0.0.1:0", "--wait-nodes", "nan"), "--wait-nodes = nan: must be a"),
        (("--listen", "127.0.0.1:0", "--wait-nodes", "-1"), "--wait-nodes = -1.0: must be a"),
        (("--listen", "127.0.0.1:0", "--wait-nodes", "inf"), "--wait-nodes = inf: must be a"),
    ],
)
def test_options_of_a_head_that_mean_nothing_are_refused(
    options: tuple[str, ...], told: str
) -> None:
    """They were ignored, or never came to an end."""
    assert_mistake(command("train", str(PACED), *options), told)


def test_the_path_of_a_profile_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets were left out as markup, and a long path was broken."""
    measured = read_profile(PACED.with_name("paced-profile.json"))
    job = SimpleNamespace(profile=lambda: measured)
    monkeypatch.setattr(cli, "named_job", lambda *_: job)
    Path("job.toml").touch()
    path = Path("[fast]") / ("long" * 30) / "p.json"
    path.parent.mkdir(parents=True)

    assert command("profile", "job.toml", "-o", str(path)).output.endswith(f" layers to {path}\n")


@pytest.mark.parametrize("resumes", [(), ("--resume",)])
def test_who_wants_to_resume_never_begins_anew(
    resumes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--resume-if-saved beside it began a job again of which nothing was saved."""
    given: list[Listening] = []

    def run(**keys: Any) -> None:
        given.append(keys["listening"])
        raise ConfigError("", "", "that is enough")

    write_credentials(Path("token"))
    job = SimpleNamespace(config=JobConfig(), run=run)
    monkeypatch.setattr(train_command, "named_job", lambda *_: job)
    Path("job.toml").touch()
    where = ("--listen", "127.0.0.1:0", "--token-file", "token")

    assert command("train", "job.toml", *where, "--resume-if-saved", *resumes).exit_code == 2
    assert [listening.may_begin for listening in given] == [not resumes]


def test_chaos_needs_time_and_bits_that_can_be_compared() -> None:
    """Both are told before anything runs."""
    assert_mistake(command("chaos", str(PACED), "--minutes", "0"), "--minutes = 0")
    fast = ("--set", "training.deterministic=false")
    assert_mistake(
        command("chaos", str(PACED), *fast), "training.deterministic", "so it must be true"
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--nodes", "0"),
        ("--nodes", "-1"),
        ("--nodes", "1000000000000"),
        ("--devices-per-node", "0"),
        ("--microbatches", "0"),
        ("--microbatches", "1000000000000"),
        ("-f", "-1"),
        ("-f", "1000000000000"),
    ],
)
def test_plan_refuses_absurd_sizes_at_once(option: str, value: str) -> None:
    """Planning with them would not end."""
    given = ["--nodes", "5"] if option != "--nodes" else []

    result = command("plan", str(PACED.with_name("paced-profile.json")), *given, option, value)

    assert_mistake(result, value if option != "-f" else "")


def nearest_microbatches(stderr: str) -> int:
    """What a message says would do."""
    assert "--microbatches = " in stderr
    found = re.search(r"values that work: --microbatches (\d+)$", stderr)
    assert found, stderr
    return int(found[1])


@pytest.mark.parametrize(
    ("nodes", "failures", "microbatches", "expected"),
    [
        (5, 1, 0, 2),
        (5, 1, -5, 2),
        (5, 1, 1, 2),
        (5, 4, 3, 5),
        (5, 0, 0, 1),
        (5, 1, 65537, 65536),
        (5, 1, 1_000_000_000_000, 65536),
        (30, 1, 0, 3),  # A pipeline of 12 layers has no work for more than 12 nodes.
        (30, 1, 1, 3),
    ],
)
def test_plan_names_the_nearest_number_of_microbatches_that_does(
    nodes: int, failures: int, microbatches: int, expected: int
) -> None:
    """It is followed to the letter, and none between it and what was asked for works."""
    profile = str(PACED.with_name("paced-profile.json"))

    def planned(number: int) -> Result:
        options = ("--nodes", str(nodes), "-f", str(failures), "--json")
        return command("plan", profile, *options, "--microbatches", str(number))

    assert nearest_microbatches(planned(microbatches).stderr) == expected
    if expected < microbatches:
        return  # To plan for so many takes a while.
    assert planned(expected).exit_code == 0
    for number in range(max(0, microbatches), expected):
        assert planned(number).exit_code == 2


def test_plan_says_with_how_many_microbatches_all_nodes_could_work() -> None:
    """Two would do for f + 1 pipelines, but not for thirty nodes; both ways out are followed."""
    profile = str(PACED.with_name("paced-profile.json"))

    def planned(nodes: int, number: int) -> Result:
        options = ("--nodes", str(nodes), "--microbatches", str(number), "--json")
        return command("plan", profile, *options)

    result = planned(30, 2)

    assert_mistake(
        result, "--nodes = 30", "at most 24 nodes", "values that work: --microbatches 3 or more"
    )
    assert planned(24, 2).exit_code == 0
    assert planned(30, 3).exit_code == 0


@pytest.mark.parametrize(
    ("options", "refused", "remedies"),
    [
        (("gpt2", "--nodes", "4", "--microbatches", "1"), "--microbatches = 1: ", ()),
        (("gpt2", "--nodes", "2", "-f", "5"), "--nodes = 2: ", ("--nodes 6 or more", "-f 1")),
        (("gpt2", "--nodes", "2", "-f", "-1"), "-f = -1: ", ()),
        (("gpt3-175b", "--nodes", "4"), "--nodes = 4: ", ("--nodes 168 or", "--node-memory 0-3=")),
    ],
)
def test_plan_refuses_in_the_words_of_its_options(
    options: tuple[str, ...], refused: str, remedies: tuple[str, ...]
) -> None:
    """There is no job file: its keys are nothing that the user could set."""
    result = command("plan", *options)

    assert_mistake(result, f"planaria: {refused}", *remedies)
    assert not re.search(r"(cluster|training|resilience)\.", result.stderr)


def test_devices_of_a_node_may_share_a_layer() -> None:
    """Six nodes of 8 devices were refused, as 34 layers were thought to keep 34 devices at work."""
    options = ("--nodes", "6", "--devices-per-node", "8", "-f", "0", "--microbatches", "1")

    assert command("plan", "gpt3-2.7b", *options).exit_code == 0


@pytest.mark.parametrize(
    ("profile", "told"),
    [("llama2-7b", "Every iteration has room for a version."), ("gpt2", "No copies are sent")],
)
def test_plan_tells_what_copies_take(profile: str, told: str) -> None:
    """GPT-2 is in pipelines of one node each, which all hold every layer."""
    options = (profile, "--nodes", "8", "--copies", "2")

    assert told in command("plan", *options).stdout
    found = json.loads(command("plan", *options, "--json").stdout)["copies"]
    assert (found is None) == (profile == "gpt2")
    assert found is None or found["longer_s"] == 0.0 < found["sends_s"] < found["idle_s"]


def test_plan_tells_how_many_iterations_copies_take_that_do_not_fit(tmp_path: Path) -> None:
    """Links of a thousandth."""
    profile = msgspec.to_builtins(read_profile(Path("llama2-7b")))
    for link in profile["links"].values():
        link["bandwidth_bytes_per_s"] /= 1000
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps(profile))

    shown = " ".join(command("plan", str(slow), "--nodes", "8", "--copies", "2").stdout.split())

    assert re.search(r"A version takes \d+ iterations; if each .* would be .* s longer.", shown)


def test_plan_tells_what_survives_with_copies_and_without() -> None:
    """Four pipelines of two nodes: each layer has four holders, and a fifth node keeps a copy."""
    options = ("llama2-7b", "--nodes", "8", "--copies", "2")

    found = json.loads(command("plan", *options, "--json").stdout)["copies"]["survival"]
    shown = command("plan", *options).stdout

    assert [row["lost"] for row in found] == [1, 2, 3, 4]
    assert found[0]["live"] == found[0]["kept"] == 1.0
    assert all(row["live"] <= row["kept"] for row in found)
    assert any(row["live"] < row["kept"] for row in found)
    assert all(row["live_error"] == row["kept_error"] == 0.0 for row in found)
    for row in (row for row in found if row["live"] < 1.0):
        assert f"{100.0 * row['live']:.2f}%" in shown


def test_plan_refuses_more_copies_than_nodes() -> None:
    """A node keeps one copy of a layer."""
    assert_mistake(command("plan", "gpt2", "--nodes", "3", "--copies", "4"), "copies = 4", "1 to")


@pytest.mark.parametrize(
    ("max_nodes", "parts"),
    [
        ("3", ("--max-nodes = 3", "between 5 and 10000")),
        ("-1", ("--max-nodes = -1", "between 5 and 10000")),
        ("1000000", ("--max-nodes = 1000000",)),
        ("1000", ("--max-nodes = 1000", "at most 240 nodes", "--microbatches 84 or more")),
    ],
)
def test_plan_refuses_joins_that_cannot_be(max_nodes: str, parts: tuple[str, ...]) -> None:
    """Fewer nodes than there are, and more than could work."""
    profile = str(PACED.with_name("paced-profile.json"))

    assert_mistake(command("plan", profile, "--nodes", "5", "--max-nodes", max_nodes), *parts)


def test_plan_foresees_joins_of_nodes_as_the_profile_says_only() -> None:
    """Nobody knows the speed of a node that is not there yet."""
    profile = str(PACED.with_name("paced-profile.json"))
    options = ("--nodes", "5", "--max-nodes", "7", "--node-speed", "0=0.5")

    assert_mistake(command("plan", profile, *options), "--max-nodes = 7", "as the profile says")


GPT2_IN_24_GB = ("gpt2", "--nodes", "4", "--node-memory", "0-3=24e9")


def test_plan_says_what_each_stage_computes_again() -> None:
    """Where memory binds and the user lets the planner choose; 22.4 GiB hold no half of it else."""
    options = (*GPT2_IN_24_GB, "--recompute", "auto")
    shown = " ".join(command("plan", *options).stdout.split())
    assert "computed again in the backward, with the number of layers: 2 nodes: 0-13 none" in shown

    (found,) = json.loads(command("plan", *options, "--json").stdout)["templates"]
    first, last = found["stages"]
    assert set(first["recomputation"]) == {"none", "selective"}
    assert len(first["recomputation"]) == first["end_layer"]
    assert set(last.get("recomputation", ["none"])) == {"none"}


def test_plan_counts_what_is_computed_again_everywhere() -> None:
    """It takes longer and less memory; the table needs no words, for all layers do the same."""
    found = {}
    for mode in ("none", "selective", "full"):
        options = ("gpt2", "--nodes", "2", "--recompute", mode, "--json")
        content = json.loads(command("plan", *options).stdout)
        found[mode] = content["plan"]["iteration_s"], content["templates"][0]["peak_bytes"]
        assert "recomputation" not in content["templates"][0]["stages"][0]

    assert found["none"][0] < found["selective"][0] < found["full"][0]
    assert found["none"][1] > found["selective"][1] > found["full"][1]


def test_plan_refuses_to_guess_what_computing_again_costs() -> None:
    """A profile that was measured without has no costs of it."""
    paced = str(PACED.with_name("paced-profile.json"))
    for mode in ("auto", "full"):
        result = command("plan", paced, "--nodes", "2", "--recompute", mode)
        assert result.exit_code == 2
        assert "--recompute" in result.stderr
        assert "planaria profile measures it" in " ".join(result.stderr.split())
