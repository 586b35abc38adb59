"""A job goes on from any of its checkpoints, on any number of nodes, to the same bits."""

import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from helpers.jobs import digests, tiny_job, train_shape
from planaria.checkpoint.disk.tiers import tier_of
from planaria.core.job import JobConfig
from planaria.errors import ConfigError, InsufficientError
from planaria.job.training_job import Job, SilentDisplay, TrainingResult
from planaria.nodes.forkserver import ForkServer

NUM_ITERATIONS = 6


@pytest.fixture(scope="module")
def saved(
    server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[JobConfig, TrainingResult]:
    """A job that was never interrupted, with a save after every iteration."""
    directory = tmp_path_factory.mktemp("saved")
    job = tiny_job(
        "gpt2",
        directory,
        iterations=NUM_ITERATIONS,
        schedule={"name": "cosine", "warmup_iterations": 2},
    )
    job = replace(job, checkpoint=replace(job.checkpoint, persist_every=1, keep=0))
    return job, train_shape(job, (2, 3), server)


def _copy(job: JobConfig, version: str, directory: Path) -> JobConfig:
    """The job with a directory that holds one version alone."""
    target = directory / "checkpoints"
    shutil.copytree(Path(job.checkpoint.directory) / version, target / version)
    return replace(job, checkpoint=replace(job.checkpoint, directory=str(target)))


@pytest.mark.parametrize(
    ("version", "shape"),
    [
        ("1-0", (1,)),
        pytest.param("3-0", (4,), marks=pytest.mark.long),
        pytest.param("4-0", (1, 2, 4), marks=pytest.mark.long),
        pytest.param("5-0", (2, 3), marks=pytest.mark.long),
    ],
)
def test_resuming_gives_the_bits_of_the_run_without_a_stop(
    version: str,
    shape: tuple[int, ...],
    saved: tuple[JobConfig, TrainingResult],
    server: ForkServer,
    tmp_path: Path,
) -> None:
    """Fewer nodes, more nodes, other stage boundaries; moments and ages come along."""
    job, uninterrupted = saved
    result = train_shape(_copy(job, version, tmp_path), shape, server, resume=True)

    first = int(version.partition("-")[0])
    iterations = uninterrupted.report.iterations[first:]
    assert digests(uninterrupted) == digests(result)
    assert [r.sample_digest for r in iterations] == [
        r.sample_digest for r in result.report.iterations
    ]
    assert [r.loss for r in iterations] == [r.loss for r in result.report.iterations]
    assert result.report.final.epoch == 1
    assert result.report.final.iteration == NUM_ITERATIONS


def test_every_layer_changes_in_every_iteration(
    saved: tuple[JobConfig, TrainingResult],
) -> None:
    """A layer whose gradient were lost would keep its file's hash."""
    tier = tier_of(saved[0].checkpoint.directory)
    manifests = [version.manifest for version in reversed(tier.versions())]

    assert len(manifests) == NUM_ITERATIONS
    for before, after in pairwise(manifests):
        assert before is not None
        assert after is not None
        for old, new in zip(before.layers, after.layers, strict=True):
            assert old.xxh3_128 != new.xxh3_128, (after.iteration, new.layer)


def test_tied_embeddings_stay_equal_where_both_live(
    saved: tuple[JobConfig, TrainingResult],
) -> None:
    """Embedding and head are saved by different nodes, each with its own copy."""
    tier = tier_of(saved[0].checkpoint.directory)
    manifest = tier.newest()
    assert manifest is not None
    first, last = tier.read_layer(manifest, 0), tier.read_layer(manifest, 9)

    assert (first["parameter/transformer.wte.weight"] == last["parameter/lm_head.weight"]).all()
    for name in ("exp_avg", "exp_avg_sq", "step"):
        one = first[f"optimizer/transformer.wte.weight/{name}"]
        assert (one == last[f"optimizer/lm_head.weight/{name}"]).all()


class _Notes(SilentDisplay):
    """Keeps what the user is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def _damaged(job: JobConfig, version: str, layer: int, damage: str) -> Path:
    path = Path(job.checkpoint.directory) / version / f"layer-{layer:05d}.safetensors"
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-1] ^= 1
    path.write_bytes(content[:-8] if damage == "truncate" else content)
    if damage == "manifest":
        (path.parent / "manifest.json").unlink()
    return path


@pytest.mark.parametrize(
    "damage",
    ["flip", *(pytest.param(name, marks=pytest.mark.long) for name in ("truncate", "manifest"))],
)
def test_a_damaged_checkpoint_is_named_and_an_older_one_used(
    damage: str, saved: tuple[JobConfig, TrainingResult], server: ForkServer, tmp_path: Path
) -> None:
    """A flipped bit shows when nodes read; then the next one turns out to be no better."""
    job, uninterrupted = _copy(saved[0], "1-0", tmp_path), saved[1]
    for version in ("2-0", "3-0"):
        _copy(saved[0], version, tmp_path)
    paths = [_damaged(job, "3-0", 4, damage), _damaged(job, "2-0", 0, damage)]
    told = _Notes()

    result = train_shape(job, (2, 2), server, resume=True, display=told)

    assert digests(uninterrupted) == digests(result)
    assert [r.iteration for r in result.report.iterations] == list(range(1, NUM_ITERATIONS))
    named = [any(path.parent.name in note for note in told.notes) for path in paths]
    assert all(named), told.notes
    tier = tier_of(job.checkpoint.directory)
    newest = tier.newest()
    assert newest is not None
    assert newest.iteration == NUM_ITERATIONS


def test_a_damaged_checkpoint_alone_ends_the_job_by_name(
    saved: tuple[JobConfig, TrainingResult], server: ForkServer, tmp_path: Path
) -> None:
    """One flipped bit in one layer's file: nothing is trained on it, and it stays on disk."""
    job = _copy(saved[0], "3-0", tmp_path)
    path = _damaged(job, "3-0", 4, "flip")

    with pytest.raises(InsufficientError, match=r"layer-00004\.safetensors"):
        train_shape(job, (2,), server, resume=True)
    assert path.exists()
    assert tier_of(job.checkpoint.directory).versions()[0].reason.endswith("set aside")


def test_a_checkpoint_of_another_job_is_refused(
    saved: tuple[JobConfig, TrainingResult], server: ForkServer, tmp_path: Path
) -> None:
    """Another seed would train on other samples: the bits could not be the same."""
    job = _copy(saved[0], "3-0", tmp_path)
    other = replace(job, training=replace(job.training, seed=8))

    with pytest.raises(ConfigError, match="seed = 8"):
        Job(other).train(resume=True, server=server)
