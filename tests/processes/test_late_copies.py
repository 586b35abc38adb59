"""Jobs whose copies between device and host come as late as their marks permit."""

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.jobs import digests, tiny_job, train_shape
from planaria.nodes.forkserver import ForkServer


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_late_copies_change_no_bit(dtype: str, server: ForkServer, tmp_path: Path) -> None:
    """Hops, reductions and saves of two pipelines wait for what they read."""
    job = tiny_job("gpt2", tmp_path / "late", dtype=dtype)
    late = replace(job, cluster=replace(job.cluster, device="late"))
    expected = train_shape(tiny_job("gpt2", tmp_path / "single", dtype=dtype), (1,), server)

    assert digests(train_shape(late, (2, 3), server)) == digests(expected)
