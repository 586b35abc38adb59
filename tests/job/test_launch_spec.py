"""What the processes of a job are told depends on where its nodes are."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from planaria.core.job import ClusterConfig, JobConfig
from planaria.core.specs import Prepared
from planaria.job.on_machines import Listening
from planaria.job.training_job import _launch_spec
from planaria.transport.credentials import make_credentials

Checksums = Literal["auto", "on", "off"]


@pytest.mark.parametrize(
    ("checksums", "has_machines", "expected"),
    [
        ("auto", False, False),
        ("auto", True, True),
        ("on", False, True),
        ("on", True, True),
        ("off", True, False),
    ],
)
def test_messages_have_checksums_where_the_job_is_on_machines(
    checksums: Checksums, has_machines: bool, expected: bool
) -> None:
    """Between processes of one machine they cost much, and nothing damages messages there."""
    config = replace(JobConfig(), cluster=replace(ClusterConfig(), checksums=checksums))
    listening = Listening(
        address=":0", credentials=make_credentials(), nodes_min=1, nodes_max=1, wait_s=0.0
    )
    spec = _launch_spec(_planned(config), (), _begun(), False, listening if has_machines else None)

    assert spec.node.checks_links is expected


def _planned(config: JobConfig) -> Any:
    """A planned job as far as it is looked at here."""
    return SimpleNamespace(
        config=config,
        resumed=None,
        catalog=SimpleNamespace(templates={}, plans={}),
        prepared=Prepared(),
        predicted=SimpleNamespace(iteration_s=1.0),
        plan=SimpleNamespace(slow_nodes={}),
        problem=None,
    )


def _begun() -> Any:
    return SimpleNamespace(journal="", head=None, machines={}, parts="")
