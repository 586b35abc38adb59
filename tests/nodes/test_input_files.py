"""Machines are compared by the files that a job reads: what is the same, and what is read."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from planaria.core.job import DataConfig, JobConfig, ModelConfig
from planaria.errors import ConfigError
from planaria.nodes import input_files
from planaria.nodes.input_files import PROSE_KEY, input_digests

LONG_AGO_S = 1_000_000_000


def write(path: Path, text: str, *, modified_s: int = LONG_AGO_S) -> Path:
    """Writes a file that looks as if it had last been changed then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (modified_s, modified_s))
    return path


def digest(job: JobConfig, machine: Path) -> str:
    """The digest of the only input of a job, on a machine with this directory."""
    [value] = input_digests(job, cache_directory=machine / "cache", note=print).values()
    return value


def text_job(path: Path) -> JobConfig:
    return JobConfig(data=DataConfig(kind="text", path=str(path)))


def test_files_with_equal_contents_have_one_digest_wherever_they_were_copied(
    tmp_path: Path,
) -> None:
    """Times differ between copies, and do not count."""
    first = write(tmp_path / "a" / "text.txt", "some text")
    same = write(tmp_path / "b" / "text.txt", "some text", modified_s=LONG_AGO_S + 5)
    other = write(tmp_path / "c" / "text.txt", "some tax")

    digests = [digest(text_job(path), tmp_path) for path in (first, same, other)]

    assert digests[0] == digests[1] != digests[2]


def test_contents_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data of terabytes is not read anew for each job."""
    path = write(tmp_path / "text.txt", "some text")
    before = digest(text_job(path), tmp_path)

    monkeypatch.setattr(input_files, "_pieces", lambda _: pytest.fail("it is read again"))

    assert digest(text_job(path), tmp_path) == before


def test_another_file_of_the_same_size_and_time_is_read(tmp_path: Path) -> None:
    """Machines that share a home have one cache: the digest of one was taken for those of all."""
    path = write(tmp_path / "text.txt", "some text")
    before, changed_ns = digest(text_job(path), tmp_path), path.stat().st_ctime_ns

    while path.stat().st_ctime_ns == changed_ns:  # The kernel's clock has ticks.
        write(path, "same size")

    assert digest(text_job(path), tmp_path) != before


def test_a_file_that_was_just_changed_is_read_again(tmp_path: Path) -> None:
    """Another change at the same time might leave its size and time as they are."""
    path = tmp_path / "text.txt"
    path.write_text("some text")
    status = path.stat()
    before = digest(text_job(path), tmp_path)

    path.write_text("same size")
    os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))

    assert digest(text_job(path), tmp_path) != before


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    path = write(tmp_path / "text.txt", "some text")
    expected = digest(text_job(path), tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "cache").write_text("a file, not a directory")

    assert digest(text_job(path), tmp_path / "full") == expected


def test_a_dataset_is_compared_without_what_other_programs_keep_beside_it(tmp_path: Path) -> None:
    for machine in ("a", "b"):
        write(tmp_path / machine / "saved" / "state.json", "{}")
        write(tmp_path / machine / "saved" / "data-0.arrow", "rows")
    write(tmp_path / "b" / "saved" / "cache-123.arrow", "a filtered copy")
    write(tmp_path / "b" / "saved" / ".cache" / "lock", "")
    jobs = [
        JobConfig(data=DataConfig(kind="hf", path=str(tmp_path / machine / "saved")))
        for machine in ("a", "b")
    ]
    before = [digest(job, tmp_path) for job in jobs]

    write(tmp_path / "b" / "saved" / "train" / "data-1.arrow", "rows")

    assert before[0] == before[1] != digest(jobs[1], tmp_path)


def test_a_file_whose_name_is_no_text_is_compared_by_the_bytes_of_its_name(
    tmp_path: Path,
) -> None:
    """It ended every agent with a traceback."""
    names = (b"data-\xff.arrow", b"data-\xfe.arrow", b"data-\xff.arrow")
    jobs = []
    for machine, name in zip("abc", names, strict=True):
        write(tmp_path / machine / "saved" / os.fsdecode(name), "rows")
        path = str(tmp_path / machine / "saved")
        jobs.append(JobConfig(data=DataConfig(kind="hf", path=path)))

    digests = [digest(job, tmp_path) for job in jobs]

    assert digests[0] == digests[2] != digests[1]


def test_a_file_that_cannot_be_read_and_whose_name_is_no_text_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is told of it, and a message is text."""

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    write(tmp_path / "saved" / os.fsdecode(b"data-\xff.arrow"), "rows")
    monkeypatch.setattr(input_files, "_pieces", refuse)

    with pytest.raises(ConfigError, match=r"data-\\udcff\.arrow cannot be read here"):
        digest(JobConfig(data=DataConfig(kind="hf", path=str(tmp_path / "saved"))), tmp_path)


def test_a_model_is_compared_by_its_configuration_and_weights(tmp_path: Path) -> None:
    """Another text about the model beside them makes no other model."""
    data = DataConfig(kind="python", target="module:function")
    for machine in ("a", "b"):
        write(tmp_path / machine / "model" / "config.json", "{}")
        write(tmp_path / machine / "model" / "model.safetensors", "weights")
    write(tmp_path / "b" / "model" / "README.md", "about it")
    jobs = [
        JobConfig(model=ModelConfig(path=str(tmp_path / machine / "model")), data=data)
        for machine in ("a", "b")
    ]
    before = [digest(job, tmp_path) for job in jobs]

    write(tmp_path / "b" / "model" / "tokenizer_config.json", "{}")
    assert before[0] == before[1] == digest(jobs[1], tmp_path)
    # A masked model's mask is in it, if the ids of tokens come from elsewhere.
    of_ids = [replace(job, data=DataConfig(kind="tokens")) for job in jobs]
    assert digest(of_ids[0], tmp_path) != digest(of_ids[1], tmp_path)
    # So are the tokens of a text, if they are the model's.
    of_text = [replace(job, data=DataConfig(tokenizer="model")) for job in jobs]
    cache = tmp_path / "cache"
    digests = [input_digests(job, cache_directory=cache, note=print) for job in of_text]
    assert digests[0]["model.path"] != digests[1]["model.path"]

    write(tmp_path / "b" / "model" / "model.safetensors", "no weights")

    assert before[1] != digest(jobs[1], tmp_path)


def test_what_is_missing_is_named_with_what_to_do(tmp_path: Path) -> None:
    job = text_job(tmp_path / "text.txt")

    with pytest.raises(ConfigError, match=r"data\.path = .*text\.txt'.*copy them here"):
        digest(job, tmp_path)


def test_a_directory_that_this_user_may_not_enter_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look whether a file is there fails then, as on a file system whose server was replaced.
    Root may enter all, so a test of root's cannot take a real directory."""

    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    job = text_job(tmp_path / "text.txt")
    monkeypatch.setattr(Path, "is_file", refuse)

    with pytest.raises(ConfigError, match=r"data\.path = .*cannot be read here: Permission denied"):
        digest(job, tmp_path)


def test_the_text_of_pythons_library_is_compared_by_the_python(tmp_path: Path) -> None:
    """Other builds have other texts; a paced job reads none."""
    prose = JobConfig()
    paced = replace(prose, model=ModelConfig(kind="paced", profile="gpt3-xl"))

    assert list(input_digests(prose, cache_directory=tmp_path, note=print)) == [PROSE_KEY]
    assert input_digests(paced, cache_directory=tmp_path, note=print) == {}


def test_the_user_is_told_of_long_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a machine that reads for minutes does not look as if it hung."""
    monkeypatch.setattr(input_files, "_NOTED_BYTES", 5)
    monkeypatch.setattr(input_files, "_NOTE_S", 0.0)
    path, notes = write(tmp_path / "text.txt", "some text"), list[str]()
    job = text_job(path)

    input_digests(job, cache_directory=tmp_path, note=notes.append)
    input_digests(job, cache_directory=tmp_path, note=notes.append)

    assert notes == [
        f"reads {path} (0.0 GB) once, to compare it with the other machines'",
        f"has read 100% of {path}",
    ]
