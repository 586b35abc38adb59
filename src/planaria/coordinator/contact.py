"""A head's contact with its members: whether silence says that nodes are lost, or that the head is.

On the head's own machine no network can fail: a connection that closes means that its node is lost,
and a lease runs out by the clock. Between machines a head that hears no member may itself be cut
off, and then it evicts nobody:

1. Leases count only time in which members are heard. A while after the last message of any member,
   their clock stands still (`lease_now_s`). With the next message it goes on, and each node is
   given a whole lease to come back, though only once before it is heard itself.
2. A node whose connection closes is lost as soon as another member answers: all others are asked
   for a heartbeat that says so. Other messages may have been sent before the connection closed.
3. If no member has a connection any more before that, the network or the head has failed. The
   first node that is heard again is the end of that, and the others keep their leases.
4. A lease and `patience_s` after the last message of any member the clock goes on, and leases run
   out: the nodes have ended themselves.
5. Nodes that wait to join do not count as heard. Once they are members, they count as heard when
   they last were: a head that is cut off then evicts them no more than the members before them.

Source: docs/protocol.md, "Epochs fence" (Contact).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from planaria.protocol.agent_lease import TICKS_PER_LEASE

# Number of heartbeats that each member sends in the longest silence that is no cut.
_BEATS_MISSED: Final = 2


@dataclass(frozen=True, slots=True)
class Heard:
    """What follows from a message of a node.

    Attributes:
        lost: nodes whose connections closed, and that are lost.
        pardoned: nodes that are given a whole lease, because nobody was heard before.
    """

    lost: tuple[int, ...] = ()
    pardoned: tuple[int, ...] = ()


class HeadContact:
    """When members were heard, and which connections closed since.

    Args:
        patience_s: time in which nodes look for a head that they have lost, after their leases; 0:
            they are on the head's machine.
        now_s: clock of the head, in seconds.
    """

    def __init__(self, *, lease_s: float, patience_s: float, now_s: Callable[[], float]) -> None:
        self.is_remote = patience_s > 0.0
        self._now_s = now_s
        self._silence_s_max = _BEATS_MISSED * lease_s / TICKS_PER_LEASE
        self._limit_s = patience_s + lease_s
        self._heard_s = now_s()  # Time at which a member was last heard.
        self._others_s: dict[int, float] = {}  # When nodes were last heard that were no members.
        self._skipped_s = 0.0  # Time that the leases do not count.
        self._num_requests = 0
        self._closed: dict[int, int] = {}  # Nodes whose connections closed since, with requests.
        self._is_closed = False  # Whether those of all members have closed since.
        self._pardoned: set[int] = set()  # Nodes that were pardoned and not heard since.

    @property
    def now_s(self) -> float:
        """Time by the clock of the head."""
        return self._now_s()

    @property
    def lease_now_s(self) -> float:
        """Time by the clock of the leases; it never goes back."""
        now_s = self._now_s()
        return now_s - self._skipped_s - self._uncounted_s(now_s)

    @property
    def is_cut_off(self) -> bool:
        """Whether no member was heard for so long that the head may be cut off."""
        silence_s = self._now_s() - self._heard_s
        return self.is_remote and self._silence_s_max < silence_s <= self._limit_s

    def _uncounted_s(self, now_s: float) -> float:
        """The part of the present silence that leases do not count."""
        if not self.is_remote:
            return 0.0
        return max(0.0, min(now_s - self._heard_s, self._limit_s) - self._silence_s_max)

    def hear(self, node: int, *, leased: Collection[int], request: int = 0) -> Heard:
        """Notes that a member has connected or said something.

        Args:
            leased: nodes that have leases.
            request: the request that the message answers; 0: it answers none. Only an answer shows
                that it was sent after a connection had closed.
        """
        self.forget(node)
        now_s = self._now_s()
        uncounted_s, self._heard_s = self._uncounted_s(now_s), now_s
        self._skipped_s += uncounted_s
        was_cut_off, self._is_closed = uncounted_s > 0.0 or self._is_closed, False
        if was_cut_off:
            self._closed = {}
            pardoned = tuple(sorted({*leased} - self._pardoned))
            self._pardoned |= {*leased} - {node}
            return Heard(pardoned=pardoned)
        lost = tuple(other for other, number in self._closed.items() if number <= request)
        self._closed = {other: n for other, n in self._closed.items() if other not in lost}
        return Heard(lost=lost)

    def hear_other(self, node: int) -> None:
        """Notes that a node that is no member has said something."""
        self.forget(node)
        self._others_s[node] = self._now_s()

    def add_members(self, is_member: Callable[[int], bool]) -> None:
        """Has nodes that have become members count as heard when they last were.

        Args:
            is_member: returns whether a node is a member now.
        """
        added = [node for node in self._others_s if is_member(node)]
        heard_s = max((self._others_s.pop(node) for node in added), default=self._heard_s)
        if heard_s > self._heard_s:
            now_s = self._now_s()
            self._skipped_s += self._uncounted_s(now_s)
            self._heard_s = heard_s
            self._skipped_s -= self._uncounted_s(now_s)  # The clock of the leases goes on.

    def close(self, node: int, *, is_last: bool) -> int:
        """Notes that a node's connection has closed; returns the request to send to all others.

        Args:
            is_last: whether no member has a connection now.
        """
        self._num_requests += 1
        self._closed[node] = self._num_requests
        self._is_closed |= is_last
        return self._num_requests

    @property
    def open_request(self) -> int:
        """The request that a node is to answer that connects now; 0: none."""
        return max(self._closed.values(), default=0)

    def forget(self, node: int) -> None:
        """Forgets what was noted of a node, because it is back, was heard, or is evicted."""
        self._pardoned.discard(node)
        self._closed.pop(node, None)
