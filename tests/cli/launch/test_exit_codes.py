"""What the files of `planaria launch` do with exit codes and signals, under fake schedulers."""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest
import yaml

from helpers.command import command, wait_for
from helpers.exit_codes import ROOT, TABLE, fake_scheduler, is_again, num_starts
from helpers.fake_scheduler import FakeScheduler
from planaria.nodes.machine import EXIT_AGAIN, EXIT_DONE, EXIT_LEFT, EXIT_UNFINISHED

CLUSTERS: Final = ROOT / "examples" / "clusters"
HOSTS: Final = "examples/clusters/hosts.txt"
HEADS: Final = [(code, head) for code, head, _ in TABLE if head != "-"]  # No head ends with others.


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeScheduler:
    return fake_scheduler(tmp_path / "fakes", monkeypatch)


def run_script(fakes: FakeScheduler, words: list[str], directory: Path, **variables: str) -> int:
    """The exit code of a script of two machines."""
    environment = {**fakes.environment, "NUM_MACHINES": "2", **variables}
    script = subprocess.run(
        words, env=environment, cwd=directory, timeout=60, capture_output=True, check=False
    )
    return script.returncode


def told_script(
    fakes: FakeScheduler,
    directory: Path,
    variables: Mapping[str, str],
    *,
    files: tuple[str, ...] = ("ready",),
) -> int:
    """The exit code of the script for Slurm, which is told to leave once there are these files."""
    script = subprocess.Popen(
        ["bash", str(CLUSTERS / "cluster.sbatch")],
        env={**fakes.environment, **variables},
        cwd=directory,
        start_new_session=True,
    )
    try:
        for file in files:
            wait_for((fakes.directory / file).exists, what=f"there is {file}")
        script.send_signal(signal.SIGUSR1)
        return script.wait(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)


def write_hosts(directory: Path, text: str) -> None:
    """Writes the file of machines that the script of ssh in a directory reads."""
    (directory / "examples" / "clusters").mkdir(parents=True)
    (directory / HOSTS).write_text(text)


def test_the_table_has_the_codes_that_the_code_ends_with() -> None:
    """An agent's are defined beside it; a command's others are those of cli/main.py."""
    codes = [code for code, _, _ in TABLE]

    assert {EXIT_DONE, 1, 2, EXIT_UNFINISHED, EXIT_AGAIN, EXIT_LEFT, 130} <= set(codes)
    assert len(codes) == len(set(codes)) == 9


@pytest.mark.parametrize(("code", "text"), HEADS)
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
    assert "--mem=0 --cpu-bind=none --no-kill -K0 --wait=0" in fakes.words("srun")[0]
    assert not list(tmp_path.glob(".cluster-*"))


@pytest.mark.parametrize(("num_requeues", "program"), [(0, "scontrol"), (20, "scancel")])
def test_slurm_queues_no_other_task_of_an_array_again(
    num_requeues: int, program: str, fakes: FakeScheduler, tmp_path: Path
) -> None:
    """One task has the number of the array, which Slurm takes for all its tasks.

    The last machine sees that the first one is lost; then the head ends.
    """
    fakes.write("sinfo", "echo down")
    fakes.write("scancel", 'echo "$*" >> "$FAKES/scancel.words"')
    fakes.write("planaria", f'until [ -e "$FAKES/{program}.words" ]; do sleep 0.01; done; exit 3')
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "5"}
    array["SLURM_RESTART_COUNT"] = str(num_requeues)
    run_script(fakes, ["bash", str(CLUSTERS / "cluster.sbatch")], tmp_path, watch_s="0.1", **array)

    assert {*fakes.words(program)} == ({"requeue 7_5"} if program == "scontrol" else {"7_5"})
    assert {*fakes.words("scontrol")} <= {"requeue 7_5"}


@pytest.mark.parametrize(("code", "text"), [(code, other) for code, _, other in TABLE])
@pytest.mark.parametrize("on", ["slurm", "ssh"])
def test_a_machine_is_started_again_if_its_exit_code_asks_for_it(
    on: str, code: int, text: str, fakes: FakeScheduler, tmp_path: Path
) -> None:
    """The head goes on meanwhile."""
    write_hosts(tmp_path, "127.0.0.1\n# none\nme@127.0.0.2 rack-2\n")
    again = is_again(text) or (on == "ssh" and text.startswith("with the job"))
    file = "cluster.sbatch" if on == "slurm" else "cluster-ssh.sh"
    other = {"HEAD": "0", "OTHER": str(code), "STARTS": "2" if again else "1"}
    ended = run_script(fakes, ["bash", str(CLUSTERS / file)], tmp_path, **other)

    assert (ended, num_starts(fakes, 0), num_starts(fakes, 1)) == (0, 1, 2 if again else 1)
    if on == "ssh":
        own = next(words for words in fakes.words("planaria") if "--node-rank 1" in words)
        assert re.search(r"--rdzv-endpoint 127.0.0.1:2\d{4} --domain rack-2", own)


@pytest.mark.parametrize(("code", "text"), HEADS)
def test_ssh_acts_on_the_exit_code_of_the_head(
    code: int, text: str, fakes: FakeScheduler, tmp_path: Path
) -> None:
    write_hosts(tmp_path, "127.0.0.1\n127.0.0.2\n")
    codes = {"HEAD": str(code), "OTHER": "0", "STARTS": "1"}
    ended = run_script(fakes, ["bash", str(CLUSTERS / "cluster-ssh.sh")], tmp_path, **codes)

    assert (ended, num_starts(fakes, 0)) == ((0, 2) if is_again(text) else (code, 1))


def test_jobs_over_ssh_have_ports_of_their_own(fakes: FakeScheduler, tmp_path: Path) -> None:
    """Two of a user on the same machines: agents of one joined the head of the other."""
    ports = set()
    for name, directory in (("a", "x"), ("a", "y"), ("b", "x")):
        place = tmp_path / directory
        (place / "examples" / "clusters").mkdir(parents=True, exist_ok=True)
        (place / HOSTS).write_text("127.0.0.1\n")
        words = ("--nodes", "1", "--on", "ssh", "--hosts", HOSTS, "--name", name, "--dry-run")
        (place / name).write_text(command("launch", "examples/cluster.toml", *words).output)
        for file in fakes.directory.glob("starts.*"):
            file.unlink()
        assert run_script(fakes, ["bash", name], place, HEAD="0") == 0
        ports |= set(re.findall(r"127.0.0.1:(2\d{4})", fakes.words("planaria")[-1]))

    assert len(ports) == 3


def test_ssh_waits_for_a_machine_whose_connection_was_lost(
    fakes: FakeScheduler, tmp_path: Path
) -> None:
    """It runs still, and was asked to begin again until the script gave up; its code counts."""
    write_hosts(tmp_path, "127.0.0.1\n127.0.0.2\n")
    connect = (fakes.directory / "ssh").read_text()
    fakes.write("real-ssh", connect.partition("\n")[2])
    fakes.write(
        "ssh",
        'case "$*" in *rank=0*) echo >> "$FAKES/calls" ;; esac\n'
        'case "$*:$(wc -l < "$FAKES/calls")" in *rank=0*:1)\n'
        '    cat > "$FAKES/input"; real-ssh "$@" < "$FAKES/input" & \n'
        '    until [ -e "$FAKES/starts.0" ]; do sleep 0.01; done; exit 255 ;;\n'
        "esac\n"
        'exec real-ssh "$@"',
    )
    (fakes.directory / "calls").touch()
    fakes.write(
        "planaria",
        'case "$*" in *"--node-rank 1"*) exit 0 ;; esac\n'
        'echo start >> "$FAKES/starts.0"\n'
        'until [ "$(wc -l < "$FAKES/calls")" = 2 ]; do sleep 0.01; done; sleep 0.2; exit 130',
    )

    ended = run_script(fakes, ["bash", str(CLUSTERS / "cluster-ssh.sh")], tmp_path)

    assert (ended, num_starts(fakes, 0)) == (130, 1)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("failure", ['exec bash -c "${*/cd /cd /missing}"', "exit 127"])
def test_ssh_waits_for_a_machine_that_boots_until_its_directories_are_there(
    failure: str, rank: int, fakes: FakeScheduler, tmp_path: Path
) -> None:
    """It can be reached some seconds before; its machine was given up then, and the job if it was
    the first one."""
    write_hosts(tmp_path, "127.0.0.1\n127.0.0.2\n")
    connect = (fakes.directory / "ssh").read_text()
    fakes.write("real-ssh", connect.partition("\n")[2])
    fakes.write(
        "ssh",
        f'case "$*" in *rank={rank}*) echo >> "$FAKES/calls" ;; *) exec real-ssh "$@" ;; esac\n'
        f'case $(wc -l < "$FAKES/calls") in 1) exit 255 ;; 2) shift 7; {failure} ;; esac\n'
        'exec real-ssh "$@"',
    )
    codes = {"HEAD": "0", "OTHER": "0", "STARTS": "1"}
    ended = run_script(fakes, ["bash", str(CLUSTERS / "cluster-ssh.sh")], tmp_path, **codes)

    assert (ended, num_starts(fakes, rank)) == (0, 1)
    assert len((fakes.directory / "calls").read_text()) == 3


def test_ssh_ends_no_job_whose_first_machine_it_cannot_reach(
    fakes: FakeScheduler, tmp_path: Path
) -> None:
    """The others train on. After 20 lost connections they were told to stop."""
    write_hosts(tmp_path, "127.0.0.1\n127.0.0.2\n")
    connect = (fakes.directory / "ssh").read_text()
    lost = 'case "$*" in *rank=0*) echo >> "$FAKES/calls"; [ "$(wc -l < "$FAKES/calls")" -gt 25 ]'
    fakes.write("ssh", f"{lost} || exit 255 ;; esac\n{connect}")
    fakes.write(
        "planaria",
        'case "$*" in *"--node-rank 0"*) touch "$FAKES/is_done"; exit 0 ;; esac\n'
        "trap 'exit 0' TERM\n"
        'until [ -e "$FAKES/is_done" ]; do sleep 0.01; done',
    )

    assert run_script(fakes, ["bash", str(CLUSTERS / "cluster-ssh.sh")], tmp_path) == 0
    assert not [words for words in fakes.words("ssh") if "kill" in words]


def test_ssh_begins_nothing_without_its_first_machine(fakes: FakeScheduler, tmp_path: Path) -> None:
    """It was tried for ever, and the others waited for a head. They are started by hand again."""
    write_hosts(tmp_path, "127.0.0.1\n127.0.0.2\n")
    fakes.write("ssh", 'case "$*" in *127.0.0.1*) exit 255 ;; esac\necho >> "$FAKES/ssh.words"')
    script = subprocess.run(
        ["bash", str(CLUSTERS / "cluster-ssh.sh")],
        env=fakes.environment,
        cwd=tmp_path,
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )

    assert script.returncode == EXIT_AGAIN
    assert "the first machine, 127.0.0.1, cannot be reached" in script.stderr
    assert not fakes.words("ssh")


def test_ssh_reads_a_file_of_machines_as_people_write_it(
    fakes: FakeScheduler, tmp_path: Path
) -> None:
    """A line's end of Windows was taken for a part of a name, and so was a remark for the domain's.

    The head has the name or address that ssh takes for it, which other machines may not know.
    """
    write_hosts(tmp_path, "\t# all\r\nme@a rack-1 # old\r\n\t\r\nb rack-2\r\n")
    connect = (fakes.directory / "ssh").read_text()
    fakes.write("ssh", f'[ "$1" != -G ] || exec echo "hostname fd00::${{2#me@}}"\n{connect}')
    run_script(fakes, ["bash", str(CLUSTERS / "cluster-ssh.sh")], tmp_path, HEAD="0", OTHER="0")
    starts = [words for words in fakes.words("planaria") if "--domain rack-1 ex" in words]

    assert {words.split()[0] for words in fakes.words("ssh")} == {"me@a", "b"}
    assert re.search(r"--rdzv-endpoint \[fd00::a\]:2\d{4} ", starts[0])


def test_ssh_names_the_machine_that_has_no_planaria(fakes: FakeScheduler, tmp_path: Path) -> None:
    """The words of a shell, "command not found", came from any of them."""
    write_hosts(tmp_path, "127.0.0.1\n127.0.0.2\n")
    script = subprocess.run(
        ["bash", str(CLUSTERS / "cluster-ssh.sh")],
        env={**fakes.environment, "HEAD": "0", "OTHER": "127", "STARTS": "1"},
        cwd=tmp_path,
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )

    assert script.returncode == 0
    assert "127.0.0.2: planaria could not be started there (exit code 127)" in script.stderr


def test_slurm_queues_a_job_again_that_its_signal_has_stopped(
    fakes: FakeScheduler, tmp_path: Path
) -> None:
    """At most 20 times."""
    for num_requeues, words in ((19, ["requeue 7"]), (20, ["requeue 7"])):
        for file in fakes.directory.glob("starts.*"):
            file.unlink()
        (fakes.directory / "ready").unlink(missing_ok=True)
        variables = {"NUM_MACHINES": "2", "HEAD": "told", "OTHER": "0"}
        variables["SLURM_RESTART_COUNT"] = str(num_requeues)
        ended = told_script(fakes, tmp_path, variables)

        assert (ended, fakes.words("scontrol")) == (0 if num_requeues < 20 else 130, words)


@pytest.mark.parametrize(
    "ends",
    [
        # Memory is shortest while the job is saved.
        "trap 'kill -KILL $$' TERM; ready; wait_told",
        "trap 'exit 75' TERM; ready; wait_told",
        # Slurm signals all processes, and this one cannot take it yet.
        "trap 'kill -USR1 $$' TERM; ready; wait_told",
        # The signal comes in the pause after a crash.
        "exit 137",
    ],
)
def test_slurm_queues_a_job_again_whose_head_was_killed_when_told_to_leave(
    ends: str, fakes: FakeScheduler, tmp_path: Path
) -> None:
    """Nothing started it again, and the job ended for good. No pause is made then."""
    words = 'ready() { touch "$FAKES/ready"; }; wait_told() { tail -f /dev/null & wait; }\n'
    fakes.write("planaria", words + ends)
    fakes.write("sleep", f"{words}ready; exec tail -f /dev/null")
    ended = told_script(fakes, tmp_path, {"NUM_MACHINES": "1"})

    assert (ended, fakes.words("scontrol")) == (0, ["requeue 7"])


def test_slurm_queues_a_job_again_whose_head_ends_again_and_again(
    fakes: FakeScheduler, tmp_path: Path
) -> None:
    """Another machine may do; after 20 tries on this one the job ended for good."""
    fakes.write("planaria", 'echo start >> "$FAKES/starts.0"; exit 75')
    words = ["bash", str(CLUSTERS / "cluster.sbatch")]

    assert run_script(fakes, words, tmp_path, NUM_MACHINES="1") == 0
    assert (num_starts(fakes, 0), fakes.words("scontrol")) == (20, ["requeue 7"])


def test_slurm_does_not_queue_a_job_again_that_srun_refuses(
    fakes: FakeScheduler, tmp_path: Path
) -> None:
    """It would be refused 20 times more."""
    fakes.write("srun", 'echo "srun: fatal: mutually exclusive" >&2; exit 5')
    words = ["bash", str(CLUSTERS / "cluster.sbatch")]

    assert run_script(fakes, words, tmp_path) == 5
    assert not fakes.words("scontrol")


def test_slurm_queues_a_job_again_whose_head_was_killed_with_its_shell(
    fakes: FakeScheduler, tmp_path: Path
) -> None:
    """Nobody says an exit code then. The memory of the machine may have run out."""
    fakes.write("planaria", '[ "$SLURM_PROCID" != 0 ] || kill -KILL "$PPID"')
    words = ["bash", str(CLUSTERS / "cluster.sbatch")]

    assert run_script(fakes, words, tmp_path) == 0
    assert fakes.words("scontrol") == ["requeue 7"]


@pytest.mark.parametrize(
    ("state", "is_lost"),
    [
        *(("down", True), ("down*", True), ("drained", True), ("drained*", True), ("fail", True)),
        *(("allocated", False), ("draining", False), ("draining*", False), ("failing*", False)),
    ],
)
def test_slurm_queues_a_job_again_whose_first_machine_it_has_lost(
    state: str, is_lost: bool, fakes: FakeScheduler, tmp_path: Path
) -> None:
    """One that was drained before is never called down. What the job holds is draining."""
    fakes.write("sinfo", f"echo >> \"$FAKES/sinfo.words\"; echo '{state}'")
    fakes.write(
        "planaria",
        'until [ "$(cat "$FAKES/sinfo.words" 2> /dev/null | wc -l)" -ge 3 ]; do sleep 0.01; done\n'
        "exit 1",
    )
    words = ["bash", str(CLUSTERS / "cluster.sbatch")]

    assert run_script(fakes, words, tmp_path, watch_s="0.01") == 1
    assert {*fakes.words("scontrol")} == ({"requeue 7"} if is_lost else set())


@pytest.mark.parametrize("code", [0, 3])
def test_slurm_watches_the_first_machine_also_where_an_agent_has_ended(
    code: int, fakes: FakeScheduler, tmp_path: Path
) -> None:
    """Its machine was drained, or it gave up a lost head sooner than Slurm did: nobody was left to
    queue the job again."""
    fakes.write("sinfo", '[ ! -e "$FAKES/is_lost" ] || echo down')
    fakes.write(
        "planaria",
        f'[ "$SLURM_PROCID" = 0 ] || {{ touch "$FAKES/has_left"; exit {code}; }}\n'
        'until [ -e "$FAKES/has_left" ]; do sleep 0.01; done; sleep 0.5; touch "$FAKES/is_lost"\n'
        'for try in {1..500}; do [ ! -e "$FAKES/scontrol.words" ] || break; sleep 0.01; done\n'
        "exit 1",
    )
    words = ["bash", str(CLUSTERS / "cluster.sbatch")]

    assert run_script(fakes, words, tmp_path, watch_s="0.1") == 1
    assert {*fakes.words("scontrol")} == {"requeue 7"}


@pytest.mark.parametrize("name", ["child", "srun"])
def test_a_signal_that_comes_before_its_process_is_noted_is_passed_on(
    name: str, fakes: FakeScheduler, tmp_path: Path
) -> None:
    """The shell is slow between two lines; the head would train on until Slurm kills it."""
    slow = tmp_path / "slow"
    slow.write_text(
        "set -o functrace\n"
        f'trap \'[[ $BASH_COMMAND != {name}=?! ]] || [ -e "$FAKES/slept" ] || '
        '{ touch "$FAKES/slept"; sleep 1; }\' DEBUG\n'
    )
    variables = {"NUM_MACHINES": "1", "HEAD": "told", "BASH_ENV": str(slow)}
    ended = told_script(fakes, tmp_path, variables, files=("slept", "ready"))

    assert (ended, fakes.words("scontrol")) == (0, ["requeue 7"])


def pod_command() -> list[str]:
    """What a pod runs."""
    *_, job = yaml.safe_load_all((CLUSTERS / "cluster.yaml").read_text())
    [container] = job["spec"]["template"]["spec"]["containers"]
    return [*container["command"], *container["args"]]


def action_of_kubernetes(fakes: FakeScheduler, *, index: int, code: int) -> str:
    """What becomes of a pod: what its command makes of the code, and the policy of that."""
    *_, job = yaml.safe_load_all((CLUSTERS / "cluster.yaml").read_text())
    variables = {"HEAD": str(code), "OTHER": str(code), "JOB_COMPLETION_INDEX": str(index)}
    ended = run_script(fakes, pod_command(), fakes.directory, **variables)
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        if ended in rule.get("onExitCodes", {"values": []})["values"]:
            return str(rule["action"])
    return "Count" if ended else "Again" if num_starts(fakes, index) > 1 else "Succeed"


@pytest.mark.parametrize(("code", "head", "other"), TABLE)
def test_kubernetes_acts_on_exit_codes(
    code: int, head: str, other: str, fakes: FakeScheduler
) -> None:
    """What counts is made again; a head that was stopped was stopped by its pod's end."""
    actions = [action_of_kubernetes(fakes, index=index, code=code) for index in (0, 1)]

    is_stopped = "again if the scheduler sent it" in head
    is_other_again = is_again(other) or other.startswith("with the job")
    is_elsewhere = other.startswith("elsewhere")
    expected = "Ignore" if is_elsewhere else "Again" if is_other_again else "FailIndex"
    if head != "-":
        again = "Again" if is_again(head) else "Count" if is_stopped else "FailJob"
        assert actions[0] == ("Succeed" if code == 0 else again)
    assert actions[1] == ("Succeed" if code == 0 else expected)


@pytest.mark.parametrize(
    ("index", "code", "pauses", "ended"),
    [
        (0, 3, "10 " * 10, 3),
        (0, 137, "10 " * 10, 137),
        (1, 3, "10 " * 10, 3),
        # The machine may be unfit, and another pod would come to it again.
        (1, 75, "10 20 40 80 160 320 600 600 600 600 ", 75),
    ],
)
def test_a_pod_keeps_its_machine_for_ten_tries(
    index: int, code: int, pauses: str, ended: int, fakes: FakeScheduler
) -> None:
    """A pod that ended gave its machine to another one, which has no head then."""
    fakes.write("planaria", f"exit {code}")
    fakes.write("sleep", 'echo -n "$1 " >> "$FAKES/sleep.words"')
    variables = {"JOB_COMPLETION_INDEX": str(index), "restart_s": ""}

    assert run_script(fakes, pod_command(), fakes.directory, **variables) == ended
    assert fakes.words("sleep") == [pauses]


@pytest.mark.parametrize(("index", "num_failures", "ended"), [(0, 19, 3), (0, 20, 1), (1, 20, 3)])
def test_the_last_pod_of_the_head_fails_the_job(
    index: int, num_failures: int, ended: int, fakes: FakeScheduler
) -> None:
    """Its index alone failed, and the other machines waited for a head for ever."""
    fakes.write("planaria", "exit 3")
    variables = {"JOB_COMPLETION_INDEX": str(index), "NUM_FAILURES": str(num_failures)}

    assert run_script(fakes, pod_command(), fakes.directory, **variables) == ended


@pytest.mark.parametrize(
    ("index", "code", "ended"),
    [
        *((3, 0, EXIT_LEFT), (3, 1, EXIT_LEFT), (3, 130, EXIT_LEFT)),
        *((0, 0, 0), (0, 1, 1), (0, 130, EXIT_LEFT)),
    ],
)
def test_a_pod_that_is_told_to_go_is_made_again(
    index: int, code: int, ended: int, fakes: FakeScheduler
) -> None:
    """However it ends: its index would be done or failed, and no machine would take its place.
    That the job is done, or never will be, the head alone can say."""
    fakes.write(
        "planaria",
        f"trap 'exit {code}' TERM; touch \"$FAKES/ready\"; while :; do sleep 0.01; done",
    )

    assert code_of_pod_told_to_go(fakes, index, at="ready") == ended


def test_a_pod_is_told_to_go_between_two_tries(fakes: FakeScheduler) -> None:
    """It ends at once; Kubernetes would kill it after a minute."""
    fakes.write("planaria", "exit 75")
    fakes.write("sleep", 'touch "$FAKES/sleeps"; exec tail -f /dev/null')

    assert code_of_pod_told_to_go(fakes, 3, at="sleeps") == EXIT_LEFT


def code_of_pod_told_to_go(fakes: FakeScheduler, index: int, *, at: str) -> int:
    """The exit code of a pod that is told to go once there is a file."""
    environment = {**fakes.environment, "JOB_COMPLETION_INDEX": str(index)}
    pod = subprocess.Popen(pod_command(), env=environment, start_new_session=True)
    try:
        wait_for((fakes.directory / at).exists, what="the command is started")
        pod.send_signal(signal.SIGTERM)
        return pod.wait(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pod.pid, signal.SIGKILL)
