"""A modelled worker's links to peers: the promises of transport/links.py without its sockets.

A message has an epoch and a tag; messages of older epochs are dropped. `abort` frees tasks that
wait in an older epoch. A link connects two workers, each with an address of its own. If a link
breaks whose peer may not have entered the epoch yet, the epoch is over.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from planaria.errors import AbortedError, PeerLostError
from planaria.simulator.loop import Future, Process
from planaria.simulator.network import Endpoint, Network

Address = tuple[str, int]
Tag = tuple[object, ...]
LINK_TIMEOUT_S = 60.0
_RETRY_S = 0.2


@dataclass(slots=True)
class _Link:
    end: Endpoint
    port: int
    is_used: bool = False


@dataclass(frozen=True, slots=True)
class _LinkMessage:
    epoch: int
    tag: Tag
    payload: Any


class SimulatedLinks:
    """The links of one worker.

    Args:
        links_at: function that finds the links that listen at a port; None: nobody listens there.
    """

    def __init__(
        self,
        process: Process,
        rank: int,
        address: Address,
        *,
        network: Network,
        links_at: "Callable[[int], SimulatedLinks | None]",
    ) -> None:
        self.process = process
        self.rank = rank
        self.address = address
        self.epoch = 0
        self._network = network
        self._links_at = links_at
        self._first_epoch = 0
        self._inbox: dict[tuple[int, int, Tag], Any] = {}
        self._links: dict[int, _Link] = {}
        self._connecting: dict[int, int] = {}
        self._lost: dict[int, str] = {}
        self._unconfirmed: set[int] = set()  # Peers that may not be in the epoch yet.
        self._futures: list[Future[None]] = []

    async def begin(
        self, epoch: int, *, addresses: Mapping[int, Address], peers: Collection[int]
    ) -> None:
        """Enters an epoch with links to its peers."""
        self._check(epoch)
        self.epoch = epoch
        self._lost.clear()
        self._inbox = {key: value for key, value in self._inbox.items() if key[1] >= epoch}
        self._unconfirmed = set(peers).difference(
            peer for peer, of, _ in self._inbox if of == epoch
        )
        self._close_old({rank: address[1] for rank, address in addresses.items()})
        for peer in sorted(peers):
            if peer > self.rank and not self._has(peer, addresses) and peer not in self._connecting:
                self._connecting[peer] = addresses[peer][1]
                self._connect_soon(peer, addresses[peer][1])
        began_s = self.process.now_s
        self.process.after(LINK_TIMEOUT_S, self._wake_all)
        while not all(self._has(peer, addresses) for peer in peers):
            self._check_peers(epoch, peers)
            if self.process.now_s >= began_s + LINK_TIMEOUT_S:
                silent = min(peer for peer in peers if peer not in self._links)
                raise PeerLostError(silent, "nothing came")
            await self._wait_change()
        for peer in peers:
            self._links[peer].is_used = True

    def send(self, peer: int, tag: Tag, payload: object) -> None:
        """Sends a message of this epoch; never waits."""
        link = self._links.get(peer)
        if link is None:
            raise PeerLostError(peer, self._lost.get(peer, "no link"))
        link.end.send(_LinkMessage(self.epoch, tag, payload))

    async def receive(self, peer: int, tag: Tag) -> Any:
        """The payload that the peer sends under a tag in this epoch, once it is there."""
        key = (peer, self.epoch, tag)
        epoch = self.epoch
        while key not in self._inbox:
            self._check_peers(epoch, (peer,))
            await self._wait_change()
        return self._inbox.pop(key)

    def abort(self, *, first_epoch: int) -> None:
        """Frees all tasks that wait in an epoch before this one."""
        self._first_epoch = max(self._first_epoch, first_epoch)
        self._wake_all()

    def check_epoch(self) -> None:
        """Raises an AbortedError if the epoch is over."""
        self._check(self.epoch)

    def _check(self, epoch: int) -> None:
        if epoch < max(self._first_epoch, self.epoch):
            raise AbortedError(f"epoch {epoch} is over")

    def _check_peers(self, epoch: int, peers: Collection[int]) -> None:
        self._check(epoch)
        for peer in sorted(self._unconfirmed.union(peers)):
            if peer in self._lost:
                raise PeerLostError(peer, self._lost[peer])

    def _wake_all(self) -> None:
        futures, self._futures = self._futures, []
        for future in futures:
            future.resolve(None)

    def _wait_change(self) -> Future[None]:
        future: Future[None] = Future()
        self._futures.append(future)
        return future

    # -- connections ------------------------------------------------------------------------------

    def _has(self, peer: int, addresses: Mapping[int, Address]) -> bool:
        link = self._links.get(peer)
        return link is not None and link.port == addresses[peer][1]

    def _close_old(self, ports: Mapping[int, int]) -> None:
        for rank, link in list(self._links.items()):
            if link.is_used and ports.get(rank) != link.port:
                del self._links[rank]
                link.end.close()
        for rank, port in list(self._connecting.items()):
            if ports.get(rank) != port:
                del self._connecting[rank]

    def _connect_soon(self, peer: int, port: int) -> None:
        delay_s = self._network.latency_s()
        self.process.after(delay_s, lambda: self._connect(peer, port))

    def _connect(self, peer: int, port: int) -> None:
        if self._connecting.get(peer) != port:
            return
        peer_links = self._links_at(port)
        if peer_links is None:
            del self._connecting[peer]
            self._lost[peer] = "refused"
            self._wake_all()
        elif self._network.is_cut(self.process.place, peer_links.process.place):
            self.process.after(_RETRY_S, lambda: self._connect(peer, port))
        else:
            self._open(peer_links, peer, port)

    def _open(self, peer_links: "SimulatedLinks", peer: int, port: int) -> None:
        own_end, peer_end = self._network.pair(self.process, peer_links.process)
        link = _Link(own_end, port)

        def on_message(message: Any) -> None:
            if message is None:  # The handshake is over.
                self._connecting.pop(peer, None)
                self._add_link(peer, link)
            else:
                self._deliver(peer, link, message)

        def on_close() -> None:
            self._connecting.pop(peer, None)
            self._lost[peer] = "closed"
            self._drop(peer, link)

        own_end.on_message, own_end.on_close = on_message, on_close
        peer_links.process.call(lambda: peer_links.accept(self.rank, self.address[1], peer_end))

    def accept(self, peer: int, port: int, end: Endpoint) -> None:
        """Accepts a call of a peer and tells it that the handshake is over."""
        link = _Link(end, port)
        end.on_message = lambda message: self._deliver(peer, link, message)
        end.on_close = lambda: self._drop(peer, link)
        end.send(None)
        self._add_link(peer, link)

    def _add_link(self, peer: int, link: _Link) -> None:
        old_link = self._links.get(peer)
        self._links[peer] = link
        if old_link is not None:
            old_link.end.close()
            if old_link.is_used:
                self._lost[peer] = "it came back on a new link"
        self._wake_all()

    def _deliver(self, peer: int, link: _Link, message: _LinkMessage) -> None:
        if message.epoch >= self.epoch and self._links.get(peer) is link:
            self._inbox[peer, message.epoch, message.tag] = message.payload
            if message.epoch == self.epoch:
                self._unconfirmed.discard(peer)
            self._wake_all()

    def _drop(self, peer: int, link: _Link) -> None:
        if self._links.get(peer) is link:
            del self._links[peer]
            self._lost[peer] = "closed"
        self._wake_all()
