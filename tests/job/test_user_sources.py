"""The user's modules that travel to the machines of a job: those that its processes import."""

import os
from pathlib import Path

import pytest

from planaria.core.job import JobConfig, ModelConfig
from planaria.core.machine_messages import SOURCES_BYTES_MAX
from planaria.errors import ConfigError
from planaria.job.user_sources import user_sources


def write(directory: Path, contents: dict[str, str]) -> Path:
    """A directory with these files, by their paths."""
    for name, content in contents.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return directory


def names(target: str, *directories: Path) -> list[str]:
    """The paths of the files that travel with a job."""
    config = JobConfig(model=ModelConfig(kind="python", target=target))
    return [source.path for source in user_sources(config, [str(each) for each in directories])]


def test_what_the_modules_of_a_job_import_travels_with_them(tmp_path: Path) -> None:
    """What nobody imports stays, and so does what is installed."""
    write(tmp_path, {"model.py": "import torch\nfrom layers import a", "other.py": ""})
    write(tmp_path, {"layers.py": "import blocks", "blocks.py": ""})

    assert names("model:build", tmp_path) == ["blocks.py", "layers.py", "model.py"]


@pytest.mark.parametrize("target", ["model:build", "lib.net:build"])
def test_a_package_needs_no_init_file(target: str, tmp_path: Path) -> None:
    """Python imports it without. The job ran on one machine, and others got no module."""
    write(tmp_path, {"model.py": "from lib.net import build", "lib/net.py": "from . import parts"})
    write(tmp_path, {"lib/parts.py": "import helping", "helping.py": ""})

    assert {"lib/net.py", "lib/parts.py", "helping.py"} <= set(names(target, tmp_path))


@pytest.mark.parametrize("init", ["lib/__init__.py", "lib/net.py"])
def test_a_file_whose_name_is_no_text_stays(init: str, tmp_path: Path) -> None:
    """No statement can import it, and no message can name it: the head ended with a traceback."""
    write(tmp_path, {"lib/net.py": "", init: "", os.fsdecode(b"lib/n\xff.py"): ""})

    assert names("lib.net:build", tmp_path) == sorted({"lib/net.py", init})


def test_a_package_without_an_init_file_has_parts_in_several_directories(tmp_path: Path) -> None:
    """Each file is taken once, from where Python finds it first."""
    first = write(tmp_path / "first", {"lib/net.py": "import a"})
    second = write(tmp_path / "second", {"lib/net.py": "import b", "lib/more.py": ""})
    write(second, {"a.py": "", "b.py": ""})

    assert names("lib.net:build", first, second, second) == ["a.py", "lib/more.py", "lib/net.py"]


@pytest.mark.parametrize("other", ["lib.py", "lib/__init__.py"])
def test_a_directory_is_no_package_where_there_is_another_module(
    other: str, tmp_path: Path
) -> None:
    """Python takes that one, wherever it is found."""
    first = write(tmp_path / "first", {"lib/net.py": ""})
    second = write(tmp_path / "second", {other: ""})

    assert names("lib:build", first, second) == [other]


@pytest.mark.parametrize("name", ["json", "torch", "sys", "planaria"])
def test_a_directory_is_no_package_where_one_is_installed(name: str, tmp_path: Path) -> None:
    """A directory of data may be called so, with scripts in it."""
    write(tmp_path, {"model.py": f"import {name}", f"{name}/script.py": ""})

    assert names("model:build", tmp_path) == ["model.py"]


def test_a_target_without_a_module_names_no_files(tmp_path: Path) -> None:
    """Whoever imports it says what is wrong."""
    directory = write(tmp_path / "job", {"model.py": ""})

    assert names(":build", directory) == []
    assert names(f"{tmp_path}:build", directory) == []


def test_too_many_bytes_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {"lib/net.py": "#" * SOURCES_BYTES_MAX, "lib/more.py": "#"})

    with pytest.raises(ConfigError, match="more than 16 MiB"):
        names("lib.net:build", tmp_path)
