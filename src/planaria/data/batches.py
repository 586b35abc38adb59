"""The microbatches of one iteration, loaded on the ranks that use them.

The samples of a microbatch depend only on the seed and the iteration, never on the plan
(docs/protocol.md, "The commit vector", C1). They are stacked along a new first dimension. Rows of
token ids of unequal length are padded at their ends to the longest of the microbatch, and targets
with -100: if each token sees only those before it ("causal"), and for an encoder of transformers,
which gets a mask beside them. Other samples of unequal shape need a collate function of the user's.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from planaria.core.job import DataConfig, TrainingConfig
from planaria.core.samples import data_seed, held_out_seed, mix, sample_numbers
from planaria.data.datasets import Dataset, UserDataset, keep_generators
from planaria.data.padding import MASKS, NO_PADDING, ROUTERS_KEY
from planaria.data.text import IGNORED, TokenDataset
from planaria.errors import ConfigError, PlanariaError

COUNT: Final = -1  # Stands for the number of targets of an iteration, in place of a microbatch.
_NUM_NAMED: Final = 64  # A message stays one that can be read.
_NUM_EXAMINED: Final = 8  # A flip of a coin is then found in 255 of 256 data sets.


class Prefetched(Protocol):
    """Microbatches that were loaded ahead; see prefetch.py."""

    def take(self, iteration: int, index: int) -> Any:
        """A microbatch, or for index `COUNT` the number of targets; None: there is none."""


class Batches:
    """Inputs and targets of an iteration.

    Args:
        ahead: microbatches that were loaded ahead; None: none were.

    Attributes:
        consumed: sample numbers of each microbatch whose inputs were asked for, by microbatch.
    """

    def __init__(
        self,
        dataset: Dataset,
        training: TrainingConfig,
        *,
        iteration: int,
        ahead: Prefetched | None = None,
    ) -> None:
        self.iteration = iteration
        self.microbatch_size = training.microbatch_size
        self._ahead = ahead
        self._dataset = dataset
        self._training = training
        self._seed = data_seed(iteration, seed=training.seed)
        self._numbers: npt.NDArray[np.int64] = sample_numbers(
            iteration,
            seed=training.seed,
            num_samples=len(dataset),
            global_batch_size=training.global_batch_size,
        )
        self._loaded: dict[int, tuple[Any, Any]] = {}
        self._num_targets: int | None = None
        self.consumed: dict[int, npt.NDArray[np.int64]] = {}

    def keep(self, index: int) -> None:
        """Loads a microbatch, unless it is loaded, and keeps it until its targets are asked for."""
        self._load(index)

    def inputs(self, index: int) -> Any:
        """The inputs of a microbatch, for its first hop; floats are in the dtype of training."""
        self.consumed[index] = self._samples(index)
        return _convert(self._load(index)[0], self._training)

    def targets(self, index: int) -> Any:
        """The targets of a microbatch, for its last hop; the microbatch is not kept after this."""
        targets = self._load(index)[1]
        del self._loaded[index]
        self._refuse_other_lengths(targets, index)
        return targets

    def num_targets(self) -> int:
        """Number of targets in the global batch, by which every microbatch's loss is divided."""
        if self._num_targets is None and self._ahead is not None:
            self._num_targets = self._ahead.take(self.iteration, COUNT)
        if self._num_targets is None:
            self._num_targets = num_targets(
                self._dataset, self._numbers, seed=self._seed, microbatch_size=self.microbatch_size
            )
        return self._num_targets

    def _refuse_other_lengths(self, targets: Any, index: int) -> None:
        """Refuses float targets that are not as long as the one by which all were counted."""
        is_float = isinstance(targets, Tensor) and targets.is_floating_point()
        if not is_float or _is_collated(self._dataset):
            return
        length, number, first = targets[0].numel(), self._samples(index)[0], self._numbers[0]
        if length * len(self._numbers) == self.num_targets():
            return
        counted = _num_in_each(_sample(self._dataset, first, self._seed)[1])
        if counted is not None:
            remedy = (
                f"float targets must have one length: sample {number} has {length} elements, and "
                f"sample {first} has {counted}; cut or pad them, or name a function that makes a "
                "microbatch of them as data.collate, whose targets are counted one by one"
            )
            raise ConfigError("data", sorted((length, counted)), remedy)

    def name_samples(self, index: int) -> "SampleNote":
        """Has what the body raises say which samples the microbatch has."""
        return _MicrobatchNote(lambda: self._samples_text(index))

    def _samples_text(self, index: int) -> str:
        numbers = ", ".join(map(str, self._samples(index)[:_NUM_NAMED]))
        more = ", ..." if self.microbatch_size > _NUM_NAMED else ""
        return f"raised in iteration {self.iteration} for a microbatch of samples {numbers}{more}"

    def _samples(self, index: int) -> npt.NDArray[np.int64]:
        size = self._training.microbatch_size
        return self._numbers[index * size : (index + 1) * size]

    def load(self, index: int) -> tuple[Any, Any]:
        """Inputs and targets of a microbatch, which is not kept."""
        return microbatch(self._dataset, self._samples(index), seed=self._seed)

    def _load(self, index: int) -> tuple[Any, Any]:
        if index not in self._loaded:
            ahead = self._ahead.take(self.iteration, index) if self._ahead is not None else None
            self._loaded[index] = self.load(index) if ahead is None else ahead
        return self._loaded[index]


class HeldOut:
    """The microbatches of an evaluation: samples in order, the last microbatch perhaps smaller.

    Args:
        num_samples: number of samples from the first on; 0: all.
    """

    def __init__(self, dataset: Dataset, training: TrainingConfig, *, num_samples: int) -> None:
        self.num_samples = min(num_samples or len(dataset), len(dataset))
        self._dataset = dataset
        self._training = training
        self._loaded: dict[int, tuple[Any, Any]] = {}

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches."""
        return -(-self.num_samples // self._training.microbatch_size)

    def keep(self, index: int) -> None:
        """Loads a microbatch, unless it is loaded, and keeps it until `clear`."""
        self._load(index)

    def inputs(self, index: int) -> Any:
        """The inputs of a microbatch; floats are in the dtype of training."""
        return _convert(self._load(index)[0], self._training)

    def targets(self, index: int) -> Any:
        """The targets of a microbatch."""
        return self._load(index)[1]

    def num_targets(self, index: int) -> int:
        """Number of targets of a microbatch, see `num_targets`."""
        targets = self._load(index)[1]
        if isinstance(targets, Tensor) and targets.dim() == 1 and not _is_collated(self._dataset):
            return len(targets)  # Single numbers.
        return _num_in_batch(targets, len(self._samples(index)))

    def samples_text(self, index: int) -> str:
        """The samples of a microbatch, for a message."""
        numbers = self._samples(index)
        return (
            f"samples {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"sample {numbers[0]}"
        )

    def clear(self) -> None:
        """Forgets the microbatches that were loaded."""
        self._loaded.clear()

    def _samples(self, index: int) -> npt.NDArray[np.int64]:
        first = index * self._training.microbatch_size
        return np.arange(first, min(first + self._training.microbatch_size, self.num_samples))

    def _load(self, index: int) -> tuple[Any, Any]:
        if index not in self._loaded:
            seed = held_out_seed(seed=self._training.seed)
            self._loaded[index] = microbatch(self._dataset, self._samples(index), seed=seed)
        return self._loaded[index]


class SampleNote:
    """Adds a note with the samples at fault to what the user's code raises in the body.

    Mistakes that planaria has found name the samples themselves.

    Args:
        text: function that returns the note; it is called only if something is raised.
    """

    def __init__(self, text: Callable[[], str]) -> None:
        self._text = text

    def __enter__(self) -> None:
        """Nothing is needed before the body."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Adds the note."""
        if isinstance(error, Exception) and not isinstance(error, PlanariaError):
            error.add_note(f"planaria: {self._text()}")


class _MicrobatchNote(SampleNote):
    """A note that mistakes get, too, which the body finds for a microbatch as it is."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, ConfigError):
            remedy = f"{error.remedy}; {self._text()}"
            raise type(error)(error.field, error.value, remedy) from error
        super().__exit__(_, error, __)


def check_num_samples(num_samples: int, num_before: int, key: str) -> None:
    """Refuses data that have changed since the job began: other samples would have the numbers.

    Args:
        num_before: number of samples that the job began with; 0: not known.
        key: key that names the data.

    Raises:
        OSError: the data have another number of samples. It counts against the node, which may be
            the only one that sees other data.
    """
    if num_before and num_samples != num_before:
        raise OSError(
            f"{key}: there are {num_samples} samples here, and the job began with {num_before}; "
            "data must not change while a job trains, and all nodes must see the same"
        )


def unrepeated_text(dataset: Dataset, training: TrainingConfig) -> str:
    """The warning that a user's sample has other bits when it is read again; "" if it has not.

    A few samples of the first microbatch are read twice, each seeded as in training.
    """
    if not isinstance(dataset, UserDataset):
        return ""
    parts = _first_parts(dataset, training)[:_NUM_EXAMINED]
    first, again = (_pairs(dataset, parts, training=training) for _ in range(2))
    pairs = zip(parts, first, again, strict=True)
    differing = [part for part, pair, pair_again in pairs if not _have_same_bits(pair, pair_again)]
    if not differing:
        return ""
    what = "the first microbatch" if dataset.collate else f"sample {differing[0][0]}"
    return (
        f"data.target = {dataset.target!r}: {what} differs each time that it is read, although "
        "planaria seeds torch, numpy and random before each sample; a generator that the data set "
        "keeps depends on what was read before, so a loss of a node changes the result"
    )


def refuse_unshifted(dataset: Dataset, training: TrainingConfig) -> None:
    """Refuses a user's causal targets that are the inputs, in all of the first microbatch.

    A model learns nothing from them but to copy what it sees. Where they are the next tokens as
    well, as in a row of equal ones, they are let through.

    Raises:
        ConfigError: the targets are the inputs.
    """
    if not isinstance(dataset, UserDataset) or dataset.objective != "causal":
        return
    if _are_copies(_pairs(dataset, _first_parts(dataset, training), training=training)):
        remedy = (
            "its targets are its inputs, so a model would learn to copy what it sees; the target "
            'at a place is what the model predicts there, because only data.kind = "hf" shifts: '
            "return (ids[:-1], ids[1:])"
        )
        raise ConfigError("data.target", dataset.target, remedy)


def copied_text(dataset: Dataset, *, data: DataConfig, training: TrainingConfig) -> str:
    """The warning that layers of the user's own learn to copy the token ids that they see.

    It is "" unless the targets of the first samples are the inputs. That is no mistake where a copy
    is meant, as in an autoencoder.
    """
    if getattr(dataset, "objective", "") != "supervised":
        return ""
    parts = _first_parts(dataset, training)[:_NUM_EXAMINED]
    pairs = _pairs(dataset, parts, training=training)
    if not (all(map(_are_rows_of_ids, pairs)) and _are_copies(pairs)):
        return ""
    key, value, remedy = "data.target", data.target, "return (ids[:-1], ids[1:])"
    if data.kind == "hf":
        key, value, remedy = "data.path", data.path, "save labels as [*input_ids[1:], -100]"
    return (
        f"{key} = {value!r}: in the first samples each target is the input at its place, so layers "
        "of your own, for which nothing is shifted, learn to copy what they see; for them to learn "
        f"the next token, {remedy}"
    )


def _are_rows_of_ids(pair: tuple[Any, Any]) -> bool:
    return all(
        isinstance(part, Tensor) and part.dim() == 2 and not part.is_floating_point()
        for part in pair
    )


def _pairs(
    dataset: Dataset, parts: Sequence[npt.NDArray[np.int64]], *, training: TrainingConfig
) -> list[tuple[Any, Any]]:
    """Inputs and targets of some of `_first_parts`, seeded as in training."""
    seed = data_seed(0, seed=training.seed)
    with keep_generators():
        return [microbatch(dataset, part, seed=seed) for part in parts]


def _are_copies(pairs: Sequence[tuple[Any, Any]]) -> bool:
    """Whether targets are the inputs, and not the next tokens as well."""
    return all(map(_are_inputs, pairs)) and not all(map(_are_next, pairs))


def _are_inputs(pair: tuple[Any, Any]) -> bool:
    """Whether each target is the input at its place; there may be none."""
    inputs, targets = _ids(pair[0]), pair[1]
    if not isinstance(inputs, Tensor) or inputs.shape != targets.shape:
        return False
    return bool(((targets == inputs) | ~_is_target(targets)).all())


def _are_next(pair: tuple[Any, Any]) -> bool:
    """Whether each target is the input at the next place, as far as there is one."""
    following, targets = _ids(pair[0])[..., 1:], pair[1][..., :-1]
    return bool(((targets == following) | ~_is_target(targets)).all())


def _ids(inputs: Any) -> Any:
    """The token ids among inputs that have a mask, or else the inputs."""
    return inputs.get("input_ids") if isinstance(inputs, dict) else inputs


def _first_parts(dataset: Dataset, training: TrainingConfig) -> list[npt.NDArray[np.int64]]:
    """The samples of the first microbatch, one by one if they are not collated together."""
    numbers = sample_numbers(
        0,
        seed=training.seed,
        num_samples=len(dataset),
        global_batch_size=training.global_batch_size,
    )[: training.microbatch_size]
    return [numbers] if _is_collated(dataset) else np.split(numbers, len(numbers))


def _is_collated(dataset: Dataset) -> TypeGuard[UserDataset]:
    """Whether a function of the user's makes a microbatch of the items."""
    return isinstance(dataset, UserDataset) and dataset.collate is not None


def _have_same_bits(value: Any, other: Any) -> bool:
    """Whether two values have the same structure and tensors; a NaN is the same as itself."""
    (tensors, structure), (others, other_structure) = tree_flatten(value), tree_flatten(other)
    return structure == other_structure and all(map(_are_same_bits, tensors, others))


def _are_same_bits(tensor: Tensor, other: Tensor) -> bool:
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    own_bytes, other_bytes = (t.contiguous().view(-1).view(torch.uint8) for t in (tensor, other))
    return torch.equal(own_bytes, other_bytes)


def _convert(inputs: Any, training: TrainingConfig) -> Any:
    """The inputs with floats in the dtype of training."""
    dtype = getattr(torch, training.dtype)

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map(convert, inputs)


def microbatch(dataset: Dataset, samples: np.ndarray, *, seed: int) -> tuple[Any, Any]:
    """Inputs and targets of some samples, each a tensor, or a tuple or dict of tensors.

    It may seed generators, see `keep_generators`.

    Args:
        samples: numbers of the samples, int64 [B].
        seed: seed of the iteration's data, see `data_seed` of core.samples.

    Raises:
        ConfigError: the samples have different shapes.
    """
    if _is_collated(dataset):
        items = [_item(dataset, int(number), seed) for number in samples]
        with SampleNote(lambda: f"raised for samples {', '.join(map(str, samples[:_NUM_NAMED]))}"):
            pair = dataset.collate_items(items, seed=mix(seed, *map(int, samples)))
        # As a loader would send it: the bits of some operators depend on the strides.
        inputs, targets = tree_map(row_major, pair)
        return inputs, targets
    pairs = [_sample(dataset, number, seed) for number in samples]
    is_causal = getattr(dataset, "objective", "") == "causal"
    inputs, targets = zip(*pairs, strict=True)
    if isinstance(dataset, UserDataset) and not dataset.may_pad:
        _refuse_padding(inputs, samples)
    padding = getattr(dataset, "padding", NO_PADDING)
    if padding != NO_PADDING and _are_unequal_rows(inputs):
        if not all(map(len, inputs)):
            number = next(n for n, ids in zip(samples, inputs, strict=True) if not len(ids))
            raise ConfigError("data", f"sample {number}", "it has no tokens; leave it out")
        return _rows_beside_mask(inputs, padding), _stack_beside(targets, inputs, samples)
    return (
        _stack_parts(inputs, samples, padding=0 if is_causal else None),
        _stack_parts(targets, samples, padding=IGNORED if is_causal else None),
    )


def _are_unequal_rows(inputs: Sequence[Any]) -> bool:
    """Whether samples are rows of token ids, and not all of one length."""
    are_rows = all(isinstance(ids, Tensor) and ids.dim() == 1 for ids in inputs)
    return are_rows and len({len(ids) for ids in inputs}) > 1


def _rows_beside_mask(rows: Sequence[Tensor], padding: int) -> dict[str, Tensor]:
    """Padded rows of token ids and the mask that hides the padding, named as in transformers."""
    masks = [torch.ones_like(row, dtype=torch.int64) for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    return {"input_ids": pad(list(rows), True, padding), MASKS: pad(masks, True, 0)}


def _stack_beside(targets: Sequence[Any], rows: Sequence[Tensor], numbers: np.ndarray) -> Any:
    """The targets of padded rows, padded like these if each token has one."""
    pairs = zip(targets, rows, strict=True)
    if not all(isinstance(t, Tensor) and t.shape == row.shape for t, row in pairs):
        return _stack_parts(targets, numbers, padding=None)
    signed = [t if t.dtype.is_signed else t.to(torch.int64) for t in targets]
    return _stack_parts(signed, numbers, padding=IGNORED)


def row_major(tensor: Tensor) -> Tensor:
    """The values with the strides of a new tensor, also of dimensions with one entry.

    It is the tensor itself if it has them.
    """
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != expected:
            return tensor.clone(memory_format=torch.contiguous_format)
        expected *= max(1, size)
    return tensor


def _refuse_padding(inputs: Sequence[Any], numbers: np.ndarray) -> None:
    """Refuses samples that would be padded, where the loss would count that."""
    shapes = [str(list(getattr(value, "shape", ()))) for value in inputs]
    if len(set(shapes)) > 1:
        remedy = (
            "the samples of a microbatch have different shapes, and the routers would count "
            f"padding: {_difference(shapes, numbers)}; give rows of one length, or set "
            f"{ROUTERS_KEY} to false"
        )
        raise ConfigError("data", sorted(set(shapes)), remedy)


def num_targets(
    dataset: Dataset, samples: np.ndarray, *, seed: int, microbatch_size: int = 1
) -> int:
    """Number of targets that some samples have, by which a mean loss over them is divided.

    In float targets and single numbers every element counts, and the first sample has as many as
    any other, which `Batches.targets` checks; in rows of integers, and in all integers of a collate
    function, every element but -100 counts; in tuples and dicts, every sample. All samples are
    loaded only to count what may have -100, and not if the dataset is a `TokenDataset`, whose
    samples have a known number of targets. That may seed generators, see `keep_generators`.

    Args:
        samples: numbers of the samples, int64 [B].
        seed: seed of the iteration's data, see `data_seed` of core.samples.
        microbatch_size: number of samples that a collate function gets together.
    """
    if isinstance(dataset, TokenDataset):
        return dataset.num_targets(samples)
    if _is_collated(dataset):
        parts = np.split(samples, range(microbatch_size, len(samples), microbatch_size))
        targets_of = (microbatch(dataset, part, seed=seed)[1] for part in parts)
        first = next(targets_of)
        if not isinstance(first, Tensor):
            return len(samples)
        return sum(_num_in_batch(some, 0) for some in (first, *targets_of))
    first = _sample(dataset, samples[0], seed)[1]
    in_each = _num_in_each(first)
    if in_each is not None:
        return len(samples) * in_each
    return sum(_num_in_batch(_sample(dataset, number, seed)[1], 1) for number in samples)


def _num_in_each(first: Any) -> int | None:
    """Number of targets in each sample, if that of one tells; None: they are counted one by one."""
    if not isinstance(first, Tensor):
        return 1
    # What a list without numbers becomes is float, whatever the other samples have.
    is_known = first.dim() == 0 or (first.is_floating_point() and first.numel() > 0)
    return first.numel() if is_known else None


def _num_in_batch(targets: Any, num_samples: int) -> int:
    """Number of targets in a microbatch, by the same rules; of single numbers, without -100."""
    if not isinstance(targets, Tensor):
        return num_samples
    if targets.is_floating_point():
        return targets.numel()
    return int(torch.count_nonzero(_is_target(targets)))


def _is_target(targets: Tensor) -> Tensor:
    """Whether each element is a target and not -100, which a type without a sign cannot hold."""
    if not targets.dtype.is_signed:  # As a byte -100 would be 156.
        return torch.ones_like(targets, dtype=torch.bool)
    return targets != IGNORED


def _sample(dataset: Dataset, number: Any, seed: int) -> tuple[Any, Any]:
    with SampleNote(lambda: f"raised for sample {number}"):
        return dataset.sample(int(number), seed=mix(seed, int(number)))


def _item(dataset: UserDataset, number: int, seed: int) -> Any:
    with SampleNote(lambda: f"raised for sample {number}"):
        return dataset.item(number, seed=mix(seed, number))


def _stack_parts(values: Sequence[Any], numbers: np.ndarray, *, padding: int | None) -> Any:
    """Values of the same structure, each of their tensors stacked along a new first dimension.

    Args:
        numbers: numbers of the samples that have the values, for messages.
    """
    first = values[0]
    if all(isinstance(value, Tensor) for value in values):
        return _stack(values, numbers, padding=padding)
    kinds = [type(value).__name__ for value in values]
    keys = [str(list(value)) if isinstance(value, dict) else _length(value) for value in values]
    for features in (kinds, keys):
        if len(set(features)) > 1:
            remedy = (
                "the samples of a microbatch have different parts: "
                f"{_difference(features, numbers)}; give each the same ones"
            )
            raise ConfigError("data", sorted(set(features)), remedy)
    if isinstance(first, dict):
        return {
            key: _stack_parts([value[key] for value in values], numbers, padding=padding)
            for key in first
        }
    return tuple(
        _stack_parts(parts, numbers, padding=padding) for parts in zip(*values, strict=True)
    )


def _length(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else f"{len(value)} parts"


def _stack(tensors: Sequence[Tensor], numbers: np.ndarray, *, padding: int | None) -> Tensor:
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len(set(shapes)) > 1:
        if padding is None or any(len(shape) != 1 for shape in shapes):
            remedy = (
                "the samples of a microbatch have different shapes: "
                f"{_difference([str(list(shape)) for shape in shapes], numbers)}; cut or pad them "
                "to one shape, or name a function that does it as data.collate"
            )
            raise ConfigError("data", sorted(set(shapes)), remedy)
        return torch.nn.utils.rnn.pad_sequence(list(tensors), True, padding)
    return torch.stack(list(tensors)).contiguous()


def _difference(features: Sequence[str], numbers: np.ndarray) -> str:
    """The sentence that a sample has the rarest of some features, and another the commonest."""
    (common, _), *_, (odd, _) = Counter(features).most_common()
    rare, other = numbers[features.index(odd)], numbers[features.index(common)]
    return f"sample {rare} has {odd}, and sample {other} has {common}"
