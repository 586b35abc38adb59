"""How much memory is left."""

from pathlib import Path

import psutil

from planaria.checkpoint.memory.room import available_bytes, total_bytes


def group(path: Path, limit: str) -> Path:
    """A control group that takes 3 GB, 1 GB of which are copies of files."""
    (path / "memory.max").write_text(limit)
    (path / "memory.current").write_text("3000000000\n")
    stat = "anon 5\nfile 9\ninactive_file 1000000000\nactive_file 4\n"
    (path / "memory.stat").write_text(stat)
    return path


def test_a_control_group_s_limit_counts(tmp_path: Path) -> None:
    """A machine may have more than a container."""
    assert available_bytes(group(tmp_path, "2100000000\n")) == 100_000_000


def test_without_a_limit_it_is_the_machine_s(tmp_path: Path) -> None:
    """Or without control groups at all."""
    machine = psutil.virtual_memory().total
    assert 0 < available_bytes(group(tmp_path, "max\n")) <= machine
    assert 0 < available_bytes(tmp_path / "none") <= machine


def test_the_whole_memory_is_the_machine_s_or_its_control_group_s(tmp_path: Path) -> None:
    """By which a machine says how much it has, in a container, too."""
    machine = psutil.virtual_memory().total
    assert total_bytes(group(tmp_path, "2100000000\n")) == 2_100_000_000
    assert total_bytes(group(tmp_path, "max\n")) == machine
    assert total_bytes(tmp_path / "none") == machine
