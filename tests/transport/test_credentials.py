"""Token files: what they hold, who may read them, and what is refused."""

import os
import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from rich.pretty import pretty_repr

from helpers.jobs import leader_spec
from planaria.core.specs import NodeSpec
from planaria.errors import ConfigError
from planaria.transport import credentials as module
from planaria.transport.credentials import (
    Credentials,
    credentials_between,
    make_credentials,
    read_credentials,
    token_path,
    write_credentials,
)

NOW = datetime.now(UTC)
DAY = timedelta(days=1)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    write_credentials(path)
    return path


def write_file(path: Path, credentials: Credentials) -> Path:
    """Writes a token file as `planaria token` does."""
    path.write_bytes(module._encode(credentials))
    path.chmod(0o600)
    return path


def changed_file(path: Path, **changes: object) -> Path:
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | changes))
    return path


def assert_refused(path: Path, *parts: str) -> None:
    """The error names the option, the file and the remedy."""
    with pytest.raises(ConfigError) as refused:
        read_credentials(path)
    for part in ("--token-file", str(path), *parts):
        assert part in str(refused.value)


def test_a_file_is_read_as_it_was_written(token_file: Path) -> None:
    """Nobody but its owner may read it, and two files have nothing in common."""
    other = token_file.with_name("other")
    write_credentials(other)
    first, second = read_credentials(token_file), read_credentials(other)

    assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
    assert first == read_credentials(token_file)
    assert len(first.secret) == 32
    assert first.secret != second.secret
    assert first.certificate != second.certificate
    assert first.key != second.key


def test_a_missing_directory_is_made(tmp_path: Path) -> None:
    """The default path lies in a directory that a new machine does not have."""
    path = tmp_path / "config" / "planaria" / "token"
    write_credentials(path)

    assert read_credentials(path).secret
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_file_is_never_overwritten(token_file: Path) -> None:
    """Machines of a running job would lose the job."""
    before = token_file.read_bytes()

    with pytest.raises(ConfigError, match="exists and may be in use"):
        write_credentials(token_file)
    assert token_file.read_bytes() == before


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    """A file stands where a directory is needed."""
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="cannot be written: Not a directory"):
        write_credentials(tmp_path / "file" / "token")


def test_no_text_form_shows_a_secret() -> None:
    """Logs, tracebacks and rich's pretty printer use these."""
    credentials = make_credentials()
    texts = (repr(credentials), str(credentials), f"{credentials}", pretty_repr(credentials))

    for text in texts:
        assert text.startswith("Credentials(")
        assert str(credentials.secret)[2:8] not in text
        assert "PRIVATE" not in text


def test_what_processes_are_told_shows_no_secret_either(tmp_path: Path) -> None:
    """Specs hold the token and the credentials, and stand in tracebacks and logs."""
    leader = msgspec.structs.replace(
        leader_spec(tmp_path, token=b"SECRET"), credentials=make_credentials()
    )
    node = NodeSpec(
        job=leader.job,
        node=3,
        token=b"SECRET",
        coordinator=("", 0),
        worker="",
        cache_directory="",
        credentials=b"SECRET",
    )

    for spec in (leader, node):
        for text in (repr(spec), pretty_repr(spec)):
            assert "SECRET" not in text
            assert "PRIVATE" not in text


def test_each_purpose_has_its_own_key() -> None:
    """HMAC-SHA256, so no key tells of another one."""
    credentials = make_credentials()
    keys = {credentials.derive(purpose) for purpose in ("node", "machine", "")}

    assert len(keys) == 3
    assert {len(key) for key in keys} == {32}
    assert credentials.secret not in keys


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o777])
def test_a_file_that_others_may_use_is_refused(token_file: Path, mode: int) -> None:
    """The remedy is the command that mends it."""
    token_file.chmod(mode)

    assert_refused(token_file, f"{mode:04o}", f"chmod 600 {token_file}")


def test_a_file_that_is_not_there_is_refused_with_the_way_to_make_it(tmp_path: Path) -> None:
    """The first error of every new user."""
    path = tmp_path / "token"

    assert_refused(path, "No such file", f"planaria token {path}", "$PLANARIA_TOKEN_FILE")


def test_what_is_no_token_file_is_refused(tmp_path: Path) -> None:
    """Directories, pipes without a writer, endless files and deep ones end in the same error."""
    path = tmp_path / "token"
    os.mkfifo(path, 0o600)
    assert_refused(path, "is no token file")
    path.unlink()
    for data in (b"", b"{}", b"secret", b"[" * 5000, b" " * (1 << 17), b"\xff"):
        path.write_bytes(data)
        path.chmod(0o600)
        assert_refused(path, "is no token file")
    assert_refused(tmp_path, "Is a directory")


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"version": 2}, "has version 2"),
        ({"secret": "AAAA"}, "is no token file"),
        ({"secret": "$$$$"}, "is no token file"),
        ({"certificate": ""}, "damaged certificate or key"),
        ({"certificate": "\u00e9"}, "is no token file"),
        ({"certificate": 2 * make_credentials().certificate}, "damaged certificate or key"),
        ({"key": ""}, "damaged certificate or key"),
    ],
)
def test_a_damaged_file_is_refused(token_file: Path, changes: dict[str, object], part: str) -> None:
    """Before anything is connected, and with the way out."""
    assert_refused(changed_file(token_file, **changes), part, "planaria token")


def test_a_key_of_another_file_is_refused(token_file: Path) -> None:
    """Somebody merged two files."""
    changed_file(token_file, key=make_credentials().key)

    assert_refused(token_file, "damaged certificate or key")


@pytest.mark.parametrize(("first", "last"), [(-2 * DAY, -DAY), (DAY, 2 * DAY)])
def test_a_certificate_out_of_its_time_is_refused(
    tmp_path: Path, first: timedelta, last: timedelta
) -> None:
    """Either it is old or this machine's clock is wrong; both are said."""
    credentials = credentials_between(NOW + first, NOW + last)
    path = write_file(tmp_path / "token", credentials)

    assert_refused(path, f"to {NOW + last:%Y-%m-%d}", "this machine's clock says", "set the clock")


def test_a_certificate_is_valid_for_ten_years_and_for_late_clocks() -> None:
    """A machine without a battery starts in 1970."""
    credentials = make_credentials()

    assert credentials.first_instant().year == 1970
    assert NOW + 3652 * DAY < credentials.last_instant() < NOW + 3654 * DAY


def test_a_fingerprint_names_the_whole_file() -> None:
    """People compare it across machines, so it depends on every part, and tells none."""
    credentials, other = make_credentials(), make_credentials()
    mixtures = [
        msgspec.structs.replace(credentials, **{name: getattr(other, name)})
        for name in ("secret", "certificate", "key")
    ]

    assert len({mixture.fingerprint() for mixture in (credentials, other, *mixtures)}) == 5
    assert len(credentials.fingerprint()) == len("1234:5678:9abc:def0")


def test_only_tls_13_is_spoken() -> None:
    """And each end must show its certificate."""
    credentials = make_credentials()

    for context in (credentials.server_context(), credentials.client_context()):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert context.verify_mode == ssl.CERT_REQUIRED


def test_the_path_is_the_options_else_the_variables_else_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In this order; an empty variable is none."""
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.delenv("PLANARIA_TOKEN_FILE", raising=False)
    default = token_path("")
    monkeypatch.setenv("PLANARIA_TOKEN_FILE", "")
    empty = token_path("")
    monkeypatch.setenv("PLANARIA_TOKEN_FILE", "~/v")

    assert default == empty == Path("/h/.config/planaria/token")
    assert token_path("") == Path("/h/v")
    assert token_path("o") == Path("o")
