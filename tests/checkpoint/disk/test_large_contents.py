"""Contents go to a store in parts, and never as one copy of all."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.object_store import object_store
from planaria.checkpoint.disk.storage import storage_of

PART_BYTES = 5 << 20
PARTS_MAX = 10_000  # Limit of S3 and of its like.


@pytest.mark.parametrize("is_directory", [True, False])
def test_a_content_of_any_size_is_read_as_it_was_written(
    is_directory: bool, tmp_path: Path
) -> None:
    """None of a store's parts ends where the runs of its bytes do."""
    numbers = np.random.default_rng(1)
    with object_store() as url:
        storage = storage_of(str(tmp_path) if is_directory else url)
        for num_bytes in (0, 1, PART_BYTES, PART_BYTES + 1, 23 << 20):
            content = numbers.integers(0, 256, num_bytes, dtype=np.uint8)
            runs = tuple(run.data for run in np.array_split(content, 3))

            storage.write("1-0/content", runs, may_write=lambda: True)
            assert storage.read("1-0/content") == content.tobytes()

            storage.write("1-0/content", content.tobytes()[::-1], may_write=lambda: True)
            assert storage.read("1-0/content") == content.tobytes()[::-1]


def test_a_content_is_not_copied_as_a_whole_before_a_store_gets_it(tmp_path: Path) -> None:
    """Memory has a shard three times then, and may have no room for a fourth one."""
    content = np.ones(64 << 20, dtype=np.uint8)
    storage = storage_of(f"file://{tmp_path}")
    tracemalloc.start()
    try:
        storage.write("1-0/content", (content.data, content.data), may_write=lambda: True)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert (tmp_path / "1-0" / "content").stat().st_size == 2 * len(content)
    assert peak_bytes < 16 << 20


@pytest.mark.parametrize(
    ("num_runs", "chunk_bytes"),
    [(10_000, PART_BYTES), (10_001, PART_BYTES + 525), (100_000, 10 * PART_BYTES)],
)
def test_a_content_goes_in_no_more_parts_than_a_store_takes(
    num_runs: int, chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store refused a content above 48.8 GiB, after as many parts as it takes. One buffer is all
    of the content here, and nothing is sent."""
    sizes: list[int] = []

    def put(_store: Any, _name: str, _source: Any, *, chunk_size: int) -> None:
        sizes.append(chunk_size)

    storage = storage_of(f"file://{tmp_path}")
    monkeypatch.setattr("obstore.put", put)
    run = memoryview(bytes(PART_BYTES))
    storage.write("1-0/content", (run,) * num_runs, may_write=lambda: True)

    assert sizes == [chunk_bytes]
    assert PARTS_MAX * chunk_bytes >= num_runs * PART_BYTES
