"""What nodes without a head have saved by themselves becomes one whole save, or none."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from helpers.object_store import object_store
from planaria.checkpoint.disk.assembly import assemble, has_parts, lacks_parts
from planaria.checkpoint.disk.parts import (
    EpochMark,
    PartAnswer,
    RankPart,
    RunPlace,
    newest_run,
    next_run,
    remove_runs,
)
from planaria.checkpoint.disk.tiers import Manifest, Tier, tier_of

JOB = {"name": "tiny"}
NUM_LAYERS = 3


def always() -> bool:
    return True


def tensors_at(layer: int, age: int) -> dict[str, np.ndarray]:
    return {"parameter/weight": np.full(4, 100 * age + layer, dtype=np.float32)}


@dataclass
class Run:
    """A run whose head is lost."""

    tier: Tier
    name: str

    @property
    def place(self) -> RunPlace:
        return RunPlace(self.tier.storage, self.name)

    def mark(self, epoch: int, *nodes: int) -> None:
        self.place.write_mark(EpochMark(epoch=epoch, nodes=nodes, job=JOB))

    def answer(self, rank: int, *, epoch: int = 0) -> None:
        self.place.write_answer(PartAnswer(node=rank, rank=rank, epoch=epoch, since=-1))

    def save(
        self,
        rank: int,
        ages: Mapping[int, int],
        *,
        epoch: int = 0,
        since: int = -1,
        changed: float = 0.0,
    ) -> None:
        """Saves layers of these ages, by layer."""
        self.answer(rank, epoch=epoch)
        layers = tuple(
            self.place.write_layer(
                layer,
                {n: array + changed for n, array in tensors_at(layer, age).items()},
                age=age,
                rank=rank,
                may_write=always,
            )
            for layer, age in ages.items()
        )
        part = RankPart(
            node=rank, rank=rank, epoch=epoch, since=since, num_layers=NUM_LAYERS, layers=layers
        )
        self.place.write_part(part, may_write=always)


def begin(tier: Tier, run: str = "a1") -> Run:
    return Run(tier, next_run(tier.storage, run))


def test_the_newest_mark_is_that_of_the_highest_epoch(tmp_path: Path) -> None:
    """Its name comes first in the alphabet: the members of an older epoch were believed."""
    run = begin(tier_of(str(tmp_path)))
    run.mark(100_000, 0)
    run.mark(99_999, 0, 1)

    assert [mark.epoch for mark in run.place.marks()] == [99_999, 100_000]
    assert "without node 1" in run.place.refusal(node=1, epoch=99_999)


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return tier_of(str(tmp_path / "saves"))


@pytest.fixture
def run(tier: Tier) -> Run:
    """A run of two nodes."""
    made = begin(tier)
    made.mark(0, 0, 1)
    return made


def assert_assembled(tier: Tier, *, age: int, newer_than: int = -1) -> Manifest:
    """Assembles a save of that age; each layer in it is of that age."""
    assembly = assemble(tier, newer_than=newer_than)
    assert assembly.manifest is not None, assembly.text
    assert assembly.manifest.iteration == age
    assert tier.newest() == assembly.manifest
    for layer in range(NUM_LAYERS):
        array = tier.read_layer(assembly.manifest, layer)["parameter/weight"]
        assert array.tobytes() == tensors_at(layer, age)["parameter/weight"].tobytes()
    return assembly.manifest


def assert_refused(tier: Tier, *words: str) -> None:
    assembly = assemble(tier, newer_than=-1)
    assert assembly.manifest is None
    assert all(word in assembly.text for word in words), assembly.text
    assert tier.newest() is None


def test_parts_of_all_layers_become_a_save(tier: Tier, run: Run) -> None:
    run.save(0, {0: 17, 1: 17})
    run.save(1, {1: 17, 2: 17})

    manifest = assert_assembled(tier, age=17)
    assert (manifest.epoch, manifest.job) == (0, JOB)


def test_parts_in_an_object_store_become_a_save() -> None:
    with object_store() as url:
        tier = tier_of(url)
        run = begin(tier)
        run.mark(0, 0, 1)
        run.save(0, {0: 17, 1: 17})
        run.save(1, {1: 17, 2: 17})

        assert_assembled(tier, age=17)
        remove_runs(tier.storage)
        assert newest_run(tier.storage) == ""


def test_without_parts_nothing_is_made_or_said(tier: Tier) -> None:
    """A head that was killed with all its nodes has left its marks alone."""
    begin(tier).mark(0, 0, 1)

    assert assemble(tier, newer_than=-1).text == ""
    assert not has_parts(tier)


def test_a_missing_layer_is_named(tier: Tier, run: Run) -> None:
    run.save(0, {0: 17, 1: 17})
    run.answer(1)

    assert has_parts(tier)
    assert_refused(tier, "iteration 17: nobody saved layers 2")


def test_layers_of_two_ages_never_meet(tier: Tier, run: Run) -> None:
    run.save(0, {0: 18, 1: 18})
    run.save(1, {1: 17, 2: 17})

    assert_refused(tier, "iteration 18: nobody saved layers 2", "iteration 17")


def test_the_newest_age_of_all_layers_is_taken(tier: Tier, run: Run) -> None:
    """One rank has applied an iteration that no other knows to be committed."""
    run.save(0, {0: 17, 1: 17, 2: 17})
    run.save(1, {2: 18})

    assert_assembled(tier, age=17)


def test_a_save_that_is_as_new_is_left_alone(tier: Tier, run: Run) -> None:
    run.save(0, {0: 17, 1: 17, 2: 17})

    assembly = assemble(tier, newer_than=17)
    assert (assembly.manifest, assembly.text) == (None, "")


def test_parts_become_a_save_beside_a_damaged_one_of_that_name(tier: Tier, run: Run) -> None:
    """That one must not change, and the job could never be resumed."""
    for epoch in (0, 4):
        file = tier.write_layer(17, epoch, 0, tensors_at(0, 1))
        tier.publish(Manifest(iteration=17, epoch=epoch, job=JOB, layers=(file,)))
        layer = Path(tier.where(17, epoch)) / file.file
        layer.write_bytes(b"")
    run.save(0, {0: 17, 1: 17})
    run.save(1, {1: 17, 2: 17})

    assembly = assemble(tier, newer_than=-1)
    assert assembly.manifest is not None, assembly.text
    assert (assembly.manifest.iteration, assembly.manifest.epoch) == (17, 5)
    assert tier.newest() == assembly.manifest


def test_a_damaged_file_is_replaced_by_that_of_another_holder(tier: Tier, run: Run) -> None:
    run.save(0, {0: 17, 1: 17, 2: 17})
    run.save(1, {1: 17})
    damage(run, layer=1, rank=0)

    assert_assembled(tier, age=17)


def test_a_layer_whose_only_file_is_damaged_refuses_its_age(tier: Tier, run: Run) -> None:
    """Nothing of the version is left then, and an older age is taken if that is whole."""
    run.save(0, {0: 17, 1: 17, 2: 17})
    damage(run, layer=2, rank=0)

    assert_refused(tier, "layer-00002-17-00000", "does not hold what was written")
    assert tier.versions() == ()


def damage(run: Run, *, layer: int, rank: int) -> None:
    name = f"{run.name}/layer-{layer:05d}-17-{rank:05d}.safetensors"
    content = bytearray(run.tier.storage.read(name))
    content[-1] ^= 1
    run.tier.storage.write(name, bytes(content), may_write=always)


def test_a_damaged_part_is_not_used(tier: Tier, run: Run) -> None:
    run.save(0, {0: 17, 1: 17})
    run.save(1, {1: 17, 2: 17})
    run.tier.storage.write(f"{run.name}/part-00001", b'{"version": 1', may_write=always)

    assert_refused(tier, "part-00001 is damaged")


def test_holders_that_saved_different_parameters_are_not_believed(tier: Tier, run: Run) -> None:
    run.save(0, {0: 17, 1: 17, 2: 17})
    run.save(1, {1: 17}, changed=1.0)

    assert_refused(tier, "the holders of layer 1 saved different parameters")


def test_parts_of_an_evicted_minority_are_never_taken(tier: Tier, run: Run) -> None:
    """The others went on with the head, though they have saved nothing since."""
    run.mark(1, 0)
    run.save(1, {0: 17, 1: 17, 2: 17})

    assert_refused(tier, "epoch 1 began without nodes 1")


def test_an_epoch_that_a_node_has_heard_of_refuses_older_ones_without_a_mark(
    tier: Tier, run: Run
) -> None:
    """The head had no time to mark it."""
    run.save(1, {0: 17, 1: 17, 2: 17})
    run.answer(0, epoch=1)

    assert_refused(tier, "epoch 1 began without nodes 1")


def test_a_member_that_has_not_heard_of_the_newest_epoch_counts(tier: Tier, run: Run) -> None:
    """The head was lost while it told the members of that epoch."""
    run.mark(1, 0, 1)
    run.save(0, {0: 17, 1: 17}, epoch=1)
    run.save(1, {2: 17}, epoch=0)

    assert_assembled(tier, age=17)


def test_layers_from_before_the_job_went_back_are_not_taken(tier: Tier, run: Run) -> None:
    run.mark(2, 0, 1)
    run.save(0, {0: 17, 1: 17}, epoch=2, since=2)
    run.save(1, {2: 17}, epoch=1, since=-1)

    assert_refused(tier, "nobody saved layers 2")


def test_only_the_newest_of_two_runs_counts(tier: Tier, run: Run) -> None:
    run.save(0, {0: 30, 1: 30, 2: 30})
    second = begin(tier, "00")
    second.mark(0, 0, 1)
    assert assemble(tier, newer_than=-1).text == ""

    second.save(0, {0: 17, 1: 17, 2: 17})
    assert_assembled(tier, age=17)


def lacks(run: Run) -> bool:
    return lacks_parts(run.place.contents(), devices_per_node=1)


def test_parts_are_lacking_until_all_layers_are_there_at_the_newest_age(run: Run) -> None:
    """A head must not go on from an older save while nodes write a newer one."""
    assert not lacks(run)  # Nobody has begun to save.
    run.answer(0)
    assert lacks(run)
    run.save(0, {0: 17, 1: 17})
    assert lacks(run)  # Node 1 may come.
    run.save(1, {1: 17, 2: 17})
    assert not lacks(run)


def test_parts_are_not_lacking_if_all_members_have_written_theirs(run: Run) -> None:
    run.save(0, {0: 17, 1: 17})
    run.save(1, {1: 17})

    assert not lacks(run)


def test_parts_are_not_lacking_if_those_of_lost_nodes_are_not_needed(run: Run) -> None:
    run.save(0, {0: 17, 1: 17, 2: 17})

    assert not lacks(run)


def test_a_run_that_another_one_has_followed_must_write_nothing(tier: Tier, run: Run) -> None:
    assert run.place.refusal(node=1, epoch=0) == ""
    begin(tier, "00").mark(0, 0, 1)

    assert "another run" in run.place.refusal(node=1, epoch=0)


def test_a_run_that_has_ended_must_write_nothing(tier: Tier, run: Run) -> None:
    remove_runs(tier.storage)

    assert "ended" in run.place.refusal(node=1, epoch=0)


def test_a_node_without_which_an_epoch_has_begun_must_write_nothing(run: Run) -> None:
    run.mark(1, 0)

    assert "epoch 1 has begun without node 1" in run.place.refusal(node=1, epoch=0)
    assert run.place.refusal(node=0, epoch=0) == ""


def test_removing_the_runs_before_one_leaves_it_and_the_saves(tier: Tier, run: Run) -> None:
    run.save(0, {0: 17, 1: 17, 2: 17})
    assert_assembled(tier, age=17)
    second = begin(tier, "00")
    second.mark(0, 0, 1)
    remove_runs(tier.storage, before=second.name)

    assert newest_run(tier.storage) == second.name
    assert not any(name.startswith(run.name) for name in tier.storage.entries(""))
    assert tier.newest() is not None
