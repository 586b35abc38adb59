"""Facts about each policy that the rest of planaria has to know in addition to its answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from planaria.core.job import PolicyName


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTraits:
    """The traits of a policy; without any, it answers at once, by itself, from live layers.

    Attributes:
        is_choice: whether it collects the answers of several policies, to choose among them.
        can_look_ahead: whether its answers can be searched for before a loss happens.
        can_improve: whether a better plan may replace its answer to a loss at a later commit.
        has_shadows: whether ranks hold shadow layers, from the start of the job.
        splits_backwards: whether its plans may have split backwards.
        goes_back: whether all ranks go back to a save after each loss, even if all layers live.
    """

    is_choice: bool = False
    can_look_ahead: bool = False
    can_improve: bool = False
    has_shadows: bool = False
    splits_backwards: bool = False
    goes_back: bool = False


TRAITS: Final[Mapping[PolicyName, PolicyTraits]] = MappingProxyType(
    {
        "absorb": PolicyTraits(has_shadows=True, splits_backwards=True),
        "adaptive": PolicyTraits(
            is_choice=True, can_look_ahead=True, can_improve=True, splits_backwards=True
        ),
        "morph": PolicyTraits(goes_back=True),
        "reinstantiate": PolicyTraits(),
        "reroute": PolicyTraits(can_look_ahead=True, splits_backwards=True),
        "repartition": PolicyTraits(can_look_ahead=True, can_improve=True, splits_backwards=True),
        "rollback": PolicyTraits(),
    }
)
