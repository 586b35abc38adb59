"""Ranks of a user's own loop that go on in their processes after others were killed."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from helpers.forked_ranks import order, tell, told_by_ranks
from helpers.keepers import keepers
from helpers.linked_ranks import wait_until
from helpers.machines import free_port
from planaria.errors import CheckpointError, ConfigError
from planaria.nodes.forkserver import ForkServer
from planaria.torchrun import group_copies, survivors
from planaria.torchrun.memory_checkpointer import MemoryCheckpointer
from planaria.transport.links import Links

pytestmark = pytest.mark.faults

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2_in_process.py"
NUM_RANKS = 4
TIMEOUT_S = 110.0
# Numbers of copies for which there is memory after a loss, and what ranks tell of survival then.
FEWER: list[tuple[int, list[object]]] = [(1, [[1.0, 0.0, 0.0]]), (0, [])]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Where keepers of the test have their sockets; they end with it."""
    yield tmp_path
    for process in keepers(tmp_path):
        process.kill()


def run(place: Path, *words: str, num_ranks: int = NUM_RANKS) -> tuple[str, list[int]]:
    """What ranks print, each on a node of its own, and their exit statuses."""
    port = str(free_port("127.0.0.1"))
    processes = [
        subprocess.Popen(
            [sys.executable, str(EXAMPLE), "--directory", str(place / f"node{rank}"), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )
        for rank in range(num_ranks)
    ]
    told = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    return "\n".join(told), [process.returncode for process in processes]


def assert_each_went_on(told: str, *numbers: int) -> None:
    """Each group began with what the one before had after that iteration."""
    begins = re.findall(r"^from (\d+) (\w+)", told, re.MULTILINE)
    after = dict(re.findall(r"^iteration (\d+) (\w+)", told, re.MULTILINE))
    assert [int(number) for number, _ in begins] == [0, *numbers], told
    for number, value in begins[1:]:
        assert after[number] == value


def sharded() -> tuple[nn.Linear, Optimizer]:
    """A model that the ranks of the moment share."""
    model = nn.Linear(6, 6, bias=False)
    fully_shard(model)
    return model, SGD(model.parameters(), lr=0.1)


def weight_of(model: nn.Linear) -> list[list[float]]:
    """The whole weight, on all ranks."""
    assert isinstance(model.weight, DTensor)
    rows: list[list[float]] = model.weight.full_tensor().tolist()
    return rows


def start(
    payload: bytes, num_ranks: int, *, copies: int = 3, is_one_node: bool = False, **more: Any
) -> tuple[int, MemoryCheckpointer]:
    """A rank with a node of its own, or one that all share, whose model is sharded."""
    called = order(payload)
    number, directory = called["number"], called["directory"]
    local, of, node = (number, num_ranks, 0) if is_one_node else (0, 1, number)
    os.environ |= {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(of)}
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=number,
        world_size=num_ranks,
        timeout=timedelta(seconds=600),
    )
    more |= {"copies": copies, "can_reform": True, "directory": f"{directory}/node{node}"}
    return number, MemoryCheckpointer(*sharded(), **more)


def refuse_above(copies_max: int, *_: Any, num_copies: int, **__: Any) -> None:
    """As if there were memory for so many copies."""
    if num_copies > copies_max:
        raise ConfigError("copies", num_copies, "make fewer copies")


def lose_the_first(payload: bytes, answer_fd: int) -> None:
    """Rank 0 kills itself after a save; the others wait for it in a collective."""
    torch.manual_seed(1)
    number, checkpointer = start(payload, 3, copies=2)
    model = checkpointer._group._state.model
    assert isinstance(model, nn.Linear)
    expected = weight_of(model)
    checkpointer.save(1)
    checkpointer.wait_ended()
    dist.barrier()
    if number == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    reason = ""
    try:
        dist.all_reduce(torch.zeros(1))
        dist.all_reduce(torch.zeros(1))
    except RuntimeError as error:
        reason = str(error)
    checkpointer.reform()
    torch.manual_seed(2)
    model, optimizer = sharded()
    checkpointer.use(model, optimizer)
    refuse = partial(refuse_above, order(payload)["copies_max"])
    pytest.MonkeyPatch().setattr(group_copies, "check_room_on_all", refuse)
    iteration = checkpointer.restore()
    answer: list[object] = [bool(reason), dist.get_rank(), iteration, weight_of(model) == expected]
    copier = checkpointer._group._copier
    if copier is not None:
        wait_until(lambda: copier.has_ended)  # Copies are made anew without anybody's asking.
        answer.append(checkpointer.survival)
    dist.barrier()
    checkpointer.close()
    tell(answer_fd, answer)


@pytest.mark.parametrize(
    ("copies_max", "told_of_copies"),
    [(2, [[1.0, 1.0, 0.0]]), *(pytest.param(n, t, marks=pytest.mark.long) for n, t in FEWER)],
)
def test_ranks_that_live_make_a_group_without_the_lost_one(
    copies_max: int, told_of_copies: list[object], server: ForkServer, place: Path
) -> None:
    """They learn of the loss at once, whatever the timeout of their group is; their shards are cut
    anew, and kept twice again before a step is taken, if there is memory for that."""
    told = told_by_ranks(
        server,
        f"{__name__}:lose_the_first",
        place,
        killed=[0],
        num_ranks=3,
        copies_max=copies_max,
    )

    assert told == [
        None,
        [True, 0, 1, True, *told_of_copies],
        [True, 1, 1, True, *told_of_copies],
    ]


def lose_two(payload: bytes, answer_fd: int) -> None:
    """Rank 0 kills itself after a save, and rank 1 while the others begin anew."""
    number, checkpointer = start(payload, 5)
    checkpointer.save(1)
    checkpointer.wait_ended()
    dist.barrier()
    if number == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    iteration = -1
    while iteration < 0:
        try:
            checkpointer.reform()
            model, optimizer = sharded()
            if number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            checkpointer.use(model, optimizer)
            iteration = checkpointer.restore()
        except RuntimeError:
            continue
    checkpointer.close()
    tell(answer_fd, [dist.get_world_size(), iteration])


@pytest.mark.long
def test_a_loss_while_ranks_begin_anew_is_one_more_loss(server: ForkServer, place: Path) -> None:
    """Before the second one is linked to the others; gloo tells only two of them."""
    told = told_by_ranks(server, f"{__name__}:lose_two", place, killed=[0, 1], num_ranks=5)

    assert told == [None, None, *[[3, 1]] * 3]


def lose_the_last(payload: bytes, answer_fd: int) -> None:
    """The second of two ranks kills itself after a save, of which there is one copy."""
    is_one_node = order(payload)["is_one_node"]
    saves = f"{order(payload)['directory']}/saves"
    number, checkpointer = start(
        payload, 2, copies=1, is_one_node=is_one_node, persist_directory=saves
    )
    model = checkpointer._group._state.model
    assert isinstance(model, nn.Linear)
    expected = weight_of(model)
    checkpointer.save(5)
    checkpointer.wait_ended()
    dist.barrier()
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    before = checkpointer._memory.versions()
    checkpointer.reform()
    torch.manual_seed(2)
    model, optimizer = sharded()
    checkpointer.use(model, optimizer)
    try:
        iteration = checkpointer.restore()
    except CheckpointError as error:
        tell(answer_fd, [str(error), checkpointer._memory.versions() == before])
        return
    answer: list[object] = [iteration, weight_of(model) == expected, checkpointer.persist()]
    answer.append(sorted(path.name for path in Path(saves).glob("5-*/*")))
    checkpointer.save(6)
    checkpointer.wait_ended()
    checkpointer.save(7)  # What was left of the lost rank is not needed any more.
    answer.append([label.age for label in checkpointer._memory.versions()[0]][:1])
    answer.append([label.age for label in checkpointer._memory.versions().get(1, ())])
    checkpointer.close()
    tell(answer_fd, answer)


def test_what_a_killed_rank_leaves_to_its_machine_is_read_there(
    server: ForkServer, place: Path
) -> None:
    """No memory of a rank that lives has it. It can be written behind memory from there, too."""
    told = told_by_ranks(server, f"{__name__}:lose_the_last", place, killed=[1], is_one_node=True)

    files = ["layer-00000.safetensors", "layer-00001.safetensors", "manifest.json"]
    assert told == [[5, True, True, files, [6], []], None]


def test_ranks_do_not_begin_from_scratch_where_a_restart_would_find_a_version(
    server: ForkServer, place: Path
) -> None:
    """The machine of the lost rank lives, and has its shard; the copies of others stay, too."""
    told = told_by_ranks(server, f"{__name__}:lose_the_last", place, killed=[1], is_one_node=False)

    assert told[0][1], told
    assert "start the script again" in told[0][0]


def kill_own_process(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lose_a_member(payload: bytes, answer_fd: int) -> None:
    """Rank 0 kills itself after a save, and rank 2 when it knows itself to be a member."""
    number, checkpointer = start(payload, 4)
    checkpointer.save(1)
    checkpointer.wait_ended()
    dist.barrier()
    if number == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 2:
        patch: Any = survivors
        patch._make_group = kill_own_process
    checkpointer.reform(timeout_s=10.0)
    checkpointer.use(*sharded())
    tell(answer_fd, [dist.get_world_size(), checkpointer.restore()])
    dist.barrier()
    checkpointer.close()


@pytest.mark.long
def test_a_loss_in_the_middle_of_a_reform_is_one_more_loss(server: ForkServer, place: Path) -> None:
    """The timeout of the group is ten minutes, and none waits for it; the next rank leads."""
    told = told_by_ranks(server, f"{__name__}:lose_a_member", place, killed=[0, 2], num_ranks=4)

    assert told == [None, [2, 1], None, [2, 1]]


def lose_one_without_links(payload: bytes, answer_fd: int) -> None:
    """Rank 0 kills itself when all know its address, and before it makes links."""
    patch: Any = pytest.MonkeyPatch()
    patch.setattr(group_copies, "_LINK_TIMEOUT_S", 30.0)
    if order(payload)["number"] == 0:
        patch.setattr(Links, "enter", kill_own_process)
    begin_s, reason = time.monotonic(), ""
    try:
        start(payload, 4)
    except RuntimeError as error:
        reason = str(error)
    tell(answer_fd, [bool(reason), time.monotonic() - begin_s < 20.0])


def test_a_rank_that_is_lost_before_it_is_linked_is_not_waited_for(
    server: ForkServer, place: Path
) -> None:
    """The lower rank of two connects, so the others would wait for rank 0 for ten minutes."""
    told = told_by_ranks(
        server, f"{__name__}:lose_one_without_links", place, killed=[0], num_ranks=4
    )

    assert told == [None, *[[True, True]] * 3]


def lose_none(payload: bytes, answer_fd: int) -> None:
    """All ranks raise an error of their own."""
    _, checkpointer = start(payload, 2)
    reason = ""
    try:
        checkpointer.reform()
    except CheckpointError as error:
        reason = str(error)
    dist.barrier()
    tell(answer_fd, reason)


def test_an_error_that_is_no_loss_is_not_taken_for_one(server: ForkServer, place: Path) -> None:
    """A loop would meet it again and again."""
    told = told_by_ranks(server, f"{__name__}:lose_none", place)

    assert told == ["no rank was lost, so the error had another reason"] * 2


@pytest.mark.long
@pytest.mark.parametrize("more", [(), ("--ddp",)])
def test_ranks_go_on_in_place_after_each_of_two_losses(more: tuple[str, ...], place: Path) -> None:
    """Among the lost ones is the first rank, which led the group. Copies were made anew between the
    two, so the shards of the second one have survived, too."""
    told, statuses = run(place, "--iterations", "9", "--dies", "3@3,0@6", *more)

    assert statuses == [-9, 0, 0, -9], told
    assert_each_went_on(told, 3, 6)
    assert len(re.findall(r"^recovered", told, re.MULTILINE)) == 2
    assert re.search(r"^survival 1.0000 1.0000 0.0000$", told, re.MULTILINE)


@pytest.mark.long
def test_what_all_ranks_lose_the_persistent_tier_has(place: Path) -> None:
    """Another number of ranks starts from it."""
    saves = ("--saves", str(place / "saves"), "--persist-every", "2")
    _, statuses = run(place, "--iterations", "9", *saves, "--dies", "0@5,1@5,2@5,3@5")
    assert statuses == [-9] * NUM_RANKS
    for process in keepers(place):
        process.kill()
        process.wait()

    told, statuses = run(place, "--iterations", "7", *saves, num_ranks=2)

    assert statuses == [0, 0], told
    begins = re.findall(r"^from (\d+)", told, re.MULTILINE)
    assert begins in (["2"], ["4"]), told
    assert re.search(r"^saved True$", told, re.MULTILINE)
