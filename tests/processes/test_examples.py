"""Examples that newcomers copy: a kill in each, and the bits of one process."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.jobs import digests
from planaria.core.inject import parse_injection
from planaria.job.planning import fork_server
from planaria.job.training_job import Job

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = ("training.iterations=6", "training.global_batch_size=24")


def _trained(job_file: Path, place: Path, *, evaluates: bool = True) -> None:
    """Trains the job on one node, and on four of which one is killed; compares the results."""
    jobs = [
        Job.from_file(
            job_file,
            overrides=[
                *SHORT,
                *(("evaluation.every=4",) if evaluates else ()),
                f"cluster.nodes={nodes}",
                f"resilience.failures_tolerated={min(1, nodes - 1)}",
                f'checkpoint.directory="{place / str(nodes)}"',
            ],
        )
        for nodes in (1, 4)
    ]
    server = fork_server(jobs[0].config, search_path=jobs[0].search_path)
    try:
        alone = jobs[0].train(server=server)
        killed = jobs[1].train(server=server, injections=[parse_injection("kill:1@3.backward")])
    finally:
        server.close()

    assert digests(alone) == digests(killed)
    assert len(killed.report.final.nodes) == 3
    iterations = [record.iteration for record in killed.report.evaluations]
    assert iterations == ([4, 6] if evaluates else [])


@pytest.mark.long
def test_a_model_of_nanogpts_structure(tmp_path: Path) -> None:
    """Its own text in .bin files, tied embeddings, dropout; twenty lines were added to it."""
    shutil.copytree(EXAMPLES / "nanogpt", tmp_path / "nanogpt")
    script = tmp_path / "nanogpt" / "prepare.py"
    subprocess.run([sys.executable, str(script)], check=True, capture_output=True)

    _trained(tmp_path / "nanogpt" / "job.toml", tmp_path)

    source = (tmp_path / "nanogpt" / "model.py").read_text()
    added = [line for line in source.partition("# -- For planaria")[2].splitlines()[1:] if line]
    assert len(added) <= 20


@pytest.mark.long
def test_adapters_of_a_small_llama(tmp_path: Path) -> None:
    """They alone are trained."""
    if importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed")

    _trained(EXAMPLES / "lora.toml", tmp_path, evaluates=False)


@pytest.mark.long
def test_a_vision_transformer_on_digits(tmp_path: Path) -> None:
    """Images and classes, evaluated on digits that it has not seen."""
    if importlib.util.find_spec("sklearn") is None:
        pytest.skip("scikit-learn is not installed")

    _trained(EXAMPLES / "digits" / "vit.toml", tmp_path)
