"""Directories and object stores keep versions alike; what they refuse is told by name."""

import errno
import math
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
from safetensors.numpy import load_file

from helpers.object_store import BUCKET, object_store, settings
from planaria.checkpoint.disk.outgoing import export_parameters, kept_saves, save_as
from planaria.checkpoint.disk.storage import may_pass, storage_of
from planaria.checkpoint.disk.tiers import Manifest, Tier, tier_of
from planaria.errors import CheckpointError, ConfigError, UnreadableError, UnwritableError

LAYERS = 3


def test_a_version_that_is_removed_while_it_is_listed_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the coordinator, because another writer of it failed."""
    tier = tier_of(str(tmp_path))
    tier.write_layer(1, 0, 0, {"parameter/w": np.zeros(3)})
    iterdir = Path.iterdir

    def removed_first(path: Path) -> Iterator[Path]:
        if path.name == "1-0":
            shutil.rmtree(path, ignore_errors=True)
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", removed_first)
    assert tier.storage.entries("1-0") == {}
    assert tier.versions() == ()


@pytest.fixture
def not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place of saves in which only root may look into some directories."""
    iterdir = Path.iterdir
    for name in ("lost+found", "private"):
        (tmp_path / name).mkdir()

    def refuse(path: Path) -> Iterator[Path]:
        if path.name in ("lost+found", "private", "9-0"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    return tmp_path


def test_directories_that_are_none_of_ours_are_not_looked_into(not_ours: Path) -> None:
    """The root of a file system has `lost+found`, and no job that is not root began there."""
    tier = tier_of(str(not_ours))
    saved(tier, 4)
    save_as(str(not_ours), "kept")

    assert [version.name for version in tier.versions()] == ["4-0"]
    assert tier.prune(1) == ()
    assert list(kept_saves(str(not_ours))) == ["kept"]


def test_a_version_that_cannot_be_looked_into_may_be_complete(not_ours: Path) -> None:
    (not_ours / "9-0").mkdir()
    with pytest.raises(UnreadableError, match="9-0"):
        tier_of(str(not_ours)).versions()


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    with object_store(lambda method, path: LATE.late_s(method, path)) as url:
        yield url


@pytest.fixture(params=["directory", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where nothing is yet."""
    if request.param == "directory":
        return str(tmp_path / "saves")
    url: str = request.getfixturevalue("store")
    return f"{url}/{tmp_path.name}"


def tensors(layer: int, iteration: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng((layer, iteration))
    weight = rng.standard_normal((5, layer + 1)).astype(np.float32)
    name = f"h.{layer}.weight"
    return {f"parameter/{name}": weight, f"optimizer/{name}/exp_avg": weight * 2}


def saved(tier: Tier, iteration: int, epoch: int = 0, **job: object) -> Manifest:
    """A published version."""
    files = tuple(
        tier.write_layer(iteration, epoch, layer, tensors(layer, iteration))
        for layer in range(LAYERS)
    )
    manifest = Manifest(iteration=iteration, epoch=epoch, job=job, layers=files)
    tier.publish(manifest)
    return manifest


def assert_whole(tier: Tier, manifest: Manifest) -> None:
    for layer in range(LAYERS):
        found, expected = tier.read_layer(manifest, layer), tensors(layer, manifest.iteration)
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_a_version_that_cannot_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync knows a descriptor alone; the user was told that "None" stays."""
    storage = storage_of(str(tmp_path))
    storage.create("1-0/layer-00000", b"")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))

    with pytest.raises(CheckpointError, match=f"cannot remove {tmp_path}/1-0: Input/output error"):
        storage.remove("1-0", ["1-0/layer-00000"])


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_contents_that_are_gone_already_keep_no_other_from_being_removed(
    scheme: str, tmp_path: Path
) -> None:
    """Two coordinators may remove a version at once; some stores refuse to remove what is gone."""
    storage = storage_of(f"{scheme}{tmp_path}")
    names = [f"1-0/layer-{layer:05}" for layer in range(40)]
    for name in names[20:]:
        storage.create(name, b"")

    storage.remove("1-0", names)

    assert storage.entries("") == {}


def test_versions_are_kept_listed_and_removed(place: str) -> None:
    """By another process, which knows the place alone."""
    tier = tier_of(place)
    assert tier.versions() == ()
    assert tier.newest() is None
    manifests = [saved(tier, iteration) for iteration in (2, 9, 10)]
    tier.write_layer(11, 1, 0, tensors(0))

    again = tier_of(place)
    names = [(version.name, version.manifest is not None) for version in again.versions()]
    assert names == [("11-1", False), ("10-0", True), ("9-0", True), ("2-0", True)]
    assert again.newest() == manifests[-1]
    for manifest in manifests:
        assert_whole(again, manifest)
    assert again.versions()[1].num_bytes > sum(file.num_bytes for file in manifests[-1].layers)
    assert again.prune(1) == ("2-0", "9-0")
    again.discard(11, 1)
    again.discard(11, 1)
    assert [version.name for version in tier.versions()] == ["10-0"]


def test_a_version_is_published_once(place: str) -> None:
    """Of two that think they lead the first one's stands."""
    tier = tier_of(place)
    manifest = saved(tier, 5)

    with pytest.raises(CheckpointError, match="belongs to another job"):
        tier.publish(Manifest(iteration=5, epoch=0, job={"other": 1}, layers=manifest.layers))
    with pytest.raises(CheckpointError, match="is complete and must not change"):
        tier.write_layer(5, 0, 0, tensors(1))
    with pytest.raises(CheckpointError, match="its version is complete"):
        tier.discard(5, 0)
    assert tier.newest() == manifest
    assert_whole(tier, manifest)


def test_what_was_changed_or_cut_is_not_read(place: str) -> None:
    """Nor counted as complete, where its size tells."""
    tier = tier_of(place)
    older, newer = saved(tier, 5), saved(tier, 6)
    name = f"6-0/{newer.layers[1].file}"
    content = tier.storage.read(name)
    changed = content[:-1] + bytes([content[-1] ^ 1])
    tier.storage.write(name, changed, may_write=lambda: True)

    with pytest.raises(
        CheckpointError, match=r"layer-00001\.safetensors does not hold what was written"
    ):
        tier.read_layer(newer, 1)
    assert tier.newest() == newer
    tier.storage.write(name, content[:-1], may_write=lambda: True)
    assert tier.newest() == older
    tier.storage.remove("6-0", [name])
    assert tier.versions()[0].reason == "layer-00001.safetensors is missing"
    with pytest.raises(CheckpointError, match=r"cannot read .*layer-00001"):
        tier.read_layer(newer, 1)


def test_a_damaged_version_is_set_aside_for_good(place: str) -> None:
    """It counts no more, and stays for a person to look at; twice is once."""
    tier = tier_of(place)
    older, damaged = saved(tier, 5), saved(tier, 6)
    for _ in range(2):
        tier.set_aside("6-0")

    assert tier.newest() == older
    saved(tier, 7)
    assert tier.prune(1) == ("5-0",)
    assert [version.name for version in tier.versions()] == ["7-0", "6-0"]
    assert tier.versions()[1].reason == "it was damaged, and set aside"
    assert_whole(tier, damaged)


def test_a_manifest_whose_answer_was_lost_is_published(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for again, and is there by then: what is there is what was asked for."""
    tier = tier_of(place)
    files = tuple(tier.write_layer(5, 0, layer, tensors(layer, 5)) for layer in range(LAYERS))
    manifest = Manifest(iteration=5, epoch=0, job={}, layers=files)
    lost = LOST_ANSWERS[place.startswith("s3://")]
    lost(monkeypatch)

    tier.publish(manifest)
    assert tier.newest() == manifest
    assert_whole(tier, manifest)


def lose_answers_of_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of files repeats a request, too."""
    link = os.link

    def linked_twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", linked_twice)


def lose_answers_of_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request for a manifest is carried out, and not answered."""
    unanswered = iter([-1.0])

    def late_s(method: str, path: str) -> float:
        return next(unanswered, 0.0) if method == "PUT" and "manifest" in path else 0.0

    monkeypatch.setattr(LATE, "late_s", late_s)


def test_a_manifest_none_of_whose_requests_is_answered_is_published_if_it_is_there(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last request may be carried out like the first: what the store has tells."""
    monkeypatch.setattr("planaria.checkpoint.disk.storage._RETRY_CONFIG", {"max_retries": 0})
    tier = tier_of(f"{store}/{tmp_path.name}")
    manifest = Manifest(iteration=0, epoch=0, job={}, layers=())
    with monkeypatch.context() as patched:
        patched.setattr(LATE, "late_s", lambda method, _path: -1.0 if method == "PUT" else 0.0)
        tier.publish(manifest)
        assert tier.newest() == manifest
        with pytest.raises(CheckpointError, match="cannot write"):
            tier.publish(replace(manifest, job={"name": "another"}))
    with monkeypatch.context() as patched:
        patched.setattr(LATE, "late_s", lambda _method, _path: math.inf)
        with pytest.raises(
            CheckpointError, match=r"cannot write .*1-0/manifest\.json.*AccessDenied"
        ):
            tier.storage.create("1-0/manifest.json", b"{}")


LOST_ANSWERS = {False: lose_answers_of_a_disk, True: lose_answers_of_a_store}


def test_a_save_that_cannot_be_read_now_is_none_of_those_that_are_kept(place: str) -> None:
    """Else the good one that was made after all went back from it would go; and it may be as good
    as before another time."""
    tier = tier_of(place)
    manifests = {iteration: saved(tier, iteration) for iteration in (2, 4, 6)}
    saved(tier, 5, epoch=1)

    assert tier.prune(1, unused={"6-0"}) == ("2-0", "4-0")
    assert [version.name for version in tier.versions()] == ["6-0", "5-1"]
    assert_whole(tier, manifests[6])


def test_pruning_reads_no_more_manifests_than_it_needs(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a slow store each takes its time, and there are many where all saves are kept."""
    tier = tier_of(place)
    for iteration in range(6):
        saved(tier, iteration)
    reads: list[str] = []
    read = type(tier.storage).read

    def noted(storage: Any, name: str) -> bytes:
        reads.append(name)
        return read(storage, name)

    monkeypatch.setattr(type(tier.storage), "read", noted)
    assert tier.prune(0) == ()
    assert reads == ["5-0/manifest.json"]
    assert tier.newest() is not None
    assert len(reads) == 2
    assert len(tier.prune(5)) == 1
    assert len(reads) == 8


@dataclass
class _Late:
    """What `object_store` of this module is told."""

    late_s: Callable[[str, str], float] = field(default=lambda _method, _path: 0.0)


LATE = _Late()


class _Recorded:
    """The order in which names change and are synced, as (what, path below a directory)."""

    def __init__(self, patch: pytest.MonkeyPatch, below: Path) -> None:
        self.steps: list[tuple[str, str]] = []
        self._below = below
        sync, link, replace, unlink = os.fsync, os.link, os.replace, Path.unlink

        def synced(descriptor: int) -> None:
            self._note("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")))
            sync(descriptor)

        def linked(source: Path, target: Path) -> None:
            link(source, target)
            self._note("link", target)

        def replaced(source: Path, target: Path) -> None:
            replace(source, target)
            self._note("replace", target)

        def unlinked(path: Path, *, missing_ok: bool = False) -> None:
            unlink(path, missing_ok=missing_ok)
            if path.suffix != ".partial":
                self._note("remove", path)

        patch.setattr(os, "fsync", synced)
        patch.setattr(os, "link", linked)
        patch.setattr(os, "replace", replaced)
        patch.setattr(Path, "unlink", unlinked)

    def _note(self, what: str, path: Path) -> None:
        name = str(path.relative_to(self._below))
        self.steps.append((what, name.partition(".")[0] or "."))

    def take(self) -> list[tuple[str, str]]:
        steps, self.steps = self.steps, []
        return steps


def test_each_step_of_a_save_is_on_disk_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is lost in between leaves a version that is whole, or none: what a name stands
    for is synced before the name is made, and the directory that holds the name afterwards."""
    tier = tier_of(str(tmp_path / "jobs" / "saves"))
    recorded = _Recorded(monkeypatch, tmp_path)
    file = tier.write_layer(3, 0, 0, tensors(0))
    written = recorded.take()
    tier.publish(Manifest(iteration=3, epoch=0, job={}, layers=(file,)))
    published = recorded.take()
    tier.publish(Manifest(iteration=3, epoch=0, job={}, layers=(file,)))
    published_again = recorded.take()
    saved(tier, 4)
    recorded.take()
    tier.prune(1)

    assert written == [
        ("sync", "."),
        ("sync", "jobs"),
        ("sync", "jobs/saves"),
        ("sync", "jobs/saves/3-0/layer-00000"),
        ("replace", "jobs/saves/3-0/layer-00000"),
        ("sync", "jobs/saves/3-0"),
    ]
    assert published == [
        ("sync", "jobs/saves/3-0/manifest"),
        ("link", "jobs/saves/3-0/manifest"),
        ("sync", "jobs/saves/3-0"),
        ("sync", "jobs/saves"),
    ]
    # Whoever linked it may have ended before it synced.
    assert published_again == [
        ("sync", "jobs/saves/3-0/manifest"),
        ("sync", "jobs/saves/3-0"),
        ("sync", "jobs/saves"),
    ]
    assert recorded.take() == [
        ("remove", "jobs/saves/3-0/manifest"),
        ("sync", "jobs/saves/3-0"),
        ("remove", "jobs/saves/3-0/layer-00000"),
    ]


def test_whoever_is_no_member_writes_nothing(place: str) -> None:
    """A node that was cut off while it saved."""
    tier = tier_of(place)

    with pytest.raises(CheckpointError, match="lease has run out"):
        tier.write_layer(3, 0, 0, tensors(0), may_write=lambda: False)
    assert tier.versions() == ()


def test_a_named_save_is_nobodys_but_the_users(place: str) -> None:
    """A job goes on from it as from any; no pruning touches it, and no other takes its name."""
    tier = tier_of(place)
    saved(tier, 5)
    manifest = saved(tier, 6)

    assert save_as(place, "before-warmup") == f"{place}/before-warmup/6-0"
    for iteration in (7, 8):
        saved(tier, iteration)
    tier.prune(1)
    kept = tier_of(f"{place}/before-warmup")
    assert kept.newest() == manifest
    assert_whole(kept, manifest)
    assert [version.name for version in tier.versions()] == ["8-0"]
    with pytest.raises(ConfigError, match="it already holds 6-0"):
        save_as(place, "before-warmup")


@pytest.mark.parametrize("name", ["", "6-0", "../elsewhere", "a/b", ".hidden", "run-202506-15"])
def test_a_name_that_is_none_is_refused(place: str, name: str) -> None:
    """It would be taken for a version, or lead out of the place."""
    saved(tier_of(place), 6)
    with pytest.raises(ConfigError, match=r"^name = .*a name consists of"):
        save_as(place, name)
    with pytest.raises(ConfigError, match=r"^--name = "):
        save_as(place, name, field="--name")


def test_a_named_save_of_a_damaged_version_is_none(place: str) -> None:
    """Nothing half is left under the name."""
    tier = tier_of(place)
    manifest = saved(tier, 6)
    name = f"6-0/{manifest.layers[2].file}"
    content = tier.storage.read(name)
    tier.storage.write(name, b"x" + content[1:], may_write=lambda: True)

    with pytest.raises(CheckpointError, match="does not hold what was written"):
        save_as(place, "good")
    assert tier_of(f"{place}/good").newest() is None
    tier.storage.write(name, content, may_write=lambda: True)
    assert save_as(place, "good") == f"{place}/good/6-0"


def test_an_export_has_the_parameters_by_name(place: str, tmp_path: Path) -> None:
    """In as many files as they need, with the model's config where it has one."""
    tier = tier_of(place)
    manifest = saved(tier, 6, config={"model_type": "gpt2"})
    output = tmp_path / "exported"

    names = export_parameters(tier, manifest, output)
    assert names == ("model.safetensors", "config.json")
    found = load_file(output / "model.safetensors")
    assert sorted(found) == [f"h.{layer}.weight" for layer in range(LAYERS)]
    assert np.array_equal(found["h.1.weight"], tensors(1, 6)["parameter/h.1.weight"])
    with patch("planaria.checkpoint.disk.outgoing.SHARD_BYTES", 1):
        names = export_parameters(tier, manifest, tmp_path / "sharded")
    assert names[:3] == tuple(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))
    assert names[3] == "model.safetensors.index.json"
    with pytest.raises(ConfigError, match="is not empty"):
        export_parameters(tier, manifest, output)


def test_a_bucket_that_is_not_there_is_named(store: str) -> None:
    """With what the store says of it."""
    tier = tier_of(store.replace(BUCKET, "no-such-bucket"))
    with pytest.raises(CheckpointError, match=r"cannot list s3://no-such-bucket.*NoSuchBucket"):
        tier.versions()
    with pytest.raises(CheckpointError, match="repair the store"):
        tier.storage.create("1-0/manifest.json", b"{}")


def test_a_store_that_does_not_answer_is_given_up_in_time() -> None:
    """Nobody listens at its port."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{sock.getsockname()[1]}"
    with patch.dict(os.environ, settings(endpoint)):
        tier = tier_of("s3://somewhere/jobs")
        with pytest.raises(CheckpointError, match="cannot list s3://somewhere/jobs") as caught:
            tier.versions()

    assert may_pass(caught.value)


@pytest.mark.parametrize(("late_s", "passes"), [(-1.0, True), (math.inf, False)])
def test_what_a_store_may_give_later_is_told_from_what_a_person_has_to_mend(
    late_s: float, passes: bool
) -> None:
    """It is overloaded (503), or refuses for good (403)."""
    answer = {"GET": late_s}
    with (
        object_store(lambda method, _: answer.get(method, 0.0)) as url,
        pytest.raises(CheckpointError) as caught,
    ):
        storage_of(url).entries("")

    assert may_pass(caught.value) == passes


def test_a_store_without_conditions_of_requests_is_one_to_replace() -> None:
    """Its client takes the answer for one that may pass."""
    error = UnwritableError("cannot write")
    for answer, passes in (("501 Not Implemented", False), ("500 Internal Server Error", True)):
        text = f"Generic S3 error: Error performing PUT http://a/b in 1s, after 4 retries, {answer}"
        error.__cause__ = RuntimeError(text)

        assert may_pass(error) == passes


STORAGE = "planaria.checkpoint.disk.storage"


def test_a_content_that_takes_longer_than_a_request_may_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a model with layers of gigabytes no save could be read: each request may last 60 s."""
    monkeypatch.setattr(f"{STORAGE}._CLIENT_OPTIONS", {"timeout": "1s", "allow_http": True})
    monkeypatch.setattr(f"{STORAGE}._RETRY_CONFIG", {"max_retries": 0})
    monkeypatch.setattr(f"{STORAGE}._PIECE_BYTES", 4 << 10)
    content = np.random.default_rng(0).bytes((80 << 10) + 17)
    with object_store(bytes_per_s=40 << 10) as url:  # 2 s for all of it, 0.1 s for a piece.
        storage = storage_of(url)
        storage.write("3-0/layer-00000", content, may_write=lambda: True)
        assert storage.read("3-0/layer-00000") == content


def test_pieces_are_read_four_at_once(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request to a store takes its time, and a store answers many of them alike."""
    monkeypatch.setattr(f"{STORAGE}._PIECE_BYTES", 1 << 10)
    storage = storage_of(f"{store}/{tmp_path.name}")
    storage.write("3-0/layer-00000", bytes(8 << 10), may_write=lambda: True)
    gets, four = iter(range(100)), threading.Barrier(4)

    def late_s(_method: str, _path: str) -> float:
        if next(gets):  # The first one asks for the size.
            four.wait(10.0)
        return 0.0

    monkeypatch.setattr(LATE, "late_s", late_s)
    assert storage.read("3-0/layer-00000") == bytes(8 << 10)
    assert not four.broken


def test_pieces_of_two_contents_are_not_mixed(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One takes the place of the other while it is read."""
    monkeypatch.setattr(f"{STORAGE}._PIECE_BYTES", 1 << 10)
    storage = storage_of(f"{store}/{tmp_path.name}")
    name = "run-000001-a/part"
    storage.write(name, bytes(5 << 10), may_write=lambda: True)
    gets = iter(range(100))

    def replaced(method: str, path: str) -> float:
        if method == "GET" and path.endswith(name) and next(gets) == 3:
            storage.write(name, b"x" * (5 << 10), may_write=lambda: True)
        return 0.0

    monkeypatch.setattr(LATE, "late_s", replaced)
    with pytest.raises(UnreadableError, match=f"cannot read .*{name}"):
        storage.read(name)
    assert storage.read(name) == b"x" * (5 << 10)
    storage.write(name, b"", may_write=lambda: True)
    assert storage.read(name) == b""


def test_a_url_of_no_store_is_refused() -> None:
    """Before anything is computed that could not be saved."""
    with pytest.raises(ConfigError, match="nowhere://bucket/jobs"):
        storage_of("nowhere://bucket/jobs")
