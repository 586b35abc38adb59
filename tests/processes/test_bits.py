"""The result does not depend on how the model is spread: the same bits on any number of nodes.

Each case is a real job: agents and workers are processes, gradients cross sockets. `make test`
runs a sample of the shapes; all of them, for every family, are marked long.
"""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from helpers.jobs import (
    FAMILIES,
    NUM_LAYERS,
    digests,
    shapes,
    tiny_job,
    train_shape,
    with_profile,
)
from planaria.core.inject import parse_injection
from planaria.core.plan import PipelineTemplate, Recomputation, Stage
from planaria.estimator.peak_memory import peak_bytes
from planaria.job.planning import read_profile
from planaria.job.training_job import Job
from planaria.nodes.forkserver import ForkServer
from planaria.planner.recomputation import least_kept_profile

SIZES = (1, 2, 4, 5, 6, 7, 9)
SHAPES = [shape for size in SIZES for shape in shapes(size) if shape != (1,)]
SAMPLE = [((2, 3), "selective"), pytest.param((9,), "full", marks=pytest.mark.long)]
QUICK = {"gpt2", "llama", "sequential"}  # Families that are tried every time.

_single: dict[str, tuple[str, str]] = {}


def _expected(family: str, server: ForkServer, tmp: Path) -> tuple[str, str]:
    """The digests of one node that holds the whole model and keeps all activations."""
    if family not in _single:
        job = tiny_job(family, tmp / "single", activation_checkpointing="none")
        _single[family] = digests(train_shape(job, (1,), server))
    return _single[family]


def _spread(
    family: str, shape: tuple[int, ...], mode: Recomputation, server: ForkServer, tmp: Path
) -> tuple[str, str]:
    """The digests of the job on pipelines of these sizes, which must use every sample."""
    job = tiny_job(family, tmp / "spread", activation_checkpointing=mode)
    result = train_shape(job, shape, server)
    assert [record.samples for record in result.report.iterations] == [20] * 3
    return digests(result)


@pytest.mark.parametrize(("shape", "mode"), SAMPLE, ids=str)
def test_any_shape_gives_the_bits_of_one_process(
    shape: tuple[int, ...], mode: Recomputation, server: ForkServer, tmp_path: Path
) -> None:
    """GPT-2 with dropout, clipping and tied embeddings, and both kinds of checkpointing."""
    spread = _spread("gpt2", shape, mode, server, tmp_path)

    assert _expected("gpt2", server, tmp_path) == spread


@pytest.mark.parametrize(
    "family",
    [  # Qwen2 is a variant of Llama; test_oracle.py has BERT, and test_prefetch.py the encoder.
        pytest.param(family, marks=() if family in QUICK else pytest.mark.long)
        for family in FAMILIES
    ],
)
@pytest.mark.parametrize(
    ("shape", "mode"),
    [
        pytest.param((2,), "none", marks=pytest.mark.long, id="one pipeline, kept"),
        pytest.param((1, 2), "full", id="two pipelines, recomputed"),
    ],
)
def test_every_family_gives_the_bits_of_one_process(
    family: str, shape: tuple[int, ...], mode: Recomputation, server: ForkServer, tmp_path: Path
) -> None:
    """With and without activation checkpointing, on one pipeline and on two unequal ones."""
    spread = _spread(family, shape, mode, server, tmp_path)

    assert _expected(family, server, tmp_path) == spread


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", get_args(Recomputation))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_family_in_every_shape(
    family: str, mode: Recomputation, shape: tuple[int, ...], server: ForkServer, tmp_path: Path
) -> None:
    """All of it."""
    spread = _spread(family, shape, mode, server, tmp_path)

    assert _expected(family, server, tmp_path) == spread


def test_a_loss_that_only_fits_with_recomputation_is_survived(
    server: ForkServer, tmp_path: Path
) -> None:
    """Two nodes hold the model with all activations; the one that is left computes some again."""
    job = with_profile(tiny_job("gpt2", tmp_path, activation_checkpointing="auto"), server)
    profile = read_profile(Path(job.model.profile))
    whole = PipelineTemplate((Stage(0, NUM_LAYERS, 1),), 1)
    sizes = {"num_microbatches": 10, "gradient_copies": 3}
    (kept_bytes,) = peak_bytes(profile, whole, **sizes)
    (least_bytes,) = peak_bytes(least_kept_profile(profile), whole, **sizes)
    limit_bytes = (kept_bytes + least_bytes) // 2
    job = replace(
        job,
        cluster=replace(job.cluster, nodes=2, device_memory_bytes=limit_bytes),
        resilience=replace(job.resilience, failures_ahead=0),
        checkpoint=replace(job.checkpoint, copies=2, every=1, profile_iterations=0),
    )

    result = Job(job).train(server=server, injections=(parse_injection("kill:1@2"),))

    before, after = (result.report.iterations[index].predicted_peak_bytes for index in (0, 2))
    assert least_bytes < limit_bytes < kept_bytes
    assert before <= limit_bytes
    assert after <= limit_bytes
    assert result.report.final.nodes == (0,)
    assert _expected("gpt2", server, tmp_path) == digests(result)


def test_the_seed_reaches_parameters_order_and_dropout(server: ForkServer, tmp_path: Path) -> None:
    """Bits that never differ would prove nothing: another seed must give other ones."""
    job = tiny_job("gpt2", tmp_path, seed=8)

    assert digests(train_shape(job, (1, 2), server)) != _expected("gpt2", server, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_several_devices_in_a_node_give_the_same_bits(
    dtype: str, server: ForkServer, tmp_path: Path
) -> None:
    """Two nodes of three devices, planned by the planner, beside one node of one device."""
    alone = tiny_job("sequential", tmp_path / "alone", dtype=dtype)
    spread = tiny_job("sequential", tmp_path / "spread", dtype=dtype)
    cluster = replace(spread.cluster, nodes=2, devices_per_node=3)

    expected = digests(train_shape(alone, (1,), server))
    result = Job(replace(spread, cluster=cluster)).train(server=server)

    assert len(result.report.workers) == 6
    assert expected == digests(result)


def test_bfloat16_gives_the_same_bits_too(server: ForkServer, tmp_path: Path) -> None:
    """Parameters and activations in bfloat16, masters and sums in float32 and float64."""
    alone = tiny_job("gpt2", tmp_path / "alone", dtype="bfloat16")
    spread = tiny_job("gpt2", tmp_path / "spread", dtype="bfloat16")

    expected = digests(train_shape(alone, (1,), server))

    assert expected == digests(train_shape(spread, (1, 2), server))
    assert expected != _expected("gpt2", server, tmp_path)


def test_fast_mode_uses_the_same_samples_and_stays_close(
    server: ForkServer, tmp_path: Path
) -> None:
    """Float32 sums: the loss of the first iteration is equal to 1e-6, the samples are the same."""
    exact = train_shape(tiny_job("gpt2", tmp_path / "exact"), (1,), server)
    fast = train_shape(tiny_job("gpt2", tmp_path / "fast", deterministic=False), (1, 2), server)

    for one, other in zip(exact.report.iterations, fast.report.iterations, strict=True):
        assert one.sample_digest == other.sample_digest
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
    assert exact.report.iterations[0].loss == pytest.approx(fast.report.iterations[0].loss, 1e-6)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "shape"), [("gpt2", (2, 3)), ("sequential", (2,))])
def test_compiled_blocks_give_the_bits_of_one_process(
    family: str, shape: tuple[int, ...], server: ForkServer, tmp_path: Path
) -> None:
    """Every rank compiles the same code; what it computes differs from that of eager blocks. The
    second model has more layers than torch compiles of one code by default."""
    one = tiny_job(family, tmp_path / "one", compile=True)
    two = tiny_job(family, tmp_path / "two", compile=True)

    assert digests(train_shape(one, (1,), server)) == digests(train_shape(two, shape, server))
