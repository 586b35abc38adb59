"""What a job is told of its plan before its nodes start."""

import re

from command import PACED
from planaria.config import load_job
from planaria.core.specs import Prepared
from planaria.planning import ACTION_S_MIN, given_profile, plan_job, short_actions_text


def _told(time_scale: float) -> str:
    config = load_job(PACED, overrides=[f"model.time_scale={time_scale}"])
    return short_actions_text(plan_job(config, Prepared(profile=given_profile(config))))


def test_a_paced_job_of_short_actions_is_told_a_time_scale_that_would_do() -> None:
    """What it names is enough, and a little less is not."""
    assert _told(1.0) == ""
    found = re.search(r"model\.time_scale = (\S+) would do", _told(0.01))
    assert found
    enough = float(found[1])

    assert f"below {1000 * ACTION_S_MIN:.0f} ms" in _told(0.99 * enough)
    assert _told(1.01 * enough) == ""
