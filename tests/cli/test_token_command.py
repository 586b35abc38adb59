"""`planaria token`: what it writes, what it says, and what it refuses."""

import stat
from pathlib import Path

import pytest

from helpers.command import assert_mistake, command
from planaria.transport.credentials import read_credentials


@pytest.fixture(autouse=True)
def _in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PLANARIA_TOKEN_FILE", raising=False)


def test_a_token_file_is_made_and_the_next_steps_are_told(tmp_path: Path) -> None:
    """Nothing that is printed is secret."""
    output = command("token", "my token").output
    path = tmp_path / "my token"
    credentials = read_credentials(path)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert output.startswith(f"wrote {path}, which only its owner may read\n")
    assert f"scp -p '{path}' MACHINE:'{path}'\n" in output
    assert f"--token-file '{path}', or export PLANARIA_TOKEN_FILE='{path}'\n" in output
    assert credentials.fingerprint() in output
    assert not any(line in output for line in path.read_text().splitlines()[1:])
    assert "PRIVATE" not in output


def test_the_default_place_needs_no_option(tmp_path: Path) -> None:
    """The directory is made, too, and another machine may not have it: scp makes none."""
    output = command("token").output

    assert f"ssh MACHINE 'mkdir -p {tmp_path}/.config/planaria'\n" in output
    assert "planaria looks for it there by itself" in output
    assert read_credentials(tmp_path / ".config" / "planaria" / "token").secret


def test_a_token_file_is_not_overwritten() -> None:
    """Whatever job uses it would be cut off."""
    command("token", "token")
    before = Path("token").read_bytes()

    assert_mistake(command("token", "token"), "FILE = ", "exists and may be in use")
    assert Path("token").read_bytes() == before


def test_a_check_prints_what_two_machines_compare() -> None:
    """And changes nothing."""
    made = command("token", "token").output
    before = Path("token").read_bytes()
    checked = command("token", "token", "--check").output

    assert checked.startswith("fingerprint ")
    assert checked.splitlines()[0].strip() in made
    assert "valid until 20" in checked
    assert Path("token").read_bytes() == before


def test_a_check_refuses_what_a_job_would_refuse() -> None:
    """With the same words."""
    assert_mistake(command("token", "none", "--check"), "--token-file", "planaria token ")
    command("token", "token")
    Path("token").chmod(0o644)
    assert_mistake(command("token", "token", "--check"), "chmod 600")
