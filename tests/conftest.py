"""What the tests share: one fork server with torch and the model families already imported."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from planaria.nodes.forkserver import ForkServer
from planaria.planning import PRELOAD

FAMILY_MODULES = tuple(
    f"transformers.models.{family}.modeling_{family}"
    for family in ("gpt2", "llama", "qwen2", "bert")
)


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """Jobs of the session fork their nodes from here, so that none imports torch again."""
    preload = (*PRELOAD, "transformers.models.auto.modeling_auto", "planaria.engine.hf_layers")
    running = ForkServer((*preload, *FAMILY_MODULES), path=[str(Path(__file__).parent)])
    yield running
    running.close()
