"""A rank's copies of its own layers, in its own node's memory."""

from collections.abc import Callable

from planaria.checkpoint.memory.arena import Arena
from planaria.checkpoint.memory.filling import Fill
from planaria.checkpoint.memory.turns import Unload
from planaria.checkpoint.memory.version import Version
from planaria.checkpoint.memory.wire import State, fill_tensors, head_of
from planaria.core.copies import Label


class OwnCopies:
    """Makes them; for the arguments see Copier in stream.py."""

    def __init__(
        self,
        arena: Arena,
        *,
        virtual_bytes: Callable[[int], int],
        fill: Fill,
        unload: Unload,
    ) -> None:
        self._arena = arena
        self._virtual_bytes = virtual_bytes
        self._fill = fill
        self._unload = unload

    def made(self, layer: int, label: Label, state: State, piece_bytes: int) -> Version:
        """A copy of a layer as it is now, whose hashes are still to be made.

        Args:
            piece_bytes: of which there is one, in the bytes that they stand for.

        Raises:
            CheckpointError: there is no memory for it.
        """
        head = head_of(state)
        num_bytes = len(head) + sum(array.nbytes for array in state.values())
        stands_for = self._virtual_bytes(layer) or num_bytes
        num_pieces = -(-stands_for // piece_bytes)
        version = self._arena.begin(
            layer, label, head=head, num_bytes=num_bytes, piece_bytes=-(-num_bytes // num_pieces)
        )
        self._unload(self._virtual_bytes(layer), is_own=True)
        fill_tensors(version, state, self._fill)
        return version

    def is_same(self, version: Version, kept: Label | None) -> bool:
        """Hashes a copy, which is whole then; whether it is the same as that of another label was
        when it was made. What is in memory now is the new one, in case the old one has changed."""
        version.seal()
        self._arena.finish(version)
        older = self._arena.peek(version.layer, kept) if kept else None
        return older is not None and older.is_like(version)
