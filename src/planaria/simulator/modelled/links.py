"""A modelled worker's links to peers: the promises of transport/links.py without its sockets.

A message has an epoch and a tag; messages of older epochs are dropped. `abort` frees tasks that
wait in an older epoch. A link connects two workers, each with an address of its own. If a link
breaks whose peer may not have entered the epoch yet, the epoch is over.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from planaria.errors import AbortedError, PeerLostError
from planaria.simulator.loop import Process, Waiting
from planaria.simulator.network import End, Network

Address = tuple[str, int]
Tag = tuple[object, ...]
LINK_TIMEOUT_S = 60.0
_CALL_AGAIN_S = 0.2


@dataclass(slots=True)
class _Link:
    end: End
    port: int
    is_used: bool = False


@dataclass(frozen=True, slots=True)
class _Message:
    epoch: int
    tag: Tag
    payload: Any


class SimulatedLinks:
    """The links of one worker.

    Args:
        find: function that finds the links that listen at a port; None: nobody listens there.
    """

    def __init__(
        self,
        process: Process,
        rank: int,
        address: Address,
        *,
        network: Network,
        find: "Callable[[int], SimulatedLinks | None]",
    ) -> None:
        self.process = process
        self.rank = rank
        self.address = address
        self.epoch = 0
        self._network = network
        self._find = find
        self._first_epoch = 0
        self._inbox: dict[tuple[int, int, Tag], Any] = {}
        self._peers: dict[int, _Link] = {}
        self._calling: dict[int, int] = {}
        self._lost: dict[int, str] = {}
        self._unheard: set[int] = set()  # Peers that may not be in the epoch yet.
        self._waiting: list[Waiting[None]] = []

    async def begin(
        self, epoch: int, *, addresses: Mapping[int, Address], peers: Collection[int]
    ) -> None:
        """Enters an epoch with links to its peers."""
        self._check(epoch)
        self.epoch = epoch
        self._lost.clear()
        self._inbox = {key: value for key, value in self._inbox.items() if key[1] >= epoch}
        self._unheard = set(peers).difference(peer for peer, of, _ in self._inbox if of == epoch)
        self._retire({rank: address[1] for rank, address in addresses.items()})
        for peer in sorted(peers):
            if peer > self.rank and not self._has(peer, addresses) and peer not in self._calling:
                self._calling[peer] = addresses[peer][1]
                self._call(peer, addresses[peer][1])
        began_s = self.process.now_s
        self.process.after(LINK_TIMEOUT_S, self._changed)
        while not all(self._has(peer, addresses) for peer in peers):
            self._refuse(epoch, peers)
            if self.process.now_s >= began_s + LINK_TIMEOUT_S:
                silent = min(peer for peer in peers if peer not in self._peers)
                raise PeerLostError(silent, "nothing came")
            await self._wait_change()
        for peer in peers:
            self._peers[peer].is_used = True

    def send(self, peer: int, tag: Tag, payload: object) -> None:
        """Sends a message of this epoch; never waits."""
        link = self._peers.get(peer)
        if link is None:
            raise PeerLostError(peer, self._lost.get(peer, "no link"))
        link.end.send(_Message(self.epoch, tag, payload))

    async def receive(self, peer: int, tag: Tag) -> Any:
        """The payload that the peer sends under a tag in this epoch, once it is there."""
        key = (peer, self.epoch, tag)
        epoch = self.epoch
        while key not in self._inbox:
            self._refuse(epoch, (peer,))
            await self._wait_change()
        return self._inbox.pop(key)

    def abort(self, *, first_epoch: int) -> None:
        """Frees all tasks that wait in an epoch before this one."""
        self._first_epoch = max(self._first_epoch, first_epoch)
        self._changed()

    def check_epoch(self) -> None:
        """Raises an AbortedError if the epoch is over."""
        self._check(self.epoch)

    def _check(self, epoch: int) -> None:
        if epoch < max(self._first_epoch, self.epoch):
            raise AbortedError(f"epoch {epoch} is over")

    def _refuse(self, epoch: int, peers: Collection[int]) -> None:
        self._check(epoch)
        for peer in sorted(self._unheard.union(peers)):
            if peer in self._lost:
                raise PeerLostError(peer, self._lost[peer])

    def _changed(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.resolve(None)

    def _wait_change(self) -> Waiting[None]:
        waiting: Waiting[None] = Waiting()
        self._waiting.append(waiting)
        return waiting

    # -- connections ------------------------------------------------------------------------------

    def _has(self, peer: int, addresses: Mapping[int, Address]) -> bool:
        link = self._peers.get(peer)
        return link is not None and link.port == addresses[peer][1]

    def _retire(self, ports: Mapping[int, int]) -> None:
        for rank, link in list(self._peers.items()):
            if link.is_used and ports.get(rank) != link.port:
                del self._peers[rank]
                link.end.close()
        for rank, port in list(self._calling.items()):
            if ports.get(rank) != port:
                del self._calling[rank]

    def _call(self, peer: int, port: int) -> None:
        delay_s = self._network.latency_s()
        self.process.after(delay_s, lambda: self._connect(peer, port))

    def _connect(self, peer: int, port: int) -> None:
        if self._calling.get(peer) != port:
            return
        found = self._find(port)
        if found is None:
            del self._calling[peer]
            self._lost[peer] = "refused"
            self._changed()
        elif self._network.is_cut(self.process.place, found.process.place):
            self.process.after(_CALL_AGAIN_S, lambda: self._connect(peer, port))
        else:
            self._open(found, peer, port)

    def _open(self, found: "SimulatedLinks", peer: int, port: int) -> None:
        mine, theirs = self._network.pair(self.process, found.process)
        link = _Link(mine, port)

        def received(message: Any) -> None:
            if message is None:  # The handshake is over.
                self._calling.pop(peer, None)
                self._welcome(peer, link)
            else:
                self._deliver(peer, link, message)

        def closed() -> None:
            self._calling.pop(peer, None)
            self._lost[peer] = "closed"
            self._drop(peer, link)

        mine.received, mine.closed = received, closed
        found.process.do(lambda: found.accept(self.rank, self.address[1], theirs))

    def accept(self, peer: int, port: int, end: End) -> None:
        """Accepts a call of a peer and tells it that the handshake is over."""
        link = _Link(end, port)
        end.received = lambda message: self._deliver(peer, link, message)
        end.closed = lambda: self._drop(peer, link)
        end.send(None)
        self._welcome(peer, link)

    def _welcome(self, peer: int, link: _Link) -> None:
        older = self._peers.get(peer)
        self._peers[peer] = link
        if older is not None:
            older.end.close()
            if older.is_used:
                self._lost[peer] = "it came back on a new link"
        self._changed()

    def _deliver(self, peer: int, link: _Link, message: _Message) -> None:
        if message.epoch >= self.epoch and self._peers.get(peer) is link:
            self._inbox[peer, message.epoch, message.tag] = message.payload
            if message.epoch == self.epoch:
                self._unheard.discard(peer)
            self._changed()

    def _drop(self, peer: int, link: _Link) -> None:
        if self._peers.get(peer) is link:
            del self._peers[peer]
            self._lost[peer] = "closed"
        self._changed()
