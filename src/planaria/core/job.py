"""What a job is: the tables of a job file as frozen records, each key with its default.

`job/config.py` reads a TOML file, checks it and makes a `JobConfig`; workers receive it in their
`NodeSpec`. The table of keys in docs/JOB.md prints the `about` text of each field.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

PolicyName = Literal[
    "absorb", "adaptive", "morph", "reinstantiate", "reroute", "repartition", "rollback"
]
POLICIES: Final[tuple[PolicyName, ...]] = get_args(PolicyName)


def _key(default: Any, about: str) -> Any:
    """A field with a default, and with the sentence that documents it."""
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata={"about": about})
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    kind: Literal["hf", "python", "paced"] = _key(
        "hf", "hf: a Hugging Face architecture; python: your own layers; paced: layers that sleep"
    )
    config: Mapping[str, Any] = _key(
        {}, "hf: the model's configuration, model_type = ... and any key of that configuration"
    )
    path: str = _key(
        "", "hf: a directory with config.json; its *.safetensors, if any, are the first weights"
    )
    target: str = _key(
        "", "python: module:function that returns the layers (Sequential or list of modules)"
    )
    profile: str = _key(
        "",
        "a profile (planaria profile -o FILE), or the name of a shipped one, to plan with instead "
        "of measuring; paced: required",
    )
    time_scale: float = _key(1.0, "paced: factor on the profile's seconds, those of its links too")
    jitter: float = _key(
        0.03, "paced: coefficient of variation of each layer's seconds; 0: as the profile says"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    kind: Literal["text", "hf", "python"] = _key(
        "text", "text: a text file; hf: a saved dataset directory; python: your own dataset"
    )
    path: str = _key("", "text: the file, empty for the Python library's own prose; hf: directory")
    target: str = _key("", "python: module:function that returns an indexable dataset")
    sequence_length: int = _key(128, "tokens in a sample")
    tokenizer: Literal["bytes", "bpe"] = _key(
        "bytes", "bytes: one token a byte; bpe: a byte-pair encoding trained on the text itself"
    )
    vocabulary_size: int = _key(1024, "bpe: tokens to learn")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    iterations: int = _key(100, "optimizer steps to train")
    target_loss: float = _key(0.0, "stop after the first iteration with a loss this low; 0: never")
    global_batch_size: int = _key(32, "samples in an iteration; never changed by a failure")
    microbatch_size: int = _key(4, "samples in a microbatch; divides global_batch_size")
    optimizer: Mapping[str, Any] = _key(
        {"name": "AdamW"}, "a class of torch.optim by name, and its arguments"
    )
    learning_rate: float = _key(3e-4, "the highest of the schedule")
    schedule: Mapping[str, Any] = _key(
        {"name": "constant"},
        "constant, linear or cosine; warmup_iterations = 0, final_fraction = 0.0",
    )
    gradient_clip: float = _key(0.0, "largest global gradient norm; 0: no clipping")
    dtype: Literal["float32", "bfloat16"] = _key(
        "float32", "of parameters in forward and backward; bfloat16 keeps float32 masters"
    )
    activation_checkpointing: bool = _key(
        False, "recompute each block's activations in the backward"
    )
    seed: int = _key(0, "of parameters, order of samples and dropout")
    deterministic: bool = _key(True, "the same bits on any number of nodes (float64 gradient sums)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResilienceConfig:
    failures_tolerated: int = _key(
        1, "f: any f nodes may be lost at once; f + 1 pipelines at least"
    )
    policy: PolicyName = _key(  # noqa: RUF009 (an alias of a Literal)
        "adaptive",
        "who answers a loss; reinstantiate: pipelines made anew (Oobleck); reroute: microbatches "
        "go around lost nodes (ReCycle); repartition: pipelines of any depth, searched for the "
        "nodes that are left (Odyssey); morph: the best grid of equal pipelines, from the newest "
        "save (Varuna); absorb: a neighbour computes a lost node's layers, which it keeps in step, "
        "in about twice the memory (Bamboo); rollback: standby nodes take the places of lost ones, "
        "if there are any (Gemini); adaptive: whichever is expected to train the most "
        "samples before the next failure",
    )
    failure_rate: float = _key(
        0.0, "failures of the whole job in an hour, to choose answers by; 0: learned from its own"
    )
    dp_range: int = _key(
        2, "repartition: pipelines more or fewer than there are that are searched, at most"
    )
    pp_range: int = _key(
        2, "repartition: nodes of a pipeline more or fewer than an even share, at most"
    )
    failures_ahead: int = _key(
        2, "losses at once that answers are searched for before they come; 0: none"
    )
    assignment: Literal["least_bytes", "naive"] = _key(
        "least_bytes",
        "who takes which place after a loss; least_bytes: such that the fewest bytes move, sent by "
        "all who hold them; naive: in order, each layer from its first holder, to compare with",
    )
    reductions: Literal["coloured", "uncoloured"] = _key(
        "coloured",
        "order in which gradients are summed; coloured: in the fewest rounds; uncoloured: layer "
        "after layer, to compare with; the same bits",
    )
    when_below: Literal["continue", "stop"] = _key(
        "continue",
        "with fewer than (f + 1) * n0 nodes left go on with what fits, or save and stop (exit 3)",
    )
    corruption_guard: bool = _key(
        True, "compare parameters among the holders of a layer; false: nodes of different CPU types"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    directory: str = _key(
        "checkpoints",
        "where saves are written: a directory, or the URL of an object store (s3://, gs://, az://)",
    )
    persist_every: int = _key(0, "iterations between saves; 0: at the end and on Ctrl-C")
    keep: int = _key(2, "newest saves kept; 0: all")
    timeout_s: float = _key(
        600.0,
        "where nothing is written for so long, nobody waits for a save any more: the job ends "
        "without its last one, or goes back to an older one; so long, too, each thing that is read "
        "of saves is waited for",
    )
    copies: int = _key(
        0,
        "copies of each layer in the memory of nodes, its holder's own included, or as many as "
        "there are nodes; 0: none",
    )
    every: int | Literal["auto"] = _key(
        "auto",
        "iterations between versions of these copies, for which a commit waits; auto: as often as "
        "they come through, and nothing waits",
    )
    strategy: Literal["mixed", "group", "ring", "optimised"] = _key(
        "mixed",
        "which nodes keep copies of whose layers; mixed: in groups of as many nodes as copies, and "
        "a ring of what is left; group: mixed where groups do not come out even; ring; optimised: "
        "mixed, or what loses layers less often without any node that keeps more",
    )
    failure_domains: tuple[tuple[int, ...], ...] = _key(
        (), "nodes that may fail together, by number, as [[0, 1], [2, 3]]; copies go elsewhere"
    )
    buffer_bytes: int = _key(
        8 << 20, "of copies on their way to a node that keeps them, from each node"
    )
    num_buffers: int = _key(4, "into which these are cut")
    mode: Literal["interleaved", "unpipelined", "naive", "blocking"] = _key(
        "interleaved",
        "when copies go: while the network is idle; so, with a single buffer; at once, a layer "
        "at a time; at once, while training waits",
    )
    path: Literal["host", "device"] = _key(
        "host",
        "where copies arrive: in their host's memory, or in buffers of a device, from which they "
        "are copied there (paced jobs only)",
    )
    gamma: float | Literal["auto"] = _key(
        "auto", "share of an idle span that copies use; auto: by how much spans differ"
    )
    profile_iterations: int = _key(
        20,
        "iterations in which the network is watched, at the start of a job, before the first copy, "
        "and again and again; 0: as predicted at first",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    nodes: int = _key(2, "nodes to start with")
    max_nodes: int = _key(
        0, "nodes that there may be once some have joined, to plan for; 0: as many as nodes"
    )
    standby: int = _key(
        0,
        "nodes to start besides, which wait to take the places of lost ones; of those that come "
        "later as many wait, once there are as many at work as nodes says",
    )
    grant_s: float = _key(
        0.0,
        "seconds in which another machine is granted for one that is lost; where too few nodes are "
        "left to go on, the job waits twice as long for it and 10 s more; 0: none is asked for",
    )
    devices_per_node: int = _key(1, "devices in each node")
    device_memory_bytes: int = _key(
        0, "what a device may hold; 0: as the profile says, and no limit where none is given"
    )
    lease_s: float = _key(3.0, "a node that is not heard of for so long is lost")
    notice_s: float = _key(30.0, "SIGTERM on a node means that it is gone after so long")
    rejoin_delay_s: float = _key(
        10.0,
        "a machine whose nodes failed twice is taken back so long after that, doubled each time",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """A whole job: model, data, training, resilience, checkpoints and cluster."""

    name: str = _key("job", "names the job in reports and logs")
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of the whole job in one iteration."""
        return self.training.global_batch_size // self.training.microbatch_size
