"""Rates of failures that were published, each with its source.

A node is a machine, which has 8 devices in all of these clusters except Odyssey's, whose rate is
per device, and Bamboo's, whose machines have one.

Only InfiniteHBD's trace says how long a lost machine is away. Where a source is silent, its
distribution is used, and `assumed` says so. With standby nodes the repair hardly matters, since a
standby takes the place; without, `failures.repair_s` sets another one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from planaria.simulator.failures.random_losses import BURST_NODES, Lemons, PoissonLosses
from planaria.simulator.failures.repair_times import NEVER, RepairTime, TimeShape

_DAY_H: Final = 24.0
_DAY_S: Final = 86_400.0
_INFINITEHBD_REPAIR: Final = RepairTime(5.55 * _DAY_S, TimeShape.LOGNORMAL)
_REPAIR_ASSUMED: Final = "repair as in InfiniteHBD's trace"


@dataclass(frozen=True, slots=True)
class Preset:
    """A published rate of failures.

    Attributes:
        per_node_hour: losses per hour of a node that is there; of a device if is_per_device.
        published: numbers that the source prints.
        source: document that prints them.
        repair: time that a lost node is away.
        assumed: part of the preset that the source does not say.
        burst_nodes: mean number of nodes that are lost at once.
        lemons: nodes that have more than their share of the losses.
        is_per_device: whether the rate is that of a device, so that a node has it once for each.
    """

    per_node_hour: float
    published: str
    source: str
    repair: RepairTime
    assumed: str = ""
    burst_nodes: float = 1.0
    lemons: Lemons | None = None
    is_per_device: bool = False


PRESETS: Final[Mapping[str, Preset]] = {
    "opt": Preset(
        per_node_hour=2 / 128 / _DAY_H,
        published="about 2 machines lost a day, of about 128 with 8 A100 each",
        source="OPT-175B chronicles (facebookresearch/metaseq, projects/OPT/chronicles)",
        repair=_INFINITEHBD_REPAIR,
        assumed=_REPAIR_ASSUMED,
    ),
    "llama3": Preset(
        per_node_hour=419 / 54 / 2048 / _DAY_H,
        published="419 unexpected interruptions in 54 days, of 16,384 H100 in 2,048 machines",
        source="The Llama 3 Herd of Models (arXiv 2407.21783), section 3.3.4 and table 5",
        repair=_INFINITEHBD_REPAIR,
        assumed="each interruption is the loss of one machine; " + _REPAIR_ASSUMED,
    ),
    "minder": Preset(
        per_node_hour=2 / 1000 / _DAY_H,
        published="about 2 faults a day in a job on about 1,000 machines",
        source="Minder (NSDI '25)",
        repair=_INFINITEHBD_REPAIR,
        assumed=_REPAIR_ASSUMED,
    ),
    "gemini": Preset(
        per_node_hour=0.015 / _DAY_H,
        published="1.5% of the instances fail in a day; one is replaced in 4 to 7 minutes",
        source="Gemini (SOSP '23), sections 7.3 and 7.4, figures 14 and 15b",
        repair=RepairTime(330.0, TimeShape.FIXED),
        assumed="every replacement takes 5.5 minutes",
    ),
    "odyssey": Preset(
        per_node_hour=0.1,
        published="10% of the NPUs fail in an hour, of 32 in 9 hours",
        source="Odyssey (arXiv 2508.21613), section V-B, figures 7 and 8",
        repair=NEVER,
        assumed="the rate is that of an NPU, and none comes back",
        is_per_device=True,
    ),
    "infinitehbd": Preset(
        per_node_hour=584 / 400 / 348.98 / _DAY_H,
        published="584 faults of 400 servers in 349 days, and when each was repaired",
        source="InfiniteHBD (SIGCOMM '25), stepfun-ai/InfiniteHBD-Trace",
        repair=_INFINITEHBD_REPAIR,
        assumed="times from burst to burst are exponential; the trace's vary more",
        burst_nodes=582 / 528,  # Losses and the times at which they are.
        lemons=Lemons(),
    ),
    # 24.0 nodes are there on average, of up to 32 that were asked for, and 159 come in the 11.37
    # hours: so each of the 8.0 that are missing is missing for 0.57 hours (Little's law).
    "spot-p3": Preset(
        per_node_hour=167 / 24.0 / 11.37,
        published="167 losses at 79 times in 11.4 hours, of 24.0 nodes on average",
        source="Bamboo (NSDI '23), trace of EC2 P3 (uclasystem/bamboo)",
        repair=RepairTime(0.57 * 3600),
        assumed="times from burst to burst and to the next node are exponential",
        burst_nodes=BURST_NODES,
    ),
}


def preset_losses(
    name: str,
    *,
    devices_per_node: int,
    per_node_hour: float = 0.0,
    repair: RepairTime | None = None,
) -> PoissonLosses:
    """The losses of a preset.

    Args:
        per_node_hour: rate instead of the published one; 0: as published.
        repair: time that a lost node is away instead of the preset's; None: the preset's.
    """
    preset = PRESETS[name]
    number = devices_per_node if preset.is_per_device else 1
    return PoissonLosses(
        per_node_hour=per_node_hour or preset.per_node_hour * number,
        repair=repair or preset.repair,
        burst_nodes=preset.burst_nodes,
        lemons=preset.lemons,
        cause=name,
    )
