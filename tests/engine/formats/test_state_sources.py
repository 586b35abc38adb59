"""What a state is read from: DCP and safetensors, and nothing that runs code."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save

from planaria.engine.formats.state_sources import state_source
from planaria.errors import CheckpointError, ConfigError


def test_tensors_of_all_kinds_are_read_by_name(tmp_path: Path) -> None:
    """From either format; what is no tensor is left out."""
    tensors = {
        "a.weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "b": torch.tensor(7),
        "c": torch.tensor([True, False]),
    }
    (tmp_path / "files").mkdir()
    save_file({"a.weight": tensors["a.weight"]}, tmp_path / "files" / "1.safetensors")
    save_file({name: tensors[name] for name in "bc"}, tmp_path / "files" / "2.safetensors")
    save({**tensors, "notes": "plain"}, checkpoint_id=tmp_path / "dcp", no_dist=True)

    for name in ("files", "dcp"):
        source = state_source(tmp_path / name)
        assert set(source.names) == set(tensors)
        read = source.read(["a.weight", "c"])
        assert set(read) == {"a.weight", "c"}
        assert all(torch.equal(read[each], tensors[each]) for each in read)
        assert source.read([]) == {}


class _Runs:
    def __init__(self, function: Any, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("function", [os.mkdir, eval, torch.load, FileSystemReader, Path.mkdir])
def test_metadata_that_runs_code_is_refused(
    function: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DCP keeps a pickle; only what describes tensors may be in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dcp").mkdir()
    bad = Metadata({}, planner_data=_Runs(function, Path("made")))
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(bad))

    with pytest.raises(CheckpointError, match="does not describe a checkpoint"):
        state_source(tmp_path / "dcp")
    assert not (tmp_path / "made").exists()


def test_a_name_that_two_files_have_is_refused(tmp_path: Path) -> None:
    """An average of the weights lay beside them, and was imported in their place."""
    for number, file in enumerate(("model", "model_ema"), 1):
        save_file({"a": torch.full((2,), float(number))}, tmp_path / f"{file}.safetensors")

    remedy = r"model\.safetensors and model_ema\.safetensors both have a,"
    with pytest.raises(ConfigError, match=remedy):
        state_source(tmp_path)


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    """Or what is damaged."""
    with pytest.raises(ConfigError, match="neither a directory of torch"):
        state_source(tmp_path)
    (tmp_path / "cut.safetensors").write_bytes(b"12")
    with pytest.raises(CheckpointError, match=r"cannot read .*cut\.safetensors"):
        state_source(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps({}))
    with pytest.raises(CheckpointError, match="does not describe a checkpoint"):
        state_source(tmp_path)

    save({"a": torch.ones(9)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    source = state_source(tmp_path / "dcp")
    (tmp_path / "dcp" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*dcp"):
        source.read(["a"])
