"""Text: which tokens a sample has, which are targets, and how the token file is made."""

import fcntl
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.linked_ranks import TIMEOUT_S, wait_until
from planaria.core.job import DataConfig
from planaria.data import text
from planaria.data.batches import microbatch, num_targets
from planaria.data.datasets import Dataset, load_dataset, load_held_out, vocabulary_size
from planaria.data.model_tokenizer import SpecialTokens
from planaria.data.text import make_once, masked_pair
from planaria.errors import ConfigError

torch.set_num_threads(1)

IGNORED = -100


def text_file(directory: Path, content: bytes) -> str:
    path = directory / "text"
    path.write_bytes(content)
    return str(path)


def load(data: DataConfig, cache: Path, *, objective: str = "causal") -> Dataset:
    return load_dataset(data, objective=objective, seed=1, cache_directory=cache)


@settings(max_examples=30)
@given(content=st.binary(min_size=30, max_size=200), length=st.integers(1, 29))
def test_causal_samples_are_the_text_and_what_follows(
    content: bytes, length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Inputs in order are the text without its tail; targets are the same bytes one later."""
    directory = tmp_path_factory.mktemp("text")
    data = DataConfig(path=text_file(directory, content), sequence_length=length)
    dataset = load(data, directory / "cache")

    samples = [dataset.sample(k, seed=0) for k in range(len(dataset))]

    assert len(dataset) == (len(content) - 1) // length
    inputs = torch.cat([sample[0] for sample in samples]).tolist()
    targets = torch.cat([sample[1] for sample in samples]).tolist()
    assert inputs == list(content[: len(inputs)])
    assert targets == list(content[1 : len(inputs) + 1])
    assert dataset.vocabulary_size == 256


@settings(max_examples=60)
@given(length=st.integers(1, 300), seed=st.integers(0, 2**64 - 1))
def test_masked_samples_hide_15_percent_and_tell_what_was_there(length: int, seed: int) -> None:
    """Targets are the hidden tokens and nothing else; what is no target is shown as it is."""
    tokens = np.arange(length, dtype=np.int64) % 50

    inputs, targets = masked_pair(tokens, special=SpecialTokens(50, ()), num_tokens=50, seed=seed)

    hidden = targets != IGNORED
    assert hidden.sum() == max(1, int(0.15 * length + 0.5))
    assert (targets[hidden] == tokens[hidden]).all()
    assert (inputs[~hidden] == tokens[~hidden]).all()
    assert inputs.min() >= 0
    assert inputs.max() <= 50


def test_masks_follow_bert_and_the_seed() -> None:
    """80% mask token, 10% random, 10% unchanged over 300 seeds; places are spread evenly."""
    length = 100
    tokens = np.full(length, 7, dtype=np.int64)
    shown: list[int] = []
    places = np.zeros(length)
    for seed in range(300):
        inputs, targets = masked_pair(
            tokens, special=SpecialTokens(1000, ()), num_tokens=1000, seed=seed
        )
        shown += inputs[targets != IGNORED].tolist()
        places += targets != IGNORED

    assert len(shown) == 300 * 15
    assert shown.count(1000) / len(shown) == pytest.approx(0.8, abs=0.03)
    assert shown.count(7) / len(shown) == pytest.approx(0.1, abs=0.02)
    assert places.min() > 15
    assert places.max() < 85


def test_masks_are_a_function_of_seed_and_sample(tmp_path: Path) -> None:
    """Another node draws the same masks; another iteration or sample draws others."""
    data = DataConfig(path=text_file(tmp_path, b"a" * 2000), sequence_length=64)
    dataset = load(data, tmp_path / "cache", objective="masked")
    elsewhere = load(data, tmp_path / "other cache", objective="masked")
    samples = np.array([3, 0, 5])

    here = microbatch(dataset, samples, seed=8)
    there = microbatch(elsewhere, samples, seed=8)
    reversed_order = microbatch(dataset, samples[::-1], seed=8)
    later = microbatch(dataset, samples, seed=9)

    assert torch.equal(here[0], there[0])
    assert torch.equal(here[1], there[1])
    assert torch.equal(here[0].flip(0), reversed_order[0])
    assert not torch.equal(here[1], later[1])
    assert not torch.equal(here[1][0], here[1][1])
    assert dataset.vocabulary_size == vocabulary_size(
        data, cache_directory=tmp_path, seed=0, objective="masked"
    )
    assert dataset.vocabulary_size == 257
    assert int(here[0].max()) == 256


@pytest.mark.parametrize("objective", ["causal", "masked"])
@pytest.mark.parametrize("length", [1, 3, 64])
def test_num_targets_is_what_the_targets_hold(tmp_path: Path, objective: str, length: int) -> None:
    """The loss of a global batch is divided by it; counting must not need the samples."""
    data = DataConfig(path=text_file(tmp_path, bytes(range(200)) * 5), sequence_length=length)
    dataset = load(data, tmp_path / "cache", objective=objective)
    samples = np.array([0, 4, 2, 7])

    targets = microbatch(dataset, samples, seed=3)[1]

    assert num_targets(dataset, samples, seed=3) == int((targets != IGNORED).sum())


def test_the_librarys_prose_is_about_2_mb_of_english(tmp_path: Path) -> None:
    """The default text: nothing to download, enough for a learning curve."""
    dataset = load(DataConfig(sequence_length=1000), tmp_path)
    content = b"".join(bytes(dataset.sample(k, seed=0)[0].tolist()) for k in range(len(dataset)))

    assert 1_500_000 < len(content) < 4_000_000
    words = content.split()
    assert 0.02 < words.count(b"the") / len(words) < 0.1
    assert b"Return" in content


def test_tokens_are_made_once_and_then_only_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty workers on a node must not each tokenise the text."""
    data = DataConfig(path=text_file(tmp_path, b"some text " * 20), sequence_length=8)
    first = load(data, tmp_path / "cache").sample(0, seed=0)

    def forbidden(*_: object) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(text, "_write", forbidden)
    again = load(data, tmp_path / "cache").sample(0, seed=0)
    Path(data.path).write_bytes(b"other text " * 20)

    assert torch.equal(first[0], again[0])
    with pytest.raises(AssertionError, match="tokenised again"):
        load(data, tmp_path / "cache")


def made_at_once(path: Path, make: Callable[[Path], None], *, num_makers: int) -> None:
    """Several threads make a path; each has a lock of its own, as processes have."""
    start = threading.Barrier(num_makers, timeout=20)

    def maker() -> None:
        start.wait()
        make_once(path, make)

    threads = [threading.Thread(target=maker) for _ in range(num_makers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("has_locks", [True, False])
def test_several_makers_leave_one_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_locks: bool
) -> None:
    """With locks one makes it; without (some network disks) all do, and the rename decides."""
    made: list[int] = []

    def make(partial: Path) -> None:
        partial.write_bytes(b"x" * 100_000)
        made.append(partial.stat().st_ino)

    def no_locks(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    if not has_locks:
        monkeypatch.setattr("fcntl.flock", no_locks)
    made_at_once(tmp_path / "deep" / "file", make, num_makers=6)

    assert (tmp_path / "deep" / "file").read_bytes() == b"x" * 100_000
    # The same inode: put in place by a rename, so no reader ever saw half of it.
    assert (tmp_path / "deep" / "file").stat().st_ino in made
    assert not list(tmp_path.rglob("*.partial"))
    assert len(made) == 1 if has_locks else 1 <= len(made) <= 6


def test_a_maker_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """The next start tries again instead of mapping half a file."""

    def make(partial: Path) -> None:
        partial.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        make_once(tmp_path / "file", make)
    assert [path.name for path in tmp_path.iterdir()] == ["file.lock"]


def test_byte_pairs_are_learned_from_the_text_and_give_it_back(tmp_path: Path) -> None:
    """Fewer tokens than bytes, below the vocabulary's size, the same on every node, lossless."""
    tokenizers = pytest.importorskip("tokenizers")
    prose = "The quick brown fox jumps over the lazy d\u00f6g.\n" * 300
    path = text_file(tmp_path, prose.encode())
    data = DataConfig(path=path, sequence_length=16, tokenizer="bpe", vocabulary_size=300)
    dataset = load(data, tmp_path / "cache")
    elsewhere = load(data, tmp_path / "other cache")

    tokens = torch.cat([dataset.sample(k, seed=0)[0] for k in range(len(dataset))])

    saved = next((tmp_path / "cache").glob("tokenizer-*.json"))
    decoded = tokenizers.Tokenizer.from_file(str(saved)).decode(tokens.tolist())
    assert prose.startswith(decoded.rstrip("\ufffd"))
    assert len(decoded) > 0.95 * len(prose)
    assert len(tokens) < len(prose) / 2
    assert int(tokens.max()) < dataset.vocabulary_size == 300
    assert len(dataset) == len(elsewhere)
    assert torch.equal(dataset.sample(5, seed=0)[0], elsewhere.sample(5, seed=0)[0])


def test_held_out_text_has_the_tokens_of_the_training_text(tmp_path: Path) -> None:
    """A tokenizer of its own would give other numbers to the same words."""
    tokenizers = pytest.importorskip("tokenizers")
    path = text_file(tmp_path, b"The quick brown fox jumps over the lazy dog.\n" * 300)
    held_out = tmp_path / "held out"
    held_out.write_bytes(b"zebras and the quick brown fox\n" * 90)
    data = DataConfig(path=path, sequence_length=16, tokenizer="bpe", vocabulary_size=300)
    cache = tmp_path / "cache"
    load(data, cache)

    dataset = load_held_out(
        replace(data, path=str(held_out)), data, objective="causal", seed=0, cache_directory=cache
    )

    (saved,) = cache.glob("tokenizer-*.json")
    decoded = tokenizers.Tokenizer.from_file(str(saved)).decode(
        torch.cat([dataset.sample(k, seed=0)[0] for k in range(len(dataset))]).tolist()
    )
    assert held_out.read_text().startswith(decoded)
    assert len(decoded) > 2000
    with pytest.raises(ConfigError, match=r"^evaluation\.path = "):
        load_held_out(
            replace(data, path="no"), data, objective="causal", seed=0, cache_directory=cache
        )


def test_a_text_too_short_for_a_sample_is_refused_with_its_size(tmp_path: Path) -> None:
    """Also an empty file, which cannot be mapped."""
    for content in (b"", b"a" * 128):
        data = DataConfig(path=text_file(tmp_path, content), sequence_length=128)
        with pytest.raises(ConfigError, match=f"needs 129 tokens and .* has {len(content)}"):
            load(data, tmp_path / "cache")


def test_a_binary_file_has_no_byte_pairs(tmp_path: Path) -> None:
    """The way out is in the message, and no half tokenizer is left in the cache."""
    pytest.importorskip("tokenizers")
    data = DataConfig(path=text_file(tmp_path, b"\xff\xfe" * 99), tokenizer="bpe")

    with pytest.raises(ConfigError, match=r'not UTF-8.*tokenizer = "bytes"'):
        load(data, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("tokenizer-*.json"))
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """Here a file stands where the directory should be."""
    data = DataConfig(path=text_file(tmp_path, b"a" * 999))

    with pytest.raises(ConfigError, match="the cache cannot be written"):
        load(data, tmp_path / "text")


def test_a_file_is_made_by_one_process_however_long_that_takes(tmp_path: Path) -> None:
    """Those that wait for it made it, too, once they had waited for ten minutes."""
    path = tmp_path / "file"
    made: list[Path] = []
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waits = f":{os.fstat(lock.fileno()).st_ino} "
        thread = threading.Thread(target=make_once, args=(path, made.append))
        thread.start()

        def is_waiting() -> bool:
            locks = Path("/proc/locks").read_text().splitlines()
            return any("->" in each and waits in each for each in locks)

        wait_until(lambda: is_waiting() or not thread.is_alive())
        assert thread.is_alive()
        path.write_text("made")
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert made == []
