"""What a job is told of its plan before its nodes start."""

import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.command import PACED
from helpers.refused_reads import refused_reads
from planaria.checkpoint.disk.storage import Content, ContentInfo, Storage, storage_of
from planaria.checkpoint.disk.tiers import Manifest, Start, Tier, tier_of
from planaria.core.specs import Prepared
from planaria.errors import CheckpointError, ConfigError, UnwritableError
from planaria.job import places
from planaria.job.config import job_from_dict, load_job
from planaria.job.places import find_start, starting_point
from planaria.job.planning import (
    ACTION_S_MIN,
    cache_directory,
    given_profile,
    plan_job,
    problem_of,
    read_profile,
    short_actions_text,
)
from planaria.job.save_facts import fingerprint
from planaria.profiles.profile_json import encode_profile


def _told(time_scale: float) -> str:
    config = load_job(PACED, overrides=[f"model.time_scale={time_scale}"])
    return short_actions_text(plan_job(config, Prepared(profile=given_profile(config))))


def test_a_paced_job_of_short_actions_is_told_a_time_scale_that_would_do() -> None:
    """What it names is enough, and a little less is not."""
    assert _told(1.0) == ""
    found = re.search(r"set model\.time_scale = (\S+)", _told(0.01))
    assert found
    enough = float(found[1])

    assert f"below {1000 * ACTION_S_MIN:.0f} ms" in _told(0.99 * enough)
    assert _told(1.01 * enough) == ""


def test_a_paced_job_of_other_microbatches_than_its_profiles_is_refused() -> None:
    """Its layers would sleep as long for three samples as for one; types are only a name there."""
    of_three, of_bfloat16 = (
        load_job(PACED, overrides=[setting])
        for setting in ("training.microbatch_size=3", 'training.dtype="bfloat16"')
    )

    with pytest.raises(
        ConfigError, match="microbatch_size is 1 in the profile and 3 in the job"
    ) as caught:
        given_profile(of_three)
    assert "set training.microbatch_size = 1" in caught.value.remedy
    assert given_profile(of_bfloat16) == given_profile(load_job(PACED))


def test_a_paced_job_of_layers_that_take_no_time_is_refused(tmp_path: Path) -> None:
    """Its iterations would have no length to speak of."""
    profile = read_profile(PACED.with_name("paced-profile.json"))
    timeless = {1: 0.0}
    layers = tuple(
        replace(layer, forward_s=timeless, backward_input_s=timeless, backward_weight_s=timeless)
        for layer in profile.layers
    )
    path = tmp_path / "timeless.json"
    path.write_bytes(encode_profile(replace(profile, layers=layers)))
    config = load_job(PACED, overrides=[f"model.profile={path}"])

    with pytest.raises(ConfigError, match="take no time at all"):
        given_profile(config)


@pytest.mark.parametrize("compiles", [False, True])
def test_backwards_of_compiled_layers_are_not_split(*, compiles: bool) -> None:
    """Each is one node of autograd, so both parts would run the whole backward."""
    config = load_job(PACED)
    profile = given_profile(config)
    assert profile is not None
    config = replace(config, training=replace(config.training, compile=compiles))

    assert problem_of(config, profile, processors=0).splits_backward == (not compiles)


@pytest.mark.parametrize("base", ["/proc/nobody", "~"], ids=["read-only", "no home"])
def test_tokens_are_kept_elsewhere_where_the_home_cannot_be_written(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may run as a user whom no table knows, or whose home is read-only. A directory
    that somebody else has made in /tmp is not used."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", base)

    found = cache_directory()

    assert found == str(tmp_path / f"planaria-cache-{os.getuid()}")
    assert os.access(found, os.W_OK)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert cache_directory() == f"{base}/planaria"


def test_a_job_begins_where_there_is_no_directory_for_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One without text needs none."""

    def refuse() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nobody")

    assert cache_directory() == "/proc/nobody/planaria"


def test_tokens_are_kept_where_the_user_wants_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is made if need be."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    assert cache_directory() == str(tmp_path / "cache" / "planaria")


@pytest.mark.parametrize("resume", [False, True])
def test_a_job_does_not_start_beside_a_save_that_cannot_be_read_now(
    tmp_path: Path, resume: bool
) -> None:
    """Once it can be read, it counts as newer than all that the job has saved, and they go."""
    config = load_job(PACED, overrides=[f"checkpoint.directory={tmp_path}"])
    tier = tier_of(str(tmp_path))
    for epoch in (0, 1):
        tier.publish(Manifest(iteration=0, epoch=epoch, job={}, layers=()))

    with (
        refused_reads(tmp_path / "0-1"),
        pytest.raises(ConfigError, match=r"checkpoint\.directory = .* cannot read .*0-1/manifest"),
    ):
        starting_point(config, tier, resume=resume)


def test_a_run_begins_with_an_epoch_that_no_save_has(tmp_path: Path) -> None:
    """A damaged save of a name must not change, and no save of that name was ever complete."""
    config = load_job(PACED, overrides=[f"checkpoint.directory={tmp_path}"])
    profile, tier = given_profile(config), tier_of(str(tmp_path))
    files = (tier.write_layer(20, 1, 0, {"parameter/w": np.zeros(3, np.float32)}),)
    job = dict(fingerprint(config))
    tier.publish(Manifest(iteration=20, epoch=1, job=job, layers=files))
    (tmp_path / "20-1" / files[0].file).unlink()
    notes: list[str] = []

    anew = find_start(config, resume=False, note=notes.append)
    assert anew == Start(epoch=2)
    sound = Manifest(iteration=0, epoch=0, job=job, layers=())
    tier.publish(sound)
    start = find_start(config, resume=True, note=notes.append)

    assert start == Start(sound, epoch=2)
    assert any("20-1 is not complete" in note for note in notes)
    assert plan_job(config, Prepared(profile=profile), start=start).plan.epoch == 2


@dataclass(frozen=True)
class _Store:
    """A store that answers requests to create an object as a test wants it to.

    Attributes:
        create: function that does it.
        has_removal: whether it removes objects.
    """

    storage: Storage
    create: Callable[[str, bytes], bool]
    has_removal: bool = True

    def where(self, name: str) -> str:
        return self.storage.where(name)

    def entries(self, version: str) -> dict[str, ContentInfo]:
        return self.storage.entries(version)

    def versions(self) -> list[str]:
        return self.storage.versions()

    def read(self, name: str) -> bytes:
        return self.storage.read(name)

    def write(self, name: str, content: Content, *, may_write: Callable[[], bool]) -> None:
        self.storage.write(name, content, may_write=may_write)

    def remove(self, version: str, names: Sequence[str]) -> None:
        if not self.has_removal:
            raise CheckpointError("cannot remove it: AccessDenied")
        self.storage.remove(version, names)


def _refuse_create(name: str, _: bytes) -> bool:
    raise UnwritableError(f"cannot write {name}: 501 Not Implemented")


@pytest.mark.parametrize(
    ("create", "words"),
    [
        (_refuse_create, "501 Not Implemented; .* must allow to read, write and remove objects"),
        (lambda _name, _content: True, "writes an object again that is to be written once"),
    ],
)
def test_a_store_in_which_no_save_can_be_complete_is_refused_before_training(
    create: Callable[[str, bytes], bool], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first thing that was written there was the last save, after days."""
    url = "memory:///jobs"
    config = load_job(PACED, overrides=[f"checkpoint.directory={url}"])
    tier = Tier(_Store(storage_of(url), create))
    monkeypatch.setattr(places, "tier_of", lambda _: tier)

    with pytest.raises(
        ConfigError, match=rf"checkpoint\.directory = .*no save .* there: .*{words}"
    ):
        find_start(config, resume=False, note=_refuse_notes)


@pytest.mark.parametrize("has_removal", [True, False])
def test_a_store_is_left_as_it_was(has_removal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that removes nothing can be saved to, but the user should know."""
    url, notes = "memory:///jobs", list[str]()
    config = load_job(PACED, overrides=[f"checkpoint.directory={url}"])
    storage = storage_of(url)
    tier = Tier(_Store(storage, storage.create, has_removal))
    monkeypatch.setattr(places, "tier_of", lambda _: tier)
    start = find_start(config, resume=False, note=notes.append)

    assert start == Start()
    assert len(storage.entries("")) == len(notes) == (not has_removal)
    assert notes in ([], ["cannot remove it: AccessDenied; older saves will stay there, too"])


def _refuse_notes(text: str) -> None:
    raise AssertionError(text)


def test_a_save_of_a_model_with_other_layers_is_refused_before_any_node_starts(
    tmp_path: Path,
) -> None:
    """A rank looked for a layer in vain, and all saves were set aside as damaged."""
    config = load_job(PACED, overrides=[f"checkpoint.directory={tmp_path}"])
    profile, tier = given_profile(config), tier_of(str(tmp_path))
    files = (tier.write_layer(20, 1, 0, {"parameter/w": np.zeros(3, np.float32)}),)
    manifest = Manifest(iteration=20, epoch=1, job=dict(fingerprint(config)), layers=files)

    with pytest.raises(ConfigError, match=r"has \d+ layers, and the checkpoint in .* has 1; give"):
        plan_job(config, Prepared(profile=profile), start=Start(manifest, epoch=2))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data": {"target": "m:g"}}, r"^data\.target = 'm:g': .* saved with 'm:f'; set it as it"),
        (
            {"data": {"target": "m:g", "collate": "m:c"}, "training": {"seed": 3}},
            r"^data\.target = .*'m:f', data\.collate = None, training\.seed = 0; set it",
        ),
        (
            {"training": {"optimizer": {"lr": 1}}},
            r"^training\.optimizer\.lr = 1: .*saved with None",
        ),
        (
            {"training": {"decay": "matrices"}},
            r"^training\.decay = 'matrices': .* saved with 'all'; set",
        ),
        ({"name": "other"}, ""),
    ],
)
def test_a_checkpoint_of_another_job_is_refused_by_the_keys_that_differ(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    """Nobody wants to find them in two dicts of ten keys."""
    table = {"kind": "python", "target": "m:f"}
    tables: dict[str, Any] = {"model": table, "data": table}
    tables["checkpoint"] = {"directory": str(tmp_path)}
    tier = tier_of(str(tmp_path))
    saved = fingerprint(job_from_dict(tables))
    manifest = Manifest(iteration=0, epoch=0, job=saved, layers=())
    tier.publish(manifest)
    config = job_from_dict({**tables, **settings, "data": table | settings.get("data", {})})

    if not words:
        assert starting_point(config, tier, resume=True) == manifest
        return
    with pytest.raises(ConfigError, match=words):
        starting_point(config, tier, resume=True)


def test_what_decays_is_compared_with_saves_that_do_not_say_it(tmp_path: Path) -> None:
    """All did, before there was a choice; and a job that leaves the key out means all."""
    table = {
        "model": {"kind": "python", "target": "m:f"},
        "data": {"kind": "python", "target": "m:f"},
    }
    table["checkpoint"] = {"directory": str(tmp_path)}
    matrices = job_from_dict({**table, "training": {"decay": "matrices"}})
    tier = tier_of(str(tmp_path))
    older = {key: value for key, value in fingerprint(matrices).items() if key != "decay"}
    manifest = Manifest(iteration=0, epoch=0, job=older, layers=())
    tier.publish(manifest)

    assert starting_point(job_from_dict(table), tier, resume=True) == manifest
    with pytest.raises(ConfigError, match=r"^training\.decay = 'matrices': .* with 'all'"):
        starting_point(matrices, tier, resume=True)
    tier.publish(Manifest(iteration=0, epoch=1, job=fingerprint(matrices), layers=()))
    with pytest.raises(ConfigError, match=r"^training\.decay = 'all': .* with 'matrices'"):
        starting_point(job_from_dict(table), tier, resume=True)
