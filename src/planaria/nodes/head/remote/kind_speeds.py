"""Kinds of machines, and how fast each of them computes the layers of a job.

Machines of one kind have the same processors, devices and versions of what computes. The first
machine of each kind that comes measures the layers. The job is planned by the profile of the
fastest kind that is there at first, so a speed is at most 1. How much memory a machine has does not
change its speed; if its devices hold less than those for which the job is planned, it cannot take
part.
"""

from collections.abc import Callable, Mapping
from typing import Final

from planaria.coordinator.learning.slowness import known_slowness
from planaria.core.machine_messages import MachineFacts
from planaria.core.plan import ModelProfile
from planaria.core.specs import Prepared, PrepareRequest
from planaria.errors import InsufficientError
from planaria.nodes.head.remote.machine_handle import MachineHandle

_ALIKE: Final = 0.98  # Devices that are sold as alike differ by less.
_GIB: Final = 1 << 30

Kind = tuple[str, int, tuple[str, ...], tuple[tuple[str, str], ...]]


def kind_of(facts: MachineFacts) -> Kind:
    """The kind of a machine: model and number of its processors, its devices, and versions."""
    versions = tuple(sorted(facts.versions.items()))
    return facts.processor, facts.processors, facts.devices, versions


def layers_s(profile: ModelProfile) -> float:
    """The seconds of forward and backward of all layers for one microbatch, on one device."""
    return sum(layer.forward_s[1] + layer.backward_s(1) for layer in profile.layers)


class KindSpeeds:
    """The kinds of one job's machines; nobody measures before `begin`.

    Args:
        note: shows the user a text.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._speeds: dict[Kind, float] = {}
        self._profile_s = 0.0
        self._device_bytes = 0
        self.request: PrepareRequest | None = None

    def begin(
        self, request: PrepareRequest, prepared: Prepared, measured: Mapping[Kind, Prepared]
    ) -> None:
        """Notes by what the job is planned, and what else was measured.

        Args:
            request: request with which machines of other kinds are asked to measure later.
            prepared: facts on the job that count, with the profile of the fastest kind.
        """
        assert prepared.profile is not None
        self._profile_s = layers_s(prepared.profile)
        if not request.job.cluster.device_memory_bytes:
            self._device_bytes = prepared.profile.device_memory_bytes
        if request.profile is not None or self._profile_s <= 0.0:
            return  # There are no seconds to compare.
        self.request = request
        for kind, of_kind in measured.items():
            self.add(kind, of_kind)

    def add(self, kind: Kind, prepared: Prepared) -> None:
        """Notes the speed of a kind."""
        assert prepared.profile is not None
        slowness = known_slowness(layers_s(prepared.profile) / self._profile_s)
        self._speeds[kind] = 1.0 / slowness
        if slowness > 1.0:
            processor, number, devices, _ = kind
            what = f"{number} processors {processor!r}"
            if devices:
                what = f"{len(devices)} devices {devices[0]!r}"
            self._note(f"machines with {what} take {slowness:.2f} times as long")

    def is_known(self, facts: MachineFacts) -> bool:
        """Whether nothing has to be measured on a machine."""
        return self.request is None or kind_of(facts) in self._speeds

    async def problem(self, machine: MachineHandle) -> str:
        """Has a machine measure if it is of a kind that has first come after the start.

        Returns:
            Why it cannot take part; "": it can.

        Raises:
            InsufficientError: the process that measures was killed, or raised, which may pass.
        """
        if self.request is None or self.is_known(machine.facts):
            return ""
        try:
            answer = await machine.prepare(self.request)
        except TimeoutError as error:
            return str(error)
        if answer is None:
            return ""  # Its connection is broken, and it has to come again.
        if answer.prepared is None or answer.prepared.profile is None:
            reason = f"it could not measure the job's layers: {answer.failure}"
            if answer.prepared is None or answer.prepared.mistake is None:
                raise InsufficientError(reason)
            return reason
        held_bytes = answer.prepared.profile.device_memory_bytes
        if 0 < held_bytes < _ALIKE * self._device_bytes:
            return (
                f"its devices hold {held_bytes / _GIB:.1f} GiB each, and the job is planned for "
                f"{self._device_bytes / _GIB:.1f} GiB; take larger ones, or start the job while "
                "such a machine is there"
            )
        self.add(kind_of(machine.facts), answer.prepared)
        return ""

    def speed(self, facts: MachineFacts) -> float:
        """The speed of a machine relative to the job's profile; 1 if its kind has not measured."""
        return self._speeds.get(kind_of(facts), 1.0)
