"""The interface between the launcher and what shows the job: the live display and the report."""

from typing import Protocol

from planaria.core.inject import Injection
from planaria.core.records import ToLauncher
from planaria.observe.metrics import EventRecord


class Observer(Protocol):
    """Receives the events of a job, for the live display and the report."""

    def on_message(self, message: ToLauncher) -> None:
        """Takes a message of the coordinator; each committed iteration is reported once."""

    def on_fault(self, injection: Injection, *, now_s: float) -> None:
        """Notes a fault that is about to be injected.

        Args:
            injection: the fault; one of kind "join" has the numbers that the new nodes will get.
            now_s: time of the fault, in seconds of the monotonic clock.
        """

    def on_coordinator_restart(self, *, lost_s: float, now_s: float) -> None:
        """Notes that the coordinator was lost at `lost_s` and runs again since `now_s`."""

    def on_grant(self, node: int, *, replaced_node: int) -> None:
        """Notes that `node` starts on a machine granted in place of the replaced node's."""

    def on_stop_request(self, reason: str) -> None:
        """Notes that training stops at the next commit.

        Args:
            reason: reason of whoever stops it; "": the user asked to.
        """

    @property
    def stop_reason(self) -> str:
        """Reason for which the observer wants training to stop; "": it does not."""

    def events(self) -> tuple[EventRecord, ...]:
        """The events of the report so far."""
