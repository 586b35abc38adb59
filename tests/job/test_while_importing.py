"""A module of the user that trains while it is imported, as the processes of a job import it."""

from pathlib import Path

import pytest

from planaria.errors import ConfigError
from planaria.user_functions import refuse_while_importing, user_function

MODULE = """
import planaria

job = planaria.Job(
    planaria.JobConfig(model=planaria.ModelConfig(kind="python", target="{name}:layers"))
)
job.{act}()
"""


@pytest.mark.parametrize("act", ["train", "profile"])
def test_a_module_that_trains_while_it_is_imported_is_told_of_the_guard(
    act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told that another job, which was itself, saves in its directory, or never ended."""
    name = f"unguarded_{act}"
    (tmp_path / f"{name}.py").write_text(MODULE.format(name=name, act=act))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError) as caught:
        user_function(f"{name}:layers", field="model.target")

    assert (caught.value.field, caught.value.value) == ("model.target", f"{name}:layers")
    assert 'put the training under if __name__ == "__main__":' in caught.value.remedy


def test_a_module_that_was_imported_leaves_training_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "guarded.py").write_text("def layers():\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)

    layers = user_function("guarded:layers", field="model.target")

    refuse_while_importing()  # It does not raise.
    assert layers.__name__ == "layers"
