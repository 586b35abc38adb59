"""What the program of `planaria launch` for Ray does with exit codes, under a fake Ray."""

import errno
import itertools
import os
import re
import runpy
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from helpers.command import wait_for
from helpers.exit_codes import FAKE_PLANARIA, ROOT, TABLE, fake_scheduler, is_again, num_starts
from helpers.fake_ray import ActorLost, FakeMachine, FakeRef, RayFailed, current_node, fake_ray
from helpers.fake_scheduler import FakeScheduler
from planaria.nodes.machine import EXIT_AGAIN

CLUSTERS: Final = ROOT / "examples" / "clusters"


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeScheduler:
    return fake_scheduler(tmp_path / "fakes", monkeypatch)


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
        if text == "-":
            continue
        for name, value in ends.items():
            monkeypatch.setenv(name, value)
        for file in fakes.directory.glob("starts.*"):
            file.unlink()
        program = runpy.run_path(str(CLUSTERS / "cluster_ray.py"))
        program["main"].__globals__["PAUSE_S"] = 0.0
        ended = program["main"]()

        again = is_again(text) or text.startswith(("with the job", "elsewhere"))
        assert num_starts(fakes, rank) == (2 if again else 1)
        assert ended == (0 if again or rank else code)
    assert all("--rdzv-endpoint 127.0.0.1:20010" in words for words in fakes.words("planaria"))
    assert {options["max_restarts"] for options in started} == {-1}
    places = [options["scheduling_strategy"] for options in started[:4]]
    assert [len(group.bundles) for group, _ in places] == [2, 2, 1, 1]
    assert places[0][0].strategy == "STRICT_SPREAD"


def test_an_address_of_ipv6_is_bracketed(
    fakes: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """planaria refused HOST:PORT on each machine."""
    fakes.write("planaria", 'echo "$*" >> "$FAKES/planaria.words"')
    for name, text in fakes.environment.items():
        monkeypatch.setenv(name, text)
    fake_ray(monkeypatch)
    monkeypatch.setattr(sys.modules["ray.util"], "get_node_ip_address", lambda: "fd00::5")
    program = runpy.run_path(str(CLUSTERS / "cluster_ray.py"))
    machine = program["Machine"]()
    _, address, _ = machine.place(0)
    machine.run(0, 0, address)

    assert "--rdzv-endpoint [fd00::5]:20010 " in fakes.words("planaria")[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_actor_whose_memory_runs_out_is_started_again(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray ends it with an error that is no RayActorError, which ended the job on all machines."""
    fake_ray(monkeypatch)
    program = runpy.run_path(str(CLUSTERS / "cluster_ray.py"))
    runs: list[int] = []

    def end(own_rank: int) -> int:
        runs.append(own_rank)
        if own_rank == rank and runs.count(rank) == 1:
            raise RayFailed
        return 0

    monkeypatch.setattr(FakeMachine, "run_of", staticmethod(end))
    program["main"].__globals__.update(Machine=FakeMachine, PAUSE_S=0.0)

    assert program["main"]() == 0
    assert runs.count(rank) == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_whose_actor_cannot_be_reached_for_a_moment_is_not_made_twice(
    rank: int, fakes: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray takes it for lost, but it goes on. A second one waited behind it, and began a finished
    job once more, which is a mistake (2)."""
    fakes.write("planaria", FAKE_PLANARIA.replace("= 1 ] || exit 0", "= 1 ] || exit 2"))
    for name, text in {**fakes.environment, "HEAD": "0", "OTHER": "0"}.items():
        monkeypatch.setenv(name, text)
    fake_ray(monkeypatch)
    num_lost = itertools.count()

    def get(ref: FakeRef) -> Any:
        result = ref.get()
        if ref.rank == rank and next(num_lost) == 0:
            raise ActorLost
        return result

    monkeypatch.setattr(sys.modules["ray"], "get", get)
    program = runpy.run_path(str(CLUSTERS / "cluster_ray.py"))
    program["main"].__globals__["PAUSE_S"] = 0.0

    assert program["main"]() == 0
    assert next(num_lost) == 2
    assert num_starts(fakes, rank) == 1


@pytest.mark.parametrize(("num_min", "is_moved"), [(2, True), (4, False)])
def test_another_machine_gets_the_head_if_ray_has_no_room_for_its_own(
    num_min: int, is_moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program waited for ever for the address of the first machine, and the others, which had
    ended for want of a head, were not started again. Too few machines wait."""
    started = fake_ray(monkeypatch, head_ends_last=False)
    program = runpy.run_path(str(CLUSTERS / "cluster_ray.py"))
    runs: list[tuple[int, str]] = []
    num_waits = itertools.count()
    wait = sys.modules["ray"].wait

    def end(rank: int) -> int:
        runs.append((rank, current_node()))
        if len(runs) > 4:
            return 0
        if rank:
            return 3
        group, index = started[0]["scheduling_strategy"]
        group.node_ids[index] = ""
        raise ActorLost

    def find_room(refs: list[FakeRef], **options: Any) -> object:
        if next(num_waits) == 20:
            group, index = started[0]["scheduling_strategy"]
            group.node_ids[index] = "another"
        return wait(refs, **options)

    monkeypatch.setattr(sys.modules["ray"], "wait", find_room)
    monkeypatch.setattr(FakeMachine, "run_of", staticmethod(end))
    settings = {"MIN_MACHINES": num_min, "PAUSE_S": 0.0, "AWAY_S_MAX": 0.0}
    program["main"].__globals__.update(settings, Machine=FakeMachine)

    assert program["main"]() == 0
    assert sorted(rank for rank, _ in runs[:4]) == [0, 1, 2, 3]
    [head] = [node for rank, node in runs[4:] if rank == 0]
    assert (head != "another") == is_moved


def test_ray_runs_one_node_on_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of a machine with two was more than the loss of one. Ray has room for many actors on
    each of its three, and no machine for the fourth."""
    fake_ray(monkeypatch, num_nodes=3)
    program = runpy.run_path(str(CLUSTERS / "cluster_ray.py"))
    nodes: list[str] = []

    def end(_: int) -> int:
        nodes.append(current_node())
        return 0

    monkeypatch.setattr(FakeMachine, "run_of", staticmethod(end))
    program["main"].__globals__["Machine"] = FakeMachine

    assert program["main"]() == 0
    assert sorted(nodes) == ["node-0", "node-1", "node-2"]


def test_a_machine_to_which_ray_brings_a_second_actor_keeps_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first group's actors can be asked for nowhere else; the other one is, and finds room on
    the machine that is back."""
    started = fake_ray(monkeypatch, num_nodes=4)
    program = runpy.run_path(str(CLUSTERS / "cluster_ray.py"))
    runs: list[tuple[int, str]] = []
    wait = sys.modules["ray"].wait

    def end(rank: int) -> int:
        runs.append((rank, current_node()))
        if rank == 1 and len(runs) == 2:
            group, index = started[1]["scheduling_strategy"]
            group.node_ids[index] = "node-2"
            raise ActorLost
        return 0

    def keep_open(refs: list[FakeRef], **options: Any) -> object:
        for ref in refs:
            if ref.rank == 2 and len(started) == 4:
                ref.can_end = lambda: False
        return wait(refs, **options)

    monkeypatch.setattr(sys.modules["ray"], "wait", keep_open)
    monkeypatch.setattr(FakeMachine, "run_of", staticmethod(end))
    program["main"].__globals__.update(Machine=FakeMachine, PAUSE_S=0.0)

    assert program["main"]() == 0
    assert runs[:2] == [(3, "node-3"), (1, "node-1")]
    assert sorted(runs[2:]) == [(0, "node-0"), (1, "node-2"), (2, "node-1")]


def test_a_machine_of_ray_that_can_start_no_process_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Too many processes run there, or its disk is full; other machines train on."""
    fake_ray(monkeypatch)
    program = runpy.run_path(str(CLUSTERS / "cluster_ray.py"))
    program["main"].__globals__["PAUSE_S"] = 0.0

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError

    monkeypatch.setattr(subprocess, "Popen", refuse)

    assert program["Machine"]().run(0, 1, "127.0.0.1") == program["UNFIT"]


@pytest.mark.parametrize("code", [3, None])
def test_many_machines_of_ray_that_end_at_once_are_started_again_after_one_pause(
    code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was a pause for each, so that the first of 60 gave up before the head, the last one to
    be started again, was there."""
    fake_ray(monkeypatch, head_ends_last=False)
    program = runpy.run_path(str(CLUSTERS / "cluster_ray.py"))
    running: list[list[int]] = []  # The ranks that were waited for, in the order of their starts.
    pauses: list[float] = []
    wait = sys.modules["ray"].wait

    def note_ranks(refs: list[FakeRef], **options: Any) -> object:
        running.append([ref.rank for ref in refs])
        return wait(refs, **options)

    num_runs = Counter[int]()

    def end(rank: int) -> int:
        num_runs[rank] += 1
        if num_runs[rank] > 1:
            return 0
        if code is None:
            raise ActorLost
        return code

    monkeypatch.setattr(FakeMachine, "run_of", staticmethod(end))
    monkeypatch.setattr(sys.modules["ray"], "wait", note_ranks)
    clock = SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic)
    program["main"].__globals__.update(MAX_MACHINES=100, Machine=FakeMachine, time=clock)

    assert program["main"]() == 0
    assert pauses == [program["PAUSE_S"]]
    assert running[-1] == [*range(100)]


@pytest.mark.parametrize(("end_s", "told"), [(0, ""), (50, r"\d\d")])
def test_a_machine_that_ray_drains_is_told_so_once_and_is_to_run_elsewhere(
    end_s: int, told: str, fakes: FakeScheduler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It leaves in peace, with 0, which would count as done. Ray refuses to answer at times, and a
    disk is full."""
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
    replace, num_refused = os.replace, itertools.count()

    def refuse_first(source: str, target: str) -> None:
        if next(num_refused) == 0:
            raise OSError(errno.ENOSPC, "no space left")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse_first)
    machine = program["Machine"]()

    assert machine.run(0, 1, "127.0.0.1") == EXIT_AGAIN
    assert re.fullmatch(told, (tmp_path / "told").read_text())


@pytest.mark.parametrize("end", ["os.kill(child.pid, 9)", "os.kill(os.getpid(), 9)"])
def test_a_command_whose_actor_ends_is_told_to_end(
    end: str, fakes: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saves the job, or its node leaves. When a job is stopped, Ray kills the children of its
    actors; where memory runs out, the kernel kills an actor."""
    fakes.write(
        "planaria",
        'trap \'touch "$FAKES/was_told"; exit\' TERM; touch "$FAKES/ready"\n'
        "while :; do sleep 0.01; done",
    )
    fake_ray(monkeypatch)
    program = runpy.run_path(str(CLUSTERS / "cluster_ray.py"))
    started: list[list[str]] = []

    def note_words(words: list[str], **_: object) -> SimpleNamespace:
        started.append(words)
        return SimpleNamespace(poll=lambda: 0)

    monkeypatch.setattr(subprocess, "Popen", note_words)
    program["Machine"]().run(0, 1, "127.0.0.1")
    monkeypatch.undo()
    actor = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen(sys.argv[1:])\n"
        "while not os.path.exists(os.environ['FAKES'] + '/ready'): pass\n" + end
    )
    subprocess.run([sys.executable, "-c", actor, *started[0]], env=fakes.environment, check=False)

    wait_for((fakes.directory / "was_told").exists, what="the command is told to end")


def test_an_unfit_machine_of_ray_is_asked_less_and_less_often(
    fakes: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray may have no other one. One that ran for long may have found no head: that passes."""
    fakes.write("planaria", "exit 75")
    for name, text in fakes.environment.items():
        monkeypatch.setenv(name, text)
    fake_ray(monkeypatch)
    program = runpy.run_path(str(CLUSTERS / "cluster_ray.py"))
    pauses: list[float] = []
    times_s = itertools.count()  # Between two looks at the clock a second passes.
    clock = SimpleNamespace(
        sleep=pauses.append, monotonic=lambda: float(next(times_s)), time=time.time
    )
    program["main"].__globals__["time"] = clock
    machine = program["Machine"]()
    codes = [machine.run(number, 1, "127.0.0.1") for number in range(7)]
    times_s = itertools.count(step=1000)
    codes.append(machine.run(7, 1, "127.0.0.1"))

    assert codes == [program["UNFIT"]] * 7 + [EXIT_AGAIN]
    assert pauses == [10.0, 30.0, 70.0, 150.0, 300.0, 300.0, 300.0, 0.0]


def run_program(
    program: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    *,
    end: Callable[[int], int],
    may_end: Callable[[int], Callable[[], bool] | None],
    machine: type[FakeMachine] = FakeMachine,
    step_s: int = 10,
) -> int:
    """The exit code of the program.

    Args:
        end: returns what a run of a rank returns.
        may_end: returns what says whether the run of a rank may end now; None: it may.
        step_s: seconds that pass between two looks at the clock.
    """
    wait = sys.modules["ray"].wait

    def wait_for_some(refs: list[FakeRef], **options: Any) -> object:
        for ref in refs:
            ref.can_end = may_end(ref.rank) or ref.can_end
        return wait(refs, **options)

    times_s = itertools.count(step=step_s)
    clock = SimpleNamespace(sleep=lambda _: None, monotonic=lambda: float(next(times_s)))
    monkeypatch.setattr(sys.modules["ray"], "wait", wait_for_some)
    monkeypatch.setattr(FakeMachine, "run_of", staticmethod(end))
    program["main"].__globals__.update(Machine=machine, time=clock)
    return int(program["main"]())


@pytest.mark.parametrize(("rank", "num_nodes"), [(1, 5), (3, 5), (1, 4), (3, 4)])
def test_another_machine_of_ray_takes_the_place_of_an_unfit_one(
    rank: int, num_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its actor stayed on it, and was asked again without end, though Ray had room elsewhere. If
    there is none, it is asked again after a while: what was wrong may have passed. Ray has room for
    one actor on each machine, which a bundle of the first group keeps."""
    started = fake_ray(monkeypatch, head_ends_last=False, num_nodes=num_nodes, num_actors_max=1)
    program = runpy.run_path(str(CLUSTERS / "cluster_ray.py"))
    runs: list[tuple[int, str]] = []
    unfit = f"node-{rank}"

    def end(own_rank: int) -> int:
        runs.append((own_rank, current_node()))
        is_unfit = current_node() == unfit and runs.count((own_rank, unfit)) <= 2
        if is_unfit:
            return int(program["UNFIT"])
        return 3 if [own_rank for own_rank, _ in runs].count(rank) == 3 else 0

    def may_end(own_rank: int) -> Callable[[], bool] | None:
        others = {0, 1, 2, 3} - {rank}
        if own_rank not in others:
            return None
        return lambda: [each for each, _ in runs].count(rank) == 4

    assert run_program(program, monkeypatch, end=end, may_end=may_end) == 0
    place = "node-4" if num_nodes == 5 else unfit
    assert [node for own_rank, node in runs if own_rank == rank] == [unfit, unfit, place, place]
    # A machine is not given back for an end that is no fault of its own.
    assert len(started) == (5 if num_nodes == 5 else 6)


def test_machines_of_ray_that_are_all_unfit_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the place of saves does not answer."""
    started = fake_ray(monkeypatch, head_ends_last=False, num_nodes=10)
    program = runpy.run_path(str(CLUSTERS / "cluster_ray.py"))
    num_runs = Counter[int]()

    def end(rank: int) -> int:
        num_runs[rank] += 1
        return int(program["UNFIT"]) if rank and num_runs[rank] < 5 else 0

    def may_end(rank: int) -> Callable[[], bool] | None:
        return None if rank else lambda: num_runs.total() == 15

    assert run_program(program, monkeypatch, end=end, may_end=may_end) == 0
    assert len(started) == 4


def test_a_trouble_that_all_machines_of_ray_had_once_keeps_none_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine whose newest run goes on for long is at work, whatever its first run found."""
    started = fake_ray(monkeypatch, head_ends_last=False, num_nodes=5, num_actors_max=1)
    program = runpy.run_path(str(CLUSTERS / "cluster_ray.py"))
    runs: list[tuple[int, str]] = []

    def num_runs(rank: int) -> int:
        return [own_rank for own_rank, _ in runs].count(rank)

    def end(rank: int) -> int:
        runs.append((rank, current_node()))
        is_unfit = rank and (num_runs(rank) == 1 or current_node() == "node-1")
        return int(program["UNFIT"]) if is_unfit else 0

    def may_end(rank: int) -> Callable[[], bool] | None:
        is_held = rank in (0, 2, 3) and (not rank or num_runs(rank))
        return (lambda: (1, "node-4") in runs) if is_held else None

    assert run_program(program, monkeypatch, end=end, may_end=may_end, step_s=100) == 0
    assert len(started) == 5


def test_a_place_in_ray_is_sought_anew_though_its_actor_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each failed call began the five minutes again."""
    started = fake_ray(monkeypatch, head_ends_last=False, num_nodes=5, num_actors_max=1)
    program = runpy.run_path(str(CLUSTERS / "cluster_ray.py"))
    runs: list[tuple[int, str]] = []

    def end(rank: int) -> int:
        runs.append((rank, current_node()))
        return int(program["UNFIT"]) if current_node() == "node-1" and len(started) == 4 else 0

    class Lost(FakeMachine):
        def place(self, number: int) -> tuple[str, str, bool]:
            if current_node() == "node-4":  # It is lost, and Ray has no other room.
                raise ActorLost
            return super().place(number)

    def may_end(rank: int) -> Callable[[], bool] | None:
        if rank not in (0, 2, 3):
            return None
        return lambda: len(started) == 6 and (1, "node-1") in runs[2:]

    code = run_program(program, monkeypatch, end=end, may_end=may_end, machine=Lost, step_s=20)
    assert code == 0
    assert [node for rank, node in runs if rank == 1] == ["node-1"] * 3
