"""Profiles of transformers computed from their shapes, for devices on which nobody measured them.

The layers are the embedding, one layer per block, and the head (final norm, logits and loss). The
work of a layer has three parts: the forward, the gradient of its input, and that of its weights. On
d devices of a node a part takes

    max(FLOPs / (attained share * peak), bytes moved / memory bandwidth) / d + all-reduces

FLOPs: a product of an m x k with a k x n matrix takes 2 m n k, and each of its two gradients as
many. Attention multiplies queries with keys, and scores with values: 4 s h for each token of a
sequence of s, half of it where a token sees only those before it. Attention has no weights, so all
of its backward is the gradient of the input: five products instead of two, as flash attention
computes the scores again. Norms, activation functions and the loss count as 0 FLOPs; the attained
share makes up for them.

Bytes moved: each part moves the parameters once, and the activations kept for the backward twice
(written and read). The embedding moves the rows that it needs, not its whole table.

All-reduces: tensor parallelism sums the hidden states twice in a block's forward and twice in its
backward, once behind the embedding and once in the head's backward. Each sum takes two latencies
and 2 (d - 1) / d * bytes / bandwidth. The three sums of a few bytes per token in the loss are left
out.

Memory: parameters, their gradients and activations are in bfloat16. The optimizer keeps a float32
copy of the parameters, m and v: 12 bytes per parameter. A block keeps the input of every matrix,
norm and activation function; queries, keys and values; and a byte for each value that dropout may
drop. That is 34 s b h bytes for a GPT. Flash attention does not keep the scores; the 4 bytes that
it keeps for each head and token are not counted. The head keeps float32 logits of all tokens, also
for an encoder.

Activations computed again (RecomputationCost): with "full" a layer keeps its input alone, and the
backward takes the seconds of the forward in addition. With "selective" a block keeps its input and
the results of its matrices and of attention, 22 s b h bytes for a GPT. In addition the backward
reads these once and writes once what it computes again, at the memory's bandwidth, because norms,
activation functions and dropout count as 0 FLOPs; of the two sums of hidden states it repeats the
first, which the second norm needs. An embedding has no product, so both modes keep the tokens. The
head follows the last block at once, and is never computed again.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (MLSys
'23), section 4: activations; Shoeybi et al., Megatron-LM (2019), section 3: where tensor
parallelism sums; Dao, FlashAttention-2 (2023), section 4.1: five products for two.
Differs: the first paper's term 5 a s / h is left out with the scores. Each device is taken to keep
all activations of a layer, also where several devices share it, as in estimator/peak_memory.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from planaria.core.plan import LayerProfile, Link, ModelProfile, RecomputationCost, TiedParameters

DEVICE_COUNTS: Final = (1, 2, 4, 8)
VALUE_BYTES: Final = 2  # bfloat16: a parameter, a gradient, an activation.
OPTIMIZER_BYTES: Final = 12  # Bytes per parameter: float32 copy, m and v.
LOGIT_BYTES: Final = 4
MASK_BYTES: Final = 1
TOKEN_BYTES: Final = 8
NUM_SEGMENTS: Final = 2  # An encoder's embedding tells two sentences apart.


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """The sizes of a transformer; the defaults are those of GPT-2.

    Attributes:
        num_kv_heads: number of heads of keys and values; below num_heads for grouped-query
            attention.
        feed_forward_size: number of values between the matrices of the feed-forward part.
        sequence_length: tokens in a sample.
        is_encoder: whether every token sees all others, norms come last, and the head has an extra
            matrix before the logits (BERT); else a token sees only those before it.
        is_gated: whether a third matrix gates the feed-forward part (SwiGLU).
        has_biases: whether matrices and norms have biases.
        has_learned_positions: whether positions have a learned table; else they are computed
            (rotary).
        has_tied_embedding: whether the head's matrix is the embedding's table.
        has_dropout: whether dropout follows attention, the feed-forward part and the embedding.
    """

    name: str
    num_blocks: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    feed_forward_size: int
    vocabulary_size: int
    sequence_length: int
    is_encoder: bool = False
    is_gated: bool = False
    has_biases: bool = True
    has_learned_positions: bool = True
    has_tied_embedding: bool = True
    has_dropout: bool = True

    @property
    def kv_size(self) -> int:
        """Size of a token's keys in all heads together, and of its values."""
        return self.hidden_size // self.num_heads * self.num_kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The nodes of a cluster, as their data sheets describe them.

    Attributes:
        flops_per_s_peak: peak of a device in bfloat16 without sparsity.
        attained_share: share of that peak, 0 to 1, that a layer attains in its own work.
        bandwidth_bytes_per_s: bandwidth of a device's memory.
        memory_bytes: memory of a device that a job may use.
        intra_node: link from device to device in a node, one direction.
        inter_node: link between nodes, one direction.
        device_to_host: link from a device to the node's own memory, one direction.
    """

    name: str
    flops_per_s_peak: float
    attained_share: float
    bandwidth_bytes_per_s: float
    memory_bytes: int
    intra_node: Link
    inter_node: Link
    device_to_host: Link

    def seconds(self, num_flops: int, moved_bytes: int) -> float:
        """Seconds of the work on one device."""
        return max(
            num_flops / (self.flops_per_s_peak * self.attained_share),
            moved_bytes / self.bandwidth_bytes_per_s,
        )

    def all_reduce_s(self, num_bytes: int, num_devices: int) -> float:
        """Seconds in which devices of a node sum num_bytes, as in estimator/reductions.py."""
        if num_devices == 1:
            return 0.0
        share = 2 * (num_devices - 1) / num_devices
        return 2 * self.intra_node.latency_s + share * (
            num_bytes / self.intra_node.bandwidth_bytes_per_s
        )


def analytic_profile(
    shape: TransformerShape, machine: Machine, *, microbatch_size: int
) -> ModelProfile:
    """The profile of a transformer on a machine, with seconds rounded to four digits.

    Its device counts are those of 1, 2, 4 and 8 that divide the numbers of heads.
    """
    num_tokens = microbatch_size * shape.sequence_length
    hidden_bytes = VALUE_BYTES * num_tokens * shape.hidden_size
    counts = [
        count
        for count in DEVICE_COUNTS
        if shape.num_heads % count == 0 and shape.num_kv_heads % count == 0
    ]

    def layer_profile(work: _Work) -> LayerProfile:
        return _layer_profile(work, machine, counts=counts, reduced_bytes=hidden_bytes)

    block = layer_profile(_block(shape, num_tokens))
    layers = (
        layer_profile(_embedding(shape, num_tokens)),
        *(replace(block, name=f"block.{index}") for index in range(shape.num_blocks)),
        replace(layer_profile(_head(shape, num_tokens)), output_bytes=0),
    )
    return ModelProfile(
        model=shape.name,
        microbatch_size=microbatch_size,
        dtype="bfloat16",
        device=machine.name,
        device_memory_bytes=machine.memory_bytes,
        layers=layers,
        links={
            "intra_node": machine.intra_node,
            "inter_node": machine.inter_node,
            "device_to_host": machine.device_to_host,
        },
        tied=_tied_parameters(shape),
    )


def num_parameters(shape: TransformerShape) -> int:
    """Number of parameters of the whole model; a table that embedding and head share counts
    once."""
    counted = sum(
        count * work.num_parameters for count, work in _works(shape, shape.sequence_length)
    )
    return counted - shape.has_tied_embedding * shape.vocabulary_size * shape.hidden_size


def sample_flops(shape: TransformerShape) -> int:
    """FLOPs of the forward and backward of one sample, scores that attention computes again
    included."""
    return sum(
        count
        * sum(part.num_flops for part in (work.forward, work.input_gradient, work.weight_gradient))
        for count, work in _works(shape, shape.sequence_length)
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a layer's work on one microbatch.

    Attributes:
        num_reductions: number of all-reduces of hidden states if several devices share the part.
    """

    num_flops: int
    moved_bytes: int
    num_reductions: int = 0


@dataclass(frozen=True, slots=True)
class _Again:
    """What a layer keeps if its backward computes activations again, and that additional work."""

    activation_bytes: int
    part: _Part


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """The work of one layer on one microbatch, and what it keeps in memory.

    Attributes:
        activation_bytes: bytes kept from the forward to the backward.
        input_gradient, weight_gradient: parts of the backward.
        again: memory and work if activations are computed again, by mode; empty: they never are.
    """

    name: str
    num_parameters: int
    activation_bytes: int
    forward: _Part
    input_gradient: _Part
    weight_gradient: _Part
    again: Mapping[str, _Again] = field(default_factory=dict)


def _works(shape: TransformerShape, num_tokens: int) -> tuple[tuple[int, _Work], ...]:
    """Pairs for each kind of layer: number of such layers, and the work of one."""
    return (
        (1, _embedding(shape, num_tokens)),
        (shape.num_blocks, _block(shape, num_tokens)),
        (1, _head(shape, num_tokens)),
    )


def _embedding(shape: TransformerShape, num_tokens: int) -> _Work:
    h = shape.hidden_size
    num_rows = shape.vocabulary_size
    if shape.has_learned_positions:
        num_rows += shape.sequence_length
    norm = 0
    if shape.is_encoder:
        num_rows += NUM_SEGMENTS
        norm = _norm_parameters(shape)
    kept_bytes = (
        TOKEN_BYTES + shape.has_dropout * MASK_BYTES * h + shape.is_encoder * VALUE_BYTES * h
    )
    moved_bytes = 2 * num_tokens * (VALUE_BYTES * h + kept_bytes)
    forward = _Part(0, moved_bytes, num_reductions=1)
    again = _Again(num_tokens * TOKEN_BYTES, forward)
    return _Work(
        name="embedding",
        num_parameters=num_rows * h + norm,
        activation_bytes=num_tokens * kept_bytes,
        forward=forward,
        input_gradient=_Part(0, 0),
        weight_gradient=_Part(0, moved_bytes),
        again={"selective": again, "full": again},
    )


def _block(shape: TransformerShape, num_tokens: int) -> _Work:
    h, kv, f = shape.hidden_size, shape.kv_size, shape.feed_forward_size
    num_wide = 2 if shape.is_gated else 1  # Number of h x f matrices; one f x h matrix follows.
    weights = h * (h + 2 * kv) + h * h + (num_wide + 1) * h * f
    biases = shape.has_biases * (h + 2 * kv + h + num_wide * f + h)
    # The values kept per token are, in the order of their use: the input of a norm; the input of
    # the query, key and value matrices; queries, keys and values; the input of the projection; the
    # input of a norm; the input and the outputs of the wide matrices; the input of the last matrix.
    # The output of the activation function is the last of these, or is computed again.
    values = 2 * h + (h + 2 * kv) + h + 2 * h + num_wide * f + f
    kept_bytes = VALUE_BYTES * values + shape.has_dropout * MASK_BYTES * 2 * h
    activation_bytes = num_tokens * kept_bytes
    parameters = weights + biases + 2 * _norm_parameters(shape)
    moved_bytes = VALUE_BYTES * parameters + 2 * activation_bytes
    product_flops = 2 * num_tokens * weights
    num_visible = shape.sequence_length if shape.is_encoder else shape.sequence_length // 2
    score_flops = 4 * num_tokens * num_visible * h
    forward = _Part(product_flops + score_flops, moved_bytes, num_reductions=2)
    # The input; queries, keys and values; what attention, the projection, the wide matrices and the
    # last matrix give.
    results = VALUE_BYTES * (h + (h + 2 * kv) + h + h + num_wide * f + h)
    # The outputs of the norms, the input of the second one, the input of the last matrix, masks.
    computed = VALUE_BYTES * (2 * h + h + f) + shape.has_dropout * MASK_BYTES * 2 * h
    selective = _Part(0, num_tokens * (results + computed), num_reductions=1)
    return _Work(
        name="block",
        num_parameters=parameters,
        activation_bytes=activation_bytes,
        forward=forward,
        input_gradient=_Part(product_flops + 5 * score_flops // 2, moved_bytes, num_reductions=2),
        weight_gradient=_Part(product_flops, moved_bytes),
        again={
            "selective": _Again(num_tokens * results, selective),
            "full": _Again(num_tokens * VALUE_BYTES * h, forward),
        },
    )


def _head(shape: TransformerShape, num_tokens: int) -> _Work:
    h, vocabulary = shape.hidden_size, shape.vocabulary_size
    weights = vocabulary * h
    biases = 0
    values = 2 * h  # The inputs of the norm and of the last matrix.
    if shape.is_encoder:
        weights += h * h
        biases = h + vocabulary
        values += 2 * h  # The inputs of the matrix before the last, and of its activation function.
    activation_bytes = num_tokens * (VALUE_BYTES * values + LOGIT_BYTES * vocabulary)
    parameters = weights + biases + _norm_parameters(shape)
    moved_bytes = VALUE_BYTES * parameters + 2 * activation_bytes
    num_flops = 2 * num_tokens * weights
    return _Work(
        name="head",
        num_parameters=parameters,
        activation_bytes=activation_bytes,
        forward=_Part(num_flops, moved_bytes),
        input_gradient=_Part(num_flops, moved_bytes, num_reductions=1),
        weight_gradient=_Part(num_flops, moved_bytes),
    )


def _norm_parameters(shape: TransformerShape) -> int:
    return (1 + shape.has_biases) * shape.hidden_size


def _tied_parameters(shape: TransformerShape) -> tuple[TiedParameters, ...]:
    if not shape.has_tied_embedding:
        return ()
    table_bytes = VALUE_BYTES * shape.vocabulary_size * shape.hidden_size
    return (TiedParameters((0, shape.num_blocks + 1), table_bytes),)


def _layer_profile(
    work: _Work, machine: Machine, *, counts: Sequence[int], reduced_bytes: int
) -> LayerProfile:
    def seconds(part: _Part) -> dict[int, float]:
        alone_s = machine.seconds(part.num_flops, part.moved_bytes)
        return {
            count: _rounded_s(
                alone_s / count + part.num_reductions * machine.all_reduce_s(reduced_bytes, count)
            )
            for count in counts
        }

    return LayerProfile(
        name=work.name,
        forward_s=seconds(work.forward),
        backward_input_s=seconds(work.input_gradient),
        backward_weight_s=seconds(work.weight_gradient),
        parameter_bytes=VALUE_BYTES * work.num_parameters,
        optimizer_bytes=OPTIMIZER_BYTES * work.num_parameters,
        activation_bytes=work.activation_bytes,
        output_bytes=reduced_bytes,
        recomputed={
            mode: RecomputationCost(again.activation_bytes, seconds(again.part))
            for mode, again in work.again.items()
        },
    )


def _rounded_s(seconds: float) -> float:
    """The seconds rounded to four digits, which is more than the model is accurate to."""
    return float(f"{seconds:.4g}")
