"""The profiles that come with planaria: made by profiles/analytic.py, not measured.

The shapes are those that the models' papers give; GPT-3 has dense attention in every block. The
machine has nodes with devices of the type NVIDIA A100 SXM 80 GB:

- compute and memory: 312e12 FLOP/s in bfloat16, 2.039e12 bytes/s of memory bandwidth, NVLink of
  300e9 bytes/s in one direction (data sheet of the A100);
- network: one 200 Gb/s port of HDR InfiniBand per device (DGX A100): 25e9 bytes/s;
- host: PCIe 4.0 x16 to the node's memory, 31.5e9 bytes/s, of which 25e9 are assumed;
- attained share: half of the peak. Megatron-LM trains at 44% to 52% of it from end to end
  (Narayanan et al., SC '21, table 1), bubbles and messages included;
- memory for a job: 80e9 of the device's 85.9e9 bytes; the runtime and messages in flight need the
  rest;
- latencies: 5 us in a node, 10 us between nodes and to the host; assumed.

A microbatch has as many samples as in Oobleck's table 1 for its five models, and one for the
others. `python -m planaria.profiles` prints what the models cost; given a directory, it also writes
the profiles there (`make profiles`).
"""

from pathlib import Path
from typing import Final

from planaria.core.plan import Link, ModelProfile
from planaria.profiles.analytic import Machine, TransformerShape, analytic_profile

A100: Final = Machine(
    name="A100 SXM 80 GB",
    flops_per_s_peak=312e12,
    attained_share=0.5,
    bandwidth_bytes_per_s=2.039e12,
    memory_bytes=80_000_000_000,
    intra_node=Link(5e-6, 300e9),
    inter_node=Link(10e-6, 25e9),
    device_to_host=Link(10e-6, 25e9),
)
BERT_LARGE: Final = TransformerShape(
    name="bert-large",
    num_blocks=24,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=16,
    feed_forward_size=4096,
    vocabulary_size=30_522,
    sequence_length=512,
    is_encoder=True,
)
LLAMA2_7B: Final = TransformerShape(
    name="llama2-7b",
    num_blocks=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=32,
    feed_forward_size=11_008,
    vocabulary_size=32_000,
    sequence_length=4096,
    is_gated=True,
    has_biases=False,
    has_learned_positions=False,
    has_tied_embedding=False,
    has_dropout=False,
)


def _gpt(
    name: str, *, num_blocks: int, hidden_size: int, num_heads: int, sequence_length: int = 2048
) -> TransformerShape:
    return TransformerShape(
        name=name,
        num_blocks=num_blocks,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        feed_forward_size=4 * hidden_size,
        vocabulary_size=50_257,
        sequence_length=sequence_length,
    )


# Pairs of a shape and the number of samples in a microbatch. Oobleck's GPT-2 is the medium one of
# the four sizes.
SHIPPED: Final = (
    (BERT_LARGE, 32),
    (_gpt("gpt2", num_blocks=24, hidden_size=1024, num_heads=16, sequence_length=1024), 32),
    (_gpt("gpt3-350m", num_blocks=24, hidden_size=1024, num_heads=16), 16),
    (_gpt("gpt3-2.7b", num_blocks=32, hidden_size=2560, num_heads=32), 2),
    (_gpt("gpt3-6.7b", num_blocks=32, hidden_size=4096, num_heads=32), 2),
    (_gpt("gpt3-175b", num_blocks=96, hidden_size=12_288, num_heads=96), 1),
    (LLAMA2_7B, 1),
)
NAMES: Final = tuple(shape.name for shape, _ in SHIPPED)
NOT_FOUND: Final = (
    f"there is no such file, and no shipped profile has that name; shipped are {', '.join(NAMES)}"
)


def shipped_profiles() -> tuple[ModelProfile, ...]:
    """The shipped profiles, computed by the analytic model; the files of this folder hold the
    same."""
    return tuple(
        analytic_profile(shape, A100, microbatch_size=microbatch_size)
        for shape, microbatch_size in SHIPPED
    )


def shipped_path(name: str) -> Path:
    """The file of a shipped profile."""
    assert name in NAMES
    return Path(__file__).with_name(f"{name}.json")


def profile_path(directory: Path, name: str) -> Path:
    """The file of the profile that a user names.

    Args:
        name: path relative to directory, or name of a shipped profile; an existing file takes
            precedence.
    """
    path = Path(directory, name)
    return path if path.is_file() or name not in NAMES else shipped_path(name)
