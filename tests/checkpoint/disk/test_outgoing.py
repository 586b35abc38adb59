"""What is taken out of a tier in which a job saves and prunes meanwhile."""

import errno
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors.numpy import save
from xxhash import xxh3_128_hexdigest

from helpers.object_store import object_store
from planaria.checkpoint.disk import storage
from planaria.checkpoint.disk.outgoing import export_parameters, kept_saves, save_as
from planaria.checkpoint.disk.tiers import Manifest, Tier, tier_of
from planaria.core.job import JobConfig, ModelConfig
from planaria.core.messages import LayerFile
from planaria.core.specs import Prepared
from planaria.errors import CheckpointError, ConfigError
from planaria.job.save_facts import save_facts

LAYERS = 3


@pytest.fixture(params=["directory", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with object_store() if request.param == "store" else nullcontext(str(tmp_path)) as where:
        yield where


def saved(tier: Tier, iteration: int, *, tokenizer_file: str = "") -> Manifest:
    tensors = {"parameter/w": np.full(4, iteration, np.float32)}
    files = tuple(tier.write_layer(iteration, 0, layer, tensors) for layer in range(LAYERS))
    job = {"tokenizer_file": tokenizer_file}
    manifest = Manifest(iteration=iteration, epoch=0, job=job, layers=files)
    tier.publish(manifest)
    return manifest


def before_each_second_layer(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[Tier, Manifest], None]
) -> None:
    """Has something happen to the tier in the middle of each reading of a version."""
    read_layer = Tier.read_layer

    def interrupted(tier: Tier, manifest: Manifest, layer: int) -> dict[str, np.ndarray]:
        if layer == 1:
            act(tier, manifest)
        return read_layer(tier, manifest, layer)

    monkeypatch.setattr(Tier, "read_layer", interrupted)


def test_a_version_that_is_pruned_while_it_is_kept_makes_way_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times a job saves two versions between one layer and the next."""
    tier = tier_of(str(tmp_path))
    saved(tier, 1)

    def save_two(source: Tier, manifest: Manifest) -> None:
        if manifest.iteration < 7:
            saved(source, manifest.iteration + 1)
            saved(source, manifest.iteration + 2)
            source.prune(2)

    before_each_second_layer(monkeypatch, save_two)

    assert save_as(str(tmp_path), "best") == str(tmp_path / "best" / "7-0")
    kept = tier_of(str(tmp_path / "best"))
    assert [version.name for version in kept.versions()] == ["7-0"]
    newest = kept.newest()
    assert newest is not None
    assert kept.read_layer(newest, 2)["parameter/w"].tolist() == [7.0] * 4


def test_one_that_is_pruned_again_and_again_is_given_up_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that saves faster than it can be read; the name stays free."""
    saved(tier_of(str(tmp_path)), 1)

    def save_one(source: Tier, manifest: Manifest) -> None:
        saved(source, manifest.iteration + 1)
        source.prune(1)

    before_each_second_layer(monkeypatch, save_one)

    with pytest.raises(CheckpointError, match="cannot read"):
        save_as(str(tmp_path), "best")
    assert not (tmp_path / "best").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, CheckpointError])
def test_what_was_half_copied_is_removed(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of a large model, or a disk that refuses."""
    saved(tier_of(str(tmp_path)), 1)

    def fail(_tier: Tier, _manifest: Manifest) -> None:
        raise error

    before_each_second_layer(monkeypatch, fail)

    with pytest.raises(error):
        save_as(str(tmp_path), "best")
    assert not (tmp_path / "best").exists()


def test_a_learned_tokenizer_is_kept_with_its_save(place: str) -> None:
    """An export from there had no tokenizer."""
    tier = tier_of(place)
    saved(tier, 1, tokenizer_file="/gone/tokenizer-1.json")
    tier.storage.create("tokenizer-1.json", b"learned")

    save_as(place, "best")

    assert tier_of(f"{place}/best").storage.read("tokenizer-1.json") == b"learned"
    assert [version.name for version in tier_of(f"{place}/best").versions()] == ["1-0"]


def test_a_learned_tokenizer_is_removed_with_a_copy_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk refuses the last file alone."""
    tier = tier_of(str(tmp_path))
    (tmp_path / "learned.json").write_text("learned")
    saved(tier, 1, tokenizer_file=str(tmp_path / "learned.json"))
    monkeypatch.setattr(Tier, "publish", Mock(side_effect=CheckpointError("full")))

    with pytest.raises(CheckpointError, match="full"):
        save_as(str(tmp_path), "best")
    assert not (tmp_path / "best").exists()


def test_two_at_once_do_not_share_a_name(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one's undo removed the layers of the first one, or its manifest."""
    tier, refused = tier_of(place), list[str]()
    saved(tier, 1)

    def save_the_second(_tier: Tier, _manifest: Manifest) -> None:
        if not refused:
            with pytest.raises(ConfigError, match="another process is saving under") as caught:
                save_as(place, "best")
            refused.append(caught.value.remedy)

    before_each_second_layer(monkeypatch, save_the_second)

    assert save_as(place, "best") == f"{place}/best/1-0"
    kept = tier_of(f"{place}/best")
    newest = kept.newest()
    assert newest is not None
    assert [kept.read_layer(newest, n)["parameter/w"].sum() for n in range(LAYERS)] == [4.0] * 3
    assert f"remove {place}/best/.claim" in refused[0]
    assert kept.storage.versions() == ["1-0"]


def test_a_name_that_a_killed_process_has_claimed_is_free_once_its_file_is_removed(
    place: str,
) -> None:
    tier = tier_of(place)
    saved(tier, 1)
    assert tier.storage.create("best/.claim", b"of another")

    with pytest.raises(ConfigError, match="or was killed while it did"):
        save_as(place, "best")
    assert kept_saves(place) == {}
    assert [version.name for version in tier.versions()] == ["1-0"]
    assert tier_of(f"{place}/best").versions() == ()
    tier.storage.remove("best", ["best/.claim"])
    save_as(place, "best")
    assert [*kept_saves(place)] == ["best"]


def test_a_layer_that_was_laid_out_otherwise_is_kept_as_it_is_written_now(tmp_path: Path) -> None:
    """Its header has something that ours has not, so its hash is another one."""
    tier = tier_of(str(tmp_path))
    tensors = {"parameter/w": np.arange(4, dtype=np.float32)}
    ours = tier.write_layer(1, 0, 0, tensors)
    content = save(tensors, metadata={"format": "np"})
    tier.storage.write(f"1-0/{ours.file}", content, may_write=lambda: True)
    theirs = LayerFile(0, ours.file, len(content), xxh3_128_hexdigest(content))
    tier.publish(Manifest(iteration=1, epoch=0, job={}, layers=(theirs,)))

    save_as(str(tmp_path), "best")
    kept = tier_of(str(tmp_path / "best"))
    newest = kept.newest()
    assert newest is not None
    assert newest.layers == (ours,)
    assert kept.read_layer(newest, 0)["parameter/w"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_an_export_has_the_tokenizer_of_the_model_that_training_began_with(tmp_path: Path) -> None:
    """Whatever that consists of, and no weights; and the same from where that model is now."""
    companions = (
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json"),
        *("merges.txt", "spiece.model", "chat_template.jinja", "generation_config.json"),
        *("additional_chat_templates/tool.jinja", "preprocessor_config.json"),
    )
    others = ("model.safetensors", "optimizer.pt", "README.md", "checkpoint-3/tokenizer.json")
    for name in (*companions, *others, "config.json"):
        (tmp_path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / name).write_text(f"of {name}")
    config = JobConfig(model=ModelConfig(path=str(tmp_path / "model")))
    tier, tensors = tier_of(str(tmp_path / "saves")), {"parameter/w": np.ones(4, np.float32)}
    manifest = Manifest(
        iteration=1,
        epoch=0,
        job=save_facts(config, Prepared(config={"model_type": "gpt2"}, vocabulary_size=9)),
        layers=(tier.write_layer(1, 0, 0, tensors),),
    )
    tier.publish(manifest)
    read = tier.newest()
    assert read is not None

    names = export_parameters(tier, read, tmp_path / "exported")
    (tmp_path / "model").rename(tmp_path / "moved")
    without = export_parameters(tier, read, tmp_path / "without")
    again = export_parameters(tier, read, tmp_path / "again", origin=str(tmp_path / "moved"))

    assert set(names) == {"model.safetensors", "config.json", *companions}
    assert again == names
    assert set(without) == {"model.safetensors", "config.json"}
    for name in companions:
        assert (tmp_path / "exported" / name).read_text() == f"of {name}"


def test_an_export_that_fills_the_disk_names_its_own_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not in the directory of the saves."""
    tier = tier_of(str(tmp_path / "saves"))
    manifest = saved(tier, 1)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(storage, "_write_synced", Mock(side_effect=full))

    with pytest.raises(CheckpointError) as raised:
        export_parameters(tier, manifest, tmp_path / "out")

    where = tmp_path / "out" / "model.safetensors"
    remedy = "free some space there, or set --output to a larger disk"
    assert str(raised.value) == f"cannot write {where}: No space left on device; {remedy}"


def test_a_job_that_goes_on_from_a_named_save_does_not_prune_it(tmp_path: Path) -> None:
    """It saves beside it. What it saves itself it prunes as ever."""
    saved(tier_of(str(tmp_path)), 7)
    save_as(str(tmp_path), "best")
    kept = tier_of(str(tmp_path / "best"))
    for iteration in (8, 9, 10):
        saved(kept, iteration)

    assert kept.prune(2) == ("8-0",)
    assert [(version.name, version.is_kept) for version in kept.versions()] == [
        ("10-0", False),
        ("9-0", False),
        ("7-0", True),
    ]
    assert kept.prune(1) == ("9-0",)
    assert save_as(str(tmp_path / "best"), "again") == str(tmp_path / "best" / "again" / "10-0")


def test_a_named_save_that_was_cut_short_is_removed_like_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only whoever has it complete keeps it."""
    saved(tier_of(str(tmp_path)), 7)
    with monkeypatch.context() as patched:
        patched.setattr(Tier, "publish", Mock(side_effect=KeyboardInterrupt))
        patched.setattr(Tier, "discard", Mock(side_effect=CheckpointError("killed before it")))
        with pytest.raises(KeyboardInterrupt):
            save_as(str(tmp_path), "best")
    kept = tier_of(str(tmp_path / "best"))
    assert (tmp_path / "best" / "7-0" / "kept").exists()
    saved(kept, 8)

    assert kept.prune(2) == ("7-0",)
    assert not (tmp_path / "best" / "7-0").exists()
