"""Brings a device's tensors to its host and back, through buffers that are fast to copy.

On a processor nothing is copied: the arrays are views of the tensors.

`StateMirror` is the host's copy of a layer's state. It is made once for each age of the layer that
anybody asks for, while the device goes on: copies in memory, saves and transfers read the same
mirror, and wait for it when they read. The layer's next step is ordered after the copy, on the
device, and waits for nothing else.

Source: Gemini (SOSP '23), 5.3 (device-to-host copies on a stream of their own).
Differs: the mirror is as large as the state. It stays, because what was pinned once is copied at
the speed of the bus from then on.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from planaria.engine.devices import CopyLane, Device, Mark

State = Mapping[str, npt.NDArray[np.generic]]


class StateMirror:
    """The host's copy of a layer's state."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}
        self._state: _MirroredState | None = None
        self._marks: list[Mark] = []  # Of copies since the layer changed.
        self._age = -1

    def state(self, tensors: Mapping[str, Tensor], *, age: int) -> State:
        """The tensors, which have this age, as arrays; on a device, their copies.

        The copies may still be under way; whoever reads them waits for them. They stay valid until
        the state of another age is asked for.
        """
        if self._device.is_host:
            return {name: tensor.numpy() for name, tensor in tensors.items()}
        if self._state is None or self._age != age or self._state.keys() != tensors.keys():
            self._buffers = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
            pairs = [(self._buffers[n], t) for n, t in tensors.items()]
            mark = self._device.copy(pairs, CopyLane.STATE)
            self._marks.append(mark)
            self._state, self._age = _MirroredState(self._buffers, mark), age
        return self._state

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        """The buffer of a tensor; another one if its size has changed."""
        old = self._buffers.get(name)
        if old is not None and (old.shape, old.dtype) == (tensor.shape, tensor.dtype):
            return old
        return self._device.state_like(tensor)

    def buffers(self, parameters: Iterable[Tensor], *, num_bytes: int) -> list[Tensor]:
        """Buffers for a state of `num_bytes`, of tensors as large as the parameters."""
        if self._device.is_host:
            return []
        tensors = list(parameters)
        times = num_bytes // max(1, sum(tensor.nbytes for tensor in tensors))
        return [self._device.state_like(tensor) for tensor in tensors for _ in range(times)]

    def copy(self, tensors: Mapping[str, Tensor]) -> State:
        """The tensors as arrays of their own, which stay valid whatever becomes of the layer."""
        if self._device.is_host:
            return {name: tensor.numpy().copy() for name, tensor in tensors.items()}
        buffers = {name: self._device.state_like(tensor) for name, tensor in tensors.items()}
        pairs = [(buffers[name], tensors[name]) for name in tensors]
        mark = self._device.copy(pairs, CopyLane.STATE)
        self._marks.append(mark)
        return _MirroredState(buffers, mark)

    def order(self) -> None:
        """Must be called before the layer changes on the device."""
        for mark in self._marks:
            mark.order()
        self._marks.clear()

    def forget(self) -> None:
        """Must be called before the state changes without a step."""
        self.order()
        self._state = None


class _MirroredState(Mapping[str, npt.NDArray[np.generic]]):
    """Arrays that are there once their mark is passed."""

    def __init__(self, buffers: Mapping[str, Tensor], mark: Mark) -> None:
        self._buffers = buffers  # Their memory counts as pinned until they are dropped.
        self._arrays = {name: buffer.numpy() for name, buffer in buffers.items()}
        self._mark = mark

    def __getitem__(self, name: str) -> npt.NDArray[np.generic]:
        self._mark.wait()
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def as_tensor(array: npt.NDArray[np.generic]) -> Tensor:
    """The array as a tensor; copied only if torch cannot use its memory."""
    return torch.from_numpy(np.require(array, requirements=("A", "C", "W")))
