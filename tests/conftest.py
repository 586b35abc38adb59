"""What the tests share: one fork server with torch and the model families already imported."""

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from planaria.job.planning import PRELOAD
from planaria.nodes.forkserver import ForkServer

FAMILY_MODULES = tuple(
    f"transformers.models.{family}.modeling_{family}"
    for family in ("gpt2", "llama", "qwen2", "bert")
)

# What is printed must not depend on the terminal or the service that runs the tests.
for _name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "PY_COLORS", "TTY_COMPATIBLE"):
    os.environ.pop(_name, None)

# Torch's threads would wait for each other in busy loops, which several workers and what they start
# have no processors for. Processes of planaria have one thread each, too (forkserver.py).
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("busy", deadline=None)  # No example is wrong because a machine is busy.
settings.load_profile("busy")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects no garbage while test files are imported, and never looks at theirs again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def hang_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While there is such a file, the next forward of `user_models:hanging` hangs."""
    return tmp_path_factory.mktemp("hang") / "hang"


@pytest.fixture(scope="session")
def _strike_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("strike")


@pytest.fixture
def strike_file(_strike_directory: Path) -> Iterator[Path]:
    """What is written there goes wrong in `striking_models`."""
    yield _strike_directory / "strike"
    for path in _strike_directory.iterdir():
        path.unlink()


@pytest.fixture(scope="session")
def server(hang_file: Path, _strike_directory: Path) -> Iterator[ForkServer]:
    """Jobs of the session fork their nodes from here, so that none imports torch again."""
    preload = (*PRELOAD, "transformers.models.auto.modeling_auto", "planaria.models.hf_layers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HANG_FILE", str(hang_file))
        patch.setenv("STRIKE_FILE", str(_strike_directory / "strike"))
        running = ForkServer((*preload, *FAMILY_MODULES), path=[str(Path(__file__).parent)])
    yield running
    running.close()
