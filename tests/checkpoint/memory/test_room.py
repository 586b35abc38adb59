"""How much memory is left."""

from pathlib import Path

import psutil
import pytest

from planaria.checkpoint.memory.room import available_bytes, total_bytes

GB = 1_000_000_000


def add_group(root: Path, group: str, limit: str) -> Path:
    """A control group that takes 3 GB, 1 GB of which are copies of files; returns the root."""
    path = root / "sys/fs/cgroup" / group
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.max").write_text(f"{limit}\n")
    (path / "memory.current").write_text(f"{3 * GB}\n")
    (path / "memory.stat").write_text(f"anon 5\nfile 9\ninactive_file {GB}\nactive_file 4\n")
    return root


def add_old_group(root: Path, group: str, limit: int) -> Path:
    """Such a group of the first version of control groups, whose own files are few."""
    path = root / "sys/fs/cgroup/memory" / group
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (path / "memory.usage_in_bytes").write_text(f"{3 * GB}\n")
    (path / "memory.stat").write_text(f"inactive_file 7\ntotal_inactive_file {GB}\n")
    return root


def put_into(root: Path, *lines: str) -> Path:
    """Puts this process into the control groups that the kernel names so; returns the root."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))
    return root


@pytest.mark.parametrize("path", ["/", "/docker/5f3a"])
def test_a_control_group_s_limit_counts(path: str, tmp_path: Path) -> None:
    """A machine may have more than a container, which may see its path on the machine."""
    root = put_into(add_group(tmp_path, "", "2100000000"), f"0::{path}")

    assert available_bytes(root) == 100_000_000
    assert total_bytes(root) == 2_100_000_000


@pytest.mark.parametrize("group", ["job", "job/step", "job/step/task"])
def test_the_limit_of_a_job_counts_on_its_machine(group: str, tmp_path: Path) -> None:
    """Slurm and systemd limit one of the groups above the process; the topmost one has no files."""
    root = put_into(tmp_path, "0::/job/step/task")
    for each in ("job", "job/step", "job/step/task"):
        add_group(root, each, "2100000000" if each == group else "max")
    add_group(root, "other", "2000000001")

    assert available_bytes(root) == 100_000_000
    assert total_bytes(root) == 2_100_000_000


def test_the_least_of_several_limits_counts(tmp_path: Path) -> None:
    root = put_into(tmp_path, "0::/job/step")
    add_group(add_group(root, "job", "2100000000"), "job/step", "2300000000")

    assert available_bytes(root) == 100_000_000
    assert total_bytes(root) == 2_100_000_000


def test_limits_of_the_first_version_of_control_groups_count(tmp_path: Path) -> None:
    """Older machines have it, alone or beside the second one. No limit is a very high one there."""
    root = put_into(tmp_path, "9:cpu:/else", "4:hugetlb,memory:/job/step", "0::/")
    add_old_group(root, "job/step", (1 << 63) - 4096)
    add_old_group(root, "job", 2_100_000_000)
    add_old_group(root, "else", 2_000_000_001)

    assert available_bytes(root) == 100_000_000
    assert total_bytes(root) == 2_100_000_000


def test_without_a_limit_it_is_the_machine_s(tmp_path: Path) -> None:
    """Or without control groups at all."""
    machine = psutil.virtual_memory().total
    root = put_into(add_group(tmp_path / "some", "", "max"), "0::/")
    for each in (root, tmp_path / "none"):
        assert 0 < available_bytes(each) <= machine
        assert total_bytes(each) == machine
