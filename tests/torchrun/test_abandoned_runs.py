"""Runs of a loop of one's own that begin anew, or from an older version: the newest run counts."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from helpers.keepers import keepers
from planaria.errors import CheckpointError
from planaria.torchrun.memory_checkpointer import MemoryCheckpointer
from planaria.torchrun.restores import Restores


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Where keepers of the test have their sockets; they end with it."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield tmp_path / "place"
    dist.destroy_process_group()
    for process in keepers(tmp_path):
        process.kill()


@contextmanager
def run(place: Path, *, slot: int, num_slots: int, width: int = 2) -> Iterator[MemoryCheckpointer]:
    """A run of a model that every rank holds; its memory is there when it is over, for runs that
    have as many slots, or for those of fewer that read what is left."""
    model = nn.Linear(width, 1, bias=False)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LOCAL_RANK", str(slot))
        patched.setenv("LOCAL_WORLD_SIZE", str(num_slots))
        saver = MemoryCheckpointer(
            model, SGD(model.parameters()), directory=str(place), copies=1, idle_s=60.0
        )
    yield saver
    saver.wait_ended()
    saver._memory._slot.close()  # As if the rank were dead.
    saver.close()


def save(saver: MemoryCheckpointer, iteration: int) -> None:
    """A version whose weights are the number of its iteration."""
    (weight,) = saver._group._state.model.parameters()
    weight.data.fill_(float(iteration))
    assert saver.save(iteration)


def restored(saver: MemoryCheckpointer) -> tuple[int, list[float]]:
    first = saver.restore()
    (weight,) = saver._group._state.model.parameters()
    return first, weight.flatten().tolist()


def test_a_run_that_began_anew_is_restored_though_an_abandoned_one_came_further(
    place: Path,
) -> None:
    """The first run's node was not there when the second one began, and comes back for the third:
    its copy is of every shard, for the model is whole on each rank."""
    with run(place, slot=1, num_slots=2) as abandoned:
        save(abandoned, 9)
    with run(place, slot=0, num_slots=2) as anew:
        assert restored(anew)[0] == 0
        save(anew, 3)

    with run(place, slot=0, num_slots=1) as third:
        assert [label.age for label in third._group._restores.complete()] == [3, 9]
        assert restored(third) == (3, [3.0, 3.0])
        save(third, 4)
        third.wait_ended()
        save(third, 5)  # The version before is complete.
    with run(place, slot=0, num_slots=1) as fourth:
        assert [label.age for label in fourth._group._restores.complete()] == [5, 4]


def test_a_run_that_went_back_counts_also_where_its_clock_did(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows the run before, so no clock is needed."""
    with run(place, slot=0, num_slots=1) as first:
        save(first, 9)
    monkeypatch.setattr("planaria.torchrun.group_copies.time.time_ns", lambda: 0)
    with run(place, slot=0, num_slots=1) as second:
        save(second, 2)  # It began from scratch, and asked for no version.

    with run(place, slot=0, num_slots=1) as third:
        assert restored(third) == (2, [2.0, 2.0])


def test_a_run_that_goes_on_from_another_one_says_so_and_how_to_begin_from_scratch(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without `close` at the end a second start would have nothing to train, without a word."""
    with run(place, slot=0, num_slots=1) as first:
        assert first.restore() == 0
        save(first, 9)
        assert first.restore() == 9
    assert "to begin from scratch" not in caplog.text  # It is its own version.

    with run(place, slot=0, num_slots=1) as second:
        assert second.restore() == 9
    assert "restored iteration 9 of a run before this one" in caplog.text
    assert f"to begin from scratch, remove {place} on each machine" in caplog.text

    shutil.rmtree(place)
    with run(place, slot=0, num_slots=1) as third:
        assert third.restore() == 0


def test_memory_of_another_model_is_not_a_beginning_from_scratch(place: Path) -> None:
    """The first save would drop what it has; whoever wants that removes it."""
    with run(place, slot=0, num_slots=1) as first:
        save(first, 9)
    with run(place, slot=0, num_slots=1, width=3) as other:
        before = other._memory.versions()
        with pytest.raises(
            CheckpointError, match=r"parameter/weight has shape .* remove "
        ) as caught:
            other.restore()
        assert other._memory.versions() == before
    assert f"to begin anew, remove {place} on each machine" in str(caught.value)
    assert "iteration 9" in str(caught.value)

    with run(place, slot=0, num_slots=1) as again:
        assert restored(again) == (9, [9.0, 9.0])


@pytest.mark.parametrize("is_torn", [True, False])
def test_what_was_complete_once_is_not_dropped_by_a_run_that_lacks_a_part_of_it(
    is_torn: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run before was cut off in its second save, or restored a version, and saved none."""
    with run(place, slot=0, num_slots=1) as first:
        save(first, 9)
        first.wait_ended()
        arena = first._memory.arena
        (label,) = arena.versions()[0]
        if is_torn:
            later = label._replace(age=10)
            arena.begin(0, later, head=b"", num_bytes=10, piece_bytes=10)
    with run(place, slot=0, num_slots=1) as second:
        if not is_torn:
            assert restored(second) == (9, [9.0, 9.0])

    monkeypatch.setattr(Restores, "_shards", lambda _: {label: frozenset()})
    with (
        run(place, slot=0, num_slots=1) as third,
        pytest.raises(CheckpointError, match="iteration 9 lacks shards 0 of 1"),
    ):
        third.restore()
