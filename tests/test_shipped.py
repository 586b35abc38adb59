"""The profiles that come with planaria."""

import tomllib
from pathlib import Path

import pytest

from planaria.core.plan import ModelProfile
from planaria.core.profile_json import encode_profile
from planaria.profiles.shipped import NAMES, shipped_path, shipped_profiles

ROOT = Path(__file__).parents[1]


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
