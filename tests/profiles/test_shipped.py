"""The profiles that come with planaria, and how a name finds one."""

import json
import tomllib
from pathlib import Path

import pytest

from helpers.command import assert_mistake, command
from planaria.core.plan import ModelProfile
from planaria.errors import ConfigError
from planaria.job.config import job_from_dict
from planaria.job.planning import given_profile, read_profile
from planaria.profiles.__main__ import profiles_table
from planaria.profiles.profile_json import encode_profile
from planaria.profiles.shipped import NAMES, shipped_path, shipped_profiles

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("profile", shipped_profiles(), ids=NAMES)
def test_the_files_are_what_the_analytic_model_gives(profile: ModelProfile) -> None:
    """Run `make profiles` after changing the model, a shape or the machine."""
    assert shipped_path(profile.model).read_bytes() == encode_profile(profile)


def test_every_file_is_one_of_the_shipped() -> None:
    """One that nothing writes would stay as it is for ever."""
    files = sorted(path.stem for path in shipped_path(NAMES[0]).parent.glob("*.json"))

    assert sorted(NAMES) == files


def test_the_wheel_takes_what_lies_in_the_package() -> None:
    """JSON files are in it as long as no build setting says which files are."""
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]

    assert hatch == {
        "dev-mode-dirs": ["src"],
        "targets": {"wheel": {"packages": ["src/planaria"]}},
    }
    assert shipped_path(NAMES[0]).is_relative_to(ROOT / "src" / "planaria")


def test_the_page_shows_the_table_as_it_is_printed() -> None:
    """Run `make profiles` and copy it there."""
    assert profiles_table() in (ROOT / "docs" / "PROFILES.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_read_as_the_shipped_profile(name: str) -> None:
    """For a cluster that does not exist yet, nothing else is needed."""
    assert read_profile(Path(name)).model == name


def test_a_file_of_that_name_comes_first() -> None:
    """A path always means the file, and a directory is none."""
    Path("gpt3-350m").mkdir()
    Path("gpt2").write_bytes(shipped_path("bert-large").read_bytes())

    assert read_profile(Path("gpt3-350m")).model == "gpt3-350m"
    assert read_profile(Path("gpt2")).model == "bert-large"
    with pytest.raises(ConfigError, match="no such file"):
        read_profile(Path("models/gpt2"))


def test_planning_takes_a_name_and_tells_the_names_there_are() -> None:
    """The answer to a wrong name is the list of the right ones."""
    arguments = ("--nodes", "3", "--devices-per-node", "8", "--json")

    shown = json.loads(command("plan", "gpt3-2.7b", *arguments).output)
    wrong = command("plan", "gpt3-2.8b", *arguments)

    assert shown["plan"]["samples_per_s"] > 0
    assert_mistake(wrong, "profile = 'gpt3-2.8b'", "no such file", ", ".join(NAMES))


def test_a_paced_job_takes_a_name_from_any_directory(tmp_path: Path) -> None:
    """Its other paths are relative to the job file; its layers share no parameters."""
    training = {"microbatch_size": 32, "global_batch_size": 64}
    tables = {"model": {"kind": "paced", "profile": "gpt2"}, "training": training}

    job = job_from_dict(tables, directory=tmp_path / "jobs")
    profile = given_profile(job)

    assert Path(job.model.profile) == shipped_path("gpt2")
    assert profile is not None
    assert profile.model == "gpt2"
    assert profile.tied == ()
    with pytest.raises(
        ConfigError, match="no shipped profile has that name; shipped are bert-large, "
    ):
        job_from_dict({"model": {"kind": "paced", "profile": "gpt9"}})
