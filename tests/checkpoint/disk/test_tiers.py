"""The disk tier: a version is whole or invisible, and what is read is what was written."""

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from helpers.refused_reads import refused_reads
from planaria.checkpoint.disk.storage import parts_of
from planaria.checkpoint.disk.tiers import (
    BFLOAT16,
    Manifest,
    Tier,
    newest_checkpoint_text,
    safetensors_content,
    tensors_in,
    tier_of,
)
from planaria.core.messages import LayerFile
from planaria.errors import CheckpointError, UnreadableError

OUTSIDE = b'{"layer": 0, "file": "../../x", "num_bytes": 1, "xxh3_128": ""}'
JOB = {"model": "tiny", "optimizer": {"name": "AdamW", "betas": [0.9, 0.999]}}


def layer_tensors(layer: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(layer)
    return {
        "parameter/weight": rng.standard_normal((3, 4)).astype(np.float32),
        "optimizer/weight/exp_avg": rng.standard_normal((3, 4)).astype(np.float32),
        "optimizer/weight/step": np.array(7, dtype=np.int64),
    }


def saved(tier: Tier, iteration: int, epoch: int = 0, num_layers: int = 2) -> Manifest:
    """A published version."""
    layers = tuple(
        tier.write_layer(iteration, epoch, layer, layer_tensors(layer))
        for layer in range(num_layers)
    )
    manifest = Manifest(iteration=iteration, epoch=epoch, job=JOB, layers=layers)
    tier.publish(manifest)
    return manifest


def assert_same(expected: Mapping[str, np.ndarray], actual: Mapping[str, np.ndarray]) -> None:
    assert expected.keys() == actual.keys()
    for name, array in expected.items():
        assert array.dtype == actual[name].dtype
        assert array.shape == actual[name].shape
        assert array.tobytes() == actual[name].tobytes()


def layer_path(tier: Tier, manifest: Manifest, layer: int) -> Path:
    return Path(tier.where(manifest.iteration, manifest.epoch)) / manifest.layers[layer].file


def test_a_published_version_reads_back_the_same(tmp_path: Path) -> None:
    """Another process, here another tier object, finds and reads it."""
    manifest = saved(tier_of(str(tmp_path / "a" / "b")), iteration=12, epoch=3)

    tier = tier_of(str(tmp_path / "a" / "b"))
    assert manifest == tier.newest()
    for layer in range(2):
        assert_same(layer_tensors(layer), tier.read_layer(manifest, layer))


DTYPES = st.sampled_from(["<f8", "<f4", "<f2", "<i8", "<i4", "<i2", "i1", "<u8", "<u2", "u1", "?"])
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))


@settings(max_examples=30)
@given(tensors=st.dictionaries(st.text("abc./_", min_size=1, max_size=9), ARRAYS, max_size=4))
def test_any_tensors_read_back_the_same(
    tensors: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Scalars, empty tensors, every element type, a layer without parameters; and writable."""
    tier = tier_of(str(tmp_path_factory.mktemp("tier")))
    file = tier.write_layer(1, 0, 0, tensors)

    read = tier.read_layer(Manifest(iteration=1, epoch=0, job={}, layers=(file,)), 0)

    assert_same(tensors, read)
    assert all(array.flags.writeable for array in read.values())


def test_bfloat16_and_strided_arrays_keep_their_bits(tmp_path: Path) -> None:
    """Numpy knows no bfloat16: its bits travel, and the file says BF16 to other readers."""
    tier = tier_of(str(tmp_path))
    bits = np.array([[0x3F80, 0xFFC1], [0x0001, 0x8000]], dtype=np.uint16)
    transposed = np.arange(6, dtype=np.float32).reshape(2, 3).T
    big_endian = np.arange(3, dtype=">f4")
    tensors = {"a": bits.view(BFLOAT16), "b": transposed, "c": big_endian}
    file = tier.write_layer(1, 0, 0, tensors)

    read = tier.read_layer(Manifest(iteration=1, epoch=0, job={}, layers=(file,)), 0)

    assert read["a"].dtype == BFLOAT16
    assert read["a"].view(np.uint16).tolist() == bits.tolist()
    assert read["b"].tolist() == transposed.tolist()
    assert read["c"].tolist() == [0.0, 1.0, 2.0]
    with safetensors.safe_open(tmp_path / "1-0" / file.file, framework="np") as other:
        assert other.get_slice("a").get_dtype() == "BF16"


def test_layer_files_are_plain_safetensors(tmp_path: Path) -> None:
    """Any reader of the format opens a checkpoint of planaria."""
    manifest = saved(tier_of(str(tmp_path)), iteration=1)

    assert_same(
        layer_tensors(1),
        safetensors.numpy.load_file(layer_path(tier_of(str(tmp_path)), manifest, 1)),
    )


@pytest.mark.parametrize("position", [0, 8, 200, -1])
def test_a_flipped_bit_is_refused_by_file_name(tmp_path: Path, position: int) -> None:
    """In the length, the header or the data: no wrong number reaches a model."""
    tier = tier_of(str(tmp_path))
    manifest = saved(tier, iteration=5)
    path = layer_path(tier, manifest, 1)
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)

    with pytest.raises(
        CheckpointError, match=r"layer-00001\.safetensors does not hold what was written"
    ):
        tier.read_layer(manifest, 1)
    assert_same(layer_tensors(0), tier.read_layer(manifest, 0))


def test_a_truncated_file_makes_its_version_incomplete(tmp_path: Path) -> None:
    """The version before it is the newest again, and reading the cut file is refused."""
    tier = tier_of(str(tmp_path))
    older, newer = saved(tier, iteration=5), saved(tier, iteration=6)
    path = layer_path(tier, newer, 0)
    path.write_bytes(path.read_bytes()[:-1])

    assert older == tier.newest()
    assert "layer-00000.safetensors has" in tier.versions()[0].reason
    with pytest.raises(CheckpointError, match="it was cut"):
        tier.read_layer(newer, 0)


def test_a_missing_layer_file_makes_its_version_incomplete(tmp_path: Path) -> None:
    """As when a copy of the directory was interrupted."""
    tier = tier_of(str(tmp_path))
    older, newer = saved(tier, iteration=5), saved(tier, iteration=6)
    layer_path(tier, newer, 1).unlink()

    assert older == tier.newest()
    assert tier.versions()[0].reason == "layer-00001.safetensors is missing"
    with pytest.raises(CheckpointError, match="No such file"):
        tier.read_layer(newer, 1)
    with pytest.raises(CheckpointError, match="has no layer 9"):
        tier.read_layer(older, 9)


def test_an_unpublished_version_is_not_seen(tmp_path: Path) -> None:
    """A job killed half way through a save resumes from the save before."""
    tier = tier_of(str(tmp_path))
    older = saved(tier, iteration=5)
    tier.write_layer(6, 0, 0, layer_tensors(0))

    assert older == tier.newest()
    assert tier.versions()[0].manifest is None
    assert tier.versions()[0].reason == "it has no manifest, so its save was never completed"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "bad manifest"),
        (b'{"version": 1, "iteration": 6', "bad manifest"),
        (b'{"version": 1, "iteration": "6", "epoch": 0, "job": {}, "layers": []}', "bad manifest"),
        (b'{"version": 2, "iteration": 6, "epoch": 0, "job": {}, "layers": []}', "version 2"),
        (b'{"version": 1, "iteration": 7, "epoch": 0, "job": {}, "layers": []}', "version 7-0"),
        (b'{"version": 1, "iteration": 6, "epoch": 0, "job": {}, "layers": []}', "no layers"),
        (
            b'{"version": 1, "iteration": 6, "epoch": 0, "job": {}, "layers": [OUTSIDE]}',
            "file name '../../x'",
        ),
    ],
)
def test_a_bad_manifest_is_skipped_and_explained(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    """Cut short, of another format, of another version or pointing elsewhere; never deleted."""
    tier = tier_of(str(tmp_path))
    older = saved(tier, iteration=5)
    (tmp_path / "6-0").mkdir()
    (tmp_path / "6-0" / "manifest.json").write_bytes(content.replace(b"OUTSIDE", OUTSIDE))

    assert older == tier.newest()
    assert reason in tier.versions()[0].reason
    saved(tier, iteration=7)
    assert tier.prune(1) == ("5-0",)
    assert (tmp_path / "6-0").exists()


def test_newest_orders_by_number_not_by_text(tmp_path: Path) -> None:
    """10 is after 9, and a later epoch wins where the iteration is the same."""
    tier = tier_of(str(tmp_path))
    for iteration, epoch in [(9, 8), (10, 2), (10, 11), (2, 30)]:
        saved(tier, iteration, epoch)
    (tmp_path / "notes").mkdir()
    (tmp_path / "011-0").mkdir()

    assert [(v.iteration, v.epoch) for v in tier.versions()] == [(10, 11), (10, 2), (9, 8), (2, 30)]
    assert tier.newest() == tier.versions()[0].manifest


def test_an_empty_tier_has_no_versions(tmp_path: Path) -> None:
    """A first start looks before anything was written, and leaves no trace."""
    tier = tier_of(str(tmp_path / "none"))

    assert tier.newest() is None
    assert tier.versions() == ()
    assert tier.prune(1) == ()
    assert not (tmp_path / "none").exists()


def test_iteration_0_may_have_no_layers(tmp_path: Path) -> None:
    """It means: start from the seed. Of any later iteration it would be a lost model."""
    tier = tier_of(str(tmp_path))
    start = Manifest(iteration=0, epoch=0, job=JOB, layers=())
    tier.publish(start)

    assert start == tier.newest()
    with pytest.raises(AssertionError):
        tier.publish(Manifest(iteration=1, epoch=0, job=JOB, layers=()))


def test_publishing_twice_is_refused(tmp_path: Path) -> None:
    """Two savers that both think they lead: the first one's manifest stands, and its files."""
    tier = tier_of(str(tmp_path))
    manifest = saved(tier, iteration=5)
    other = Manifest(iteration=5, epoch=0, job={"model": "other"}, layers=manifest.layers)

    with pytest.raises(CheckpointError, match="belongs to another job"):
        tier.publish(other)
    with pytest.raises(CheckpointError, match="is complete and must not change"):
        tier.write_layer(5, 0, 0, layer_tensors(3))
    with pytest.raises(CheckpointError, match="its version is complete"):
        tier.discard(5, 0)
    assert manifest == tier.newest()
    assert_same(layer_tensors(0), tier.read_layer(manifest, 0))
    assert not list(tmp_path.rglob("*.partial"))


def test_publishing_without_a_layer_is_refused(tmp_path: Path) -> None:
    """The manifest is a promise that every file is there."""
    tier = tier_of(str(tmp_path))
    written = tier.write_layer(5, 0, 0, layer_tensors(0))
    lost = LayerFile(1, "layer-00001.safetensors", 10, "")

    with pytest.raises(CheckpointError, match=r"layer-00001\.safetensors is missing"):
        tier.publish(Manifest(iteration=5, epoch=0, job=JOB, layers=(written, lost)))
    assert tier.newest() is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("failing", ["write", "fsync"])
def test_a_full_disk_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, failing: str
) -> None:
    """The error names the file and the way out, the layer's last whole file stays, later works."""
    tier = tier_of(str(tmp_path))
    older = saved(tier, iteration=5)
    first = tier.write_layer(6, 0, 0, layer_tensors(0))

    with monkeypatch.context() as patched:
        refuse(patched, failing, number)
        with pytest.raises(CheckpointError, match=r"6-0/layer-00000.*checkpoint\.directory"):
            tier.write_layer(6, 0, 0, layer_tensors(1))
        with pytest.raises(CheckpointError, match=r"6-0/manifest.*checkpoint\.directory"):
            tier.publish(Manifest(iteration=6, epoch=0, job=JOB, layers=(first,)))

    assert [path.name for path in (tmp_path / "6-0").iterdir()] == [first.file]
    assert older == tier.newest()
    tier.publish(Manifest(iteration=6, epoch=0, job=JOB, layers=(first,)))
    newest = tier.newest()
    assert newest is not None
    assert_same(layer_tensors(0), tier.read_layer(newest, 0))


def test_a_version_that_cannot_be_read_now_is_not_taken_for_none(tmp_path: Path) -> None:
    """Which one is the newest is not known then; that of an older one is no matter."""
    tier = tier_of(str(tmp_path))
    saved(tier, iteration=5)
    newer = saved(tier, iteration=6)

    with refused_reads(tmp_path / "6-0"):
        assert [version.is_unreadable for version in tier.versions()] == [True, False]
        with pytest.raises(
            UnreadableError, match=r"cannot read .*6-0/manifest\.json: Input/output"
        ):
            tier.newest()
        assert newest_checkpoint_text(tier).startswith(
            "the newest checkpoint is not known: cannot read"
        )
    with refused_reads(tmp_path / "5-0"):
        assert tier.newest() == newer
    assert (
        newest_checkpoint_text(tier)
        == "the newest checkpoint is of iteration 6; go on from it with --resume"
    )


def refuse(patched: pytest.MonkeyPatch, failing: str, number: int) -> None:
    """From now on the disk takes half of what is written and fails, or fails to sync."""

    def fsync(_descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    def open_failing(path: Path, mode: str) -> "HalfWriter":
        return HalfWriter(path, mode, number)

    if failing == "fsync":
        patched.setattr(os, "fsync", fsync)
    else:
        patched.setattr(Path, "open", open_failing)


class HalfWriter:
    """A file that takes the first half of what is written and then fails."""

    def __init__(self, path: Path, mode: str, number: int) -> None:
        self._file = open(path, mode)  # noqa: SIM115
        self._number = number

    def __enter__(self) -> "HalfWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, content: bytes) -> None:
        self._file.write(content[: len(content) // 2])
        self._file.flush()
        raise OSError(self._number, os.strerror(self._number))


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """A file where the directory should be, as after a typing mistake."""
    (tmp_path / "file").write_text("not a directory")

    with pytest.raises(CheckpointError, match=r"cannot write .*set checkpoint\.directory"):
        tier_of(str(tmp_path / "file")).write_layer(1, 0, 0, layer_tensors(0))


def test_prune_keeps_the_newest_and_what_is_being_written(tmp_path: Path) -> None:
    """Abandoned directories go only where a newer complete version shows that they are."""
    tier = tier_of(str(tmp_path))
    for iteration in (1, 3, 5, 7):
        saved(tier, iteration)
    for unfinished in (2, 6, 8):
        tier.write_layer(unfinished, 0, 0, layer_tensors(0))

    removed = tier.prune(2)

    assert list(removed) == ["1-0", "2-0", "3-0", "6-0"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["5-0", "7-0", "8-0"]
    assert tier.prune(2) == ()


def test_prune_0_keeps_every_complete_version(tmp_path: Path) -> None:
    """checkpoint.keep = 0 means all."""
    tier = tier_of(str(tmp_path))
    saved(tier, 1)
    tier.write_layer(2, 0, 0, layer_tensors(0))
    saved(tier, 3)

    assert tier.prune(0) == ("2-0",)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-0", "3-0"]


def test_a_version_that_cannot_be_removed_holds_up_no_other(tmp_path: Path) -> None:
    """It was the first one again each time, and the disk filled up."""
    tier = tier_of(str(tmp_path))
    for iteration in (10, 20, 30, 40, 50):
        saved(tier, iteration)
    (tmp_path / "10-0" / "notes").mkdir()
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"cannot remove .*10-0/notes"):
            tier.prune(2)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["10-0", "40-0", "50-0"]


def test_prune_cut_short_leaves_no_version_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest goes first: a kill right after it leaves an incomplete version."""
    tier = tier_of(str(tmp_path))
    saved(tier, 1)
    newest = saved(tier, 2)

    unlink = Path.unlink

    def killed(path: Path, *, missing_ok: bool) -> None:
        if path.name != "manifest.json":
            raise KeyboardInterrupt
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            tier.prune(1)

    assert [v.manifest for v in tier.versions()] == [newest, None]
    assert tier.prune(1) == ("1-0",)


def test_discard_removes_what_a_write_that_failed_has_left(tmp_path: Path) -> None:
    """The disk is full: there is a directory, and nothing in it."""
    tier = tier_of(str(tmp_path))
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        patch("planaria.checkpoint.disk.storage._write_synced", side_effect=full),
        pytest.raises(CheckpointError, match="No space left"),
    ):
        tier.write_layer(6, 1, 0, layer_tensors(0))

    tier.discard(6, 1)

    assert not list(tmp_path.iterdir())


def test_discard_removes_an_unfinished_version(tmp_path: Path) -> None:
    """A save that a failure overtook is thrown away; twice is once."""
    tier = tier_of(str(tmp_path))
    tier.write_layer(6, 1, 0, layer_tensors(0))

    tier.discard(6, 1)
    tier.discard(6, 1)

    assert tier.versions() == ()


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}], ids=["none", "pt"])
def test_a_file_is_laid_out_as_the_safetensors_library_does(
    metadata: dict[str, str] | None,
) -> None:
    """Byte for byte, empty tensors, scalars and names that need escapes among them."""
    dtypes = ["<f8", "<f4", "<f2", "<i8", "<i4", "<i2", "i1", "<u8", "<u4", "<u2", "u1", "?"]
    tensors: dict[str, np.ndarray] = {
        f't{n}/\u00fc"{d}': np.arange(n % 3, dtype=d) for n, d in enumerate(dtypes)
    }
    tensors |= {"scalar": np.array(3, dtype=np.int64), "matrix": np.ones((2, 3), np.float32).T}
    content = b"".join(parts_of(safetensors_content(tensors, metadata=metadata)))

    assert content == safetensors.numpy.save(tensors, metadata)
    assert_same(tensors, tensors_in("here", content))
