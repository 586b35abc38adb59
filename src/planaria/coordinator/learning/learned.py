"""What a coordinator learns of its job: how far seconds are from predicted ones.

What is found is on record with the members of an epoch, so a new coordinator knows it; what is
being measured it measures anew.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from planaria.core.findings import Findings
from planaria.policies.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """What is known, and what is being measured.

    Attributes:
        findings: on record with the newest members, and with each commit since.
        policy: proposes and prices by these findings; None as long as they change no price.
        ratios: by rank, of its newest iterations in this epoch: seconds that it computed over those
            that are predicted now; see drift.py.
        rests: of its newest iterations in this epoch, what no forward or backward explains.
        plan_s: predicted for an iteration of the epoch's plan, without what there is beside the
            layers; 0: as the decision has it.
        computing_s: by rank, the seconds of its forwards and backwards in that iteration; empty
            where it has processors of its own.
        told_s: when all were told the answer to the newest loss, before that when it was chosen; 0
            if there was none or it is over. See overhead.py.
        transfer_s: that its layers were to take by the profile's links.
        recovery_s: that this recovery is expected to take, from when its loss was noticed; 0 if
            there is none. See foresight.py.
    """

    findings: Findings = field(default_factory=Findings)
    policy: Policy | None = None
    ratios: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    rests: tuple[float, ...] = ()
    plan_s: float = 0.0
    computing_s: Mapping[int, float] = field(default_factory=dict)
    told_s: float = 0.0
    transfer_s: float = 0.0
    recovery_s: float = 0.0
