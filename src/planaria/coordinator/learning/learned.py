"""What a coordinator learns of its job: how far measured seconds are from predicted ones.

Findings are recorded with the members of an epoch, so that a new coordinator knows them. It has to
repeat measurements that were not finished.
"""

from collections.abc import Mapping

import msgspec

from planaria.coordinator.job_rules import Rules
from planaria.core.findings import Findings
from planaria.policies.policy import Policy


class Learning(msgspec.Struct, frozen=True, kw_only=True):
    """What a coordinator has learned, and what it is measuring.

    Attributes:
        findings: findings so far; recorded with the newest members and with each commit.
        fitted: rules with raised memory estimates, see memory_estimates.py; None: none was raised.
        policy: policy that proposes and prices by these findings; None: they change no price yet.
        ratios: measured over predicted seconds of computing in the newest iterations of this epoch,
            by rank; see profile_correction.py.
        rests: seconds of the newest iterations of this epoch that no forward or backward explains.
        plan_s: predicted seconds of an iteration with the epoch's plan, without `beside_s` of the
            findings; 0: the prediction of the decision holds.
        computing_s: predicted seconds of forwards and backwards in such an iteration, by rank;
            empty if each rank has its own processor.
        told_s: time at which all were told the answer to the newest loss, or before that, the time
            at which it was chosen; 0: no recovery is being timed. See overhead.py.
        transfer_s: seconds that the recovery's transfers should take by the links as they were
            known when it was chosen.
        recovery_s: predicted seconds of this recovery since its loss was noticed; 0: no prediction
            is open. See foresight.py.
    """

    findings: Findings = msgspec.field(default_factory=Findings)
    fitted: Rules | None = None
    policy: Policy | None = None
    ratios: Mapping[int, tuple[float, ...]] = msgspec.field(default_factory=dict)
    rests: tuple[float, ...] = ()
    plan_s: float = 0.0
    computing_s: Mapping[int, float] = msgspec.field(default_factory=dict)
    told_s: float = 0.0
    transfer_s: float = 0.0
    recovery_s: float = 0.0
