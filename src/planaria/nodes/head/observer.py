"""Who watches a job from its launcher."""

from typing import Protocol

from planaria.core.inject import Injection
from planaria.core.records import ToLauncher


class Observer(Protocol):
    """Who watches a job: the live display and the report."""

    def noticed(self, message: ToLauncher) -> None:
        """The coordinator tells something; an iteration is told of once."""

    def fired(self, injection: Injection, *, now_s: float) -> None:
        """A fault is being injected; of nodes that join it has the numbers that they will have."""

    def restarted(self, *, lost_s: float, now_s: float) -> None:
        """The coordinator was lost, and runs again."""

    def granted(self, node: int, *, stead: int) -> None:
        """A machine was granted in the stead of a lost node's; a node starts on it."""

    def stopping(self) -> None:
        """The user asked to stop."""

    def events_json(self) -> str:
        """What has happened so far, as the report has it."""
