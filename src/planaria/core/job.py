"""What a job is: the tables of a job file as frozen records, each key with its default.

`job/config.py` reads a TOML file, checks it and makes a `JobConfig`; workers receive it in their
`NodeSpec`. The table of keys in docs/JOB.md prints the `about` text of each field.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, get_args

from planaria.core.plan import Recomputation

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
        "hf",
        "hf: a Hugging Face architecture; python: your own layers; paced: layers that only sleep, "
        "for as long as a profile says",
    )
    config: Mapping[str, Any] = _key(
        {},
        "hf: the model's configuration: model_type = ..., and any key of that architecture's "
        "configuration",
    )
    path: str = _key(
        "",
        "hf: a directory with config.json; training starts from the weights in its *.safetensors; "
        "a line says if it has none, and lora needs them",
    )
    lora: Mapping[str, Any] = _key(
        {},
        "hf: arguments of LoraConfig of the package peft, such as r = 8 and target_modules; only "
        "these low-rank adapters are trained, moved, copied and saved; empty: the whole model is",
    )
    target: str = _key(
        "",
        "python: module:function; the function returns the layers (a Sequential or a list of "
        "modules)",
    )
    profile: str = _key(
        "",
        "a profile (planaria profile -o FILE writes one), or the name of a shipped one; the job "
        "then plans with it and does not measure the layers; paced: required",
    )
    time_scale: float = _key(
        1.0, "paced: all seconds of the profile are multiplied by this, those of its links too"
    )
    jitter: float = _key(
        0.03,
        "paced: how much each layer's seconds vary, as a coefficient of variation; 0: they do not "
        "vary",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    kind: Literal["text", "tokens", "hf", "python"] = _key(
        "text",
        "text: a text file; tokens: a file of token ids, raw uint16 as nanoGPT's .bin files, or a "
        ".npy file; hf: a directory saved by datasets; python: your own dataset",
    )
    path: str = _key(
        "",
        "text, tokens: the file; empty: the text in the modules of Python's own library; hf: the "
        "directory",
    )
    target: str = _key(
        "", "python: module:function; the function returns a dataset with a length and an index"
    )
    collate: str = _key(
        "",
        "python: module:function; the function makes the inputs and targets of a microbatch of a "
        "list of items of the dataset; empty: they are stacked",
    )
    workers: int = _key(
        0,
        "number of processes of each rank that load samples ahead, while the rank computes; 0: the "
        "rank loads them itself; the bits do not depend on it",
    )
    sequence_length: int = _key(128, "number of tokens in a sample")
    tokenizer: Literal["bytes", "bpe", "model"] = _key(
        "bytes",
        "bytes: each byte is a token; bpe: a byte-pair encoding, which is trained on the text "
        "itself; model: the tokenizer in the directory model.path",
    )
    vocabulary_size: int = _key(1024, "bpe: number of tokens that the tokenizer learns")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    iterations: int = _key(100, "number of optimizer steps")
    target_loss: float = _key(
        0.0,
        "training stops after the first iteration whose loss is this low; 0: it does not stop "
        "early",
    )
    global_batch_size: int = _key(
        32, "number of samples in an iteration; a failure never changes it"
    )
    microbatch_size: int = _key(
        4, "number of samples in a microbatch; it must divide global_batch_size"
    )
    optimizer: Mapping[str, Any] = _key(
        {"name": "AdamW"}, "the name of a class in torch.optim, and its arguments"
    )
    decay: Literal["all", "matrices"] = _key(
        "all",
        "the parameters to which the weight_decay of training.optimizer applies; matrices: those "
        "of two or more dimensions, so no biases and no gains of norms",
    )
    learning_rate: float = _key(3e-4, "the highest learning rate of the schedule")
    schedule: Mapping[str, Any] = _key(
        {"name": "constant"},
        "how the learning rate changes: constant, linear or cosine; with warmup_iterations = 0 "
        "and final_fraction = 0.0",
    )
    gradient_clip: float = _key(
        0.0,
        "largest norm of the global gradient; a longer gradient is scaled down to it; 0: no limit",
    )
    dtype: Literal["float32", "bfloat16"] = _key(
        "float32",
        "type of parameters, float buffers and float inputs in forward and backward; bfloat16: the "
        "optimizer keeps float32 copies of the parameters, and what a layer of your own names in "
        "float32_names stays in float32",
    )
    activation_checkpointing: Literal["auto", "none", "selective", "full"] | bool = _key(
        "none",
        "what the backward computes again, so that the forward need not keep it; auto: the planner "
        "chooses it for each layer of a stage, and nothing where memory is enough; none: nothing; "
        "selective: all but matrix products and attention; full (or true): all activations of a "
        "block; the bits do not depend on it; selective does not go with compile",
    )
    compile: bool = _key(
        False,
        "each block is compiled by torch.compile, once in each process and for each shape of its "
        "inputs: what a rank keeps or gets of the same shape is not compiled again",
    )
    seed: int = _key(0, "decides the first parameters, the order of samples and dropout")
    deterministic: bool = _key(
        True, "the job gives the same bits on any number of nodes; it sums gradients in float64"
    )
    callbacks: tuple[str, ...] = _key(
        (),
        "module:function of functions that return a planaria.Callbacks, whose functions are called "
        "while the job trains, by the process that leads it",
    )

    @property
    def recomputation(self) -> Recomputation:
        """What the backward of each layer computes again, unless its stage says otherwise."""
        mode = self.activation_checkpointing
        if isinstance(mode, bool):
            return "full" if mode else "none"
        return "none" if mode == "auto" else mode

    @property
    def chooses_recomputation(self) -> bool:
        """Whether the planner chooses what is computed again."""
        return self.activation_checkpointing == "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    every: int = _key(
        0,
        "number of iterations from one evaluation on held-out data to the next; the last iteration "
        "has one, too; 0: none, whatever other keys are given; the bits of training do not depend "
        "on it",
    )
    path: str = _key(
        "",
        "the held-out file or directory, if data.kind is text, tokens or hf; text has the tokens "
        "of data.path",
    )
    target: str = _key(
        "", "module:function of the held-out dataset, as data.target, if data.kind is python"
    )
    samples: int = _key(0, "number of samples that are evaluated, from the first on; 0: all")
    metrics: Mapping[str, str] = _key(
        {},
        "further numbers, by name: module:function; the function takes the output of the last "
        "layer and the targets of a microbatch and returns a sum over its targets, of which the "
        "mean is shown",
    )
    patience: int = _key(
        0,
        "training stops after this many evaluations in a row whose loss is not the lowest so far; "
        "0: it does not stop early",
    )

    @property
    def data_name(self) -> str:
        """Name of the held-out data, without the directory that they are in."""
        return self.target or self.path.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResilienceConfig:
    failures_tolerated: int = _key(
        1,
        "f: the job survives the loss of any f nodes at once, so it needs at least f + 1 pipelines",
    )
    policy: PolicyName = _key(  # noqa: RUF009 (an alias of a Literal)
        "adaptive",
        "what answers a loss; reinstantiate: new pipelines from templates (Oobleck); reroute: "
        "microbatches go around lost nodes (ReCycle); repartition: a search finds pipelines of "
        "any depth for the nodes that are left (Odyssey); morph: the best grid of equal "
        "pipelines, from the newest save (Varuna); absorb: a neighbour keeps a lost node's layers "
        "in step and computes them, which takes about twice the memory, on nodes of one device "
        "(Bamboo); rollback: "
        "standby nodes take the places of lost nodes, if there are any (Gemini); adaptive: the "
        "answer that is expected to train the most samples before the next failure",
    )
    failure_rate: float = _key(
        0.0,
        "expected failures of the whole job in an hour; answers are chosen by it; 0: the job "
        "counts its own failures and estimates it",
    )
    dp_range: int = _key(
        2, "repartition: the search tries up to this many pipelines more or fewer than there are"
    )
    pp_range: int = _key(
        2,
        "repartition: the search tries pipelines with up to this many nodes more or fewer than an "
        "even share",
    )
    failures_ahead: int = _key(
        2,
        "answers are searched ahead for the loss of up to this many nodes at once; 0: no search "
        "ahead",
    )
    assignment: Literal["least_bytes", "naive"] = _key(
        "least_bytes",
        "which node takes which place after a loss; least_bytes: the fewest bytes move, and all "
        "holders of a layer send parts of it; naive: nodes keep their order and the first holder "
        "sends the whole layer (for comparison)",
    )
    reductions: Literal["coloured", "uncoloured"] = _key(
        "coloured",
        "order in which gradients are summed; coloured: in the fewest rounds; uncoloured: layer "
        "after layer (for comparison); both give the same bits",
    )
    when_below: Literal["continue", "stop"] = _key(
        "continue",
        "what the job does with fewer than (f + 1) * n0 nodes; continue: it trains on with "
        "pipelines that fit; stop: it saves and ends with exit code 3",
    )
    corruption_guard: bool = _key(
        True,
        "the holders of a layer compare its parameters; set it to false if nodes have CPUs of "
        "different types",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    directory: str = _key(
        "checkpoints",
        "where the job writes saves: a directory, or the URL of an object store (s3://, gs://, "
        "az://)",
    )
    persist_every: int = _key(
        0,
        "number of iterations from one save to the next; 0: the job saves only at its end, on "
        "Ctrl-C, and when it begins to survive fewer failures than resilience.failures_tolerated",
    )
    keep: int = _key(2, "how many of the newest saves stay; 0: all")
    timeout_s: float = _key(
        600.0,
        "how long the job waits for a save in which nothing more is written, and for each read of "
        "a save; then it ends without its last save, or goes back to an older one",
    )
    copies: int = _key(
        0,
        "number of copies of each layer in the memory of nodes; its holder's own copy counts; at "
        "most one for each node; 0: none, whatever other keys of copies are given",
    )
    every: int | Literal["auto"] = _key(
        "auto",
        "number of iterations from one version of these copies to the next; a commit waits until "
        "the version is complete; auto: as often as the network allows, and no commit waits",
    )
    strategy: Literal["mixed", "group", "ring", "optimised"] = _key(
        "mixed",
        "which nodes keep copies of whose layers; mixed: groups of as many nodes as there are "
        "copies, and a ring of the nodes that are left over; group: as mixed, where the nodes do "
        "not divide into such groups; ring: one ring of all nodes; optimised: as mixed, or a "
        "placement that loses layers less often and in which no node keeps more",
    )
    failure_domains: tuple[tuple[int, ...], ...] = _key(
        (),
        "nodes that may fail together, by number, such as [[0, 1], [2, 3]]; their copies are kept "
        "outside their domain; refused with agents on several machines, where planaria agent "
        "--domain NAME says it",
    )
    buffer_bytes: int = _key(
        8 << 20, "bytes of the buffers in which each rank sends copies to each node that keeps them"
    )
    num_buffers: int = _key(4, "number of equal buffers that buffer_bytes is divided into")
    mode: Literal["interleaved", "unpipelined", "naive", "blocking"] = _key(
        "interleaved",
        "when copies are sent; interleaved: while the network is idle; unpipelined: the same with "
        "a single buffer; naive: at once, a layer at a time; blocking: at once, and training "
        "waits",
    )
    schedule: Literal["measured", "paper"] = _key(
        "measured",
        "how interleaved copies are dealt to the idle spans of an iteration; measured: each piece "
        "goes in the first span that turns out to have room for it; paper: each has its span "
        "beforehand, as in Gemini's Algorithm 2, and the last span of the iteration takes what is "
        "left of the version",
    )
    path: Literal["host", "device"] = _key(
        "host",
        "where copies arrive; host: in the memory of the receiving machine; device: in buffers of "
        "its device, from which they are then copied to that memory; each device gives twice "
        "buffer_bytes of its memory for that",
    )
    gamma: float | Literal["auto"] = _key(
        "auto",
        "share of each idle span of the network that copies may use; auto: chosen by how much the "
        "spans vary",
    )
    profile_iterations: int = _key(
        20,
        "number of iterations in which the job watches the network before the first copy; it "
        "watches again from time to time; 0: it begins with predicted idle spans",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    nodes: int = _key(2, "number of nodes that the job starts with")
    max_nodes: int = _key(
        0,
        "largest number of nodes at work, once more have joined; the job makes plans for so many; "
        "0: the same as nodes",
    )
    standby: int = _key(
        0,
        "number of further nodes that are started and wait to take the places of lost nodes; when "
        "a node joins later and as many as nodes says are at work, it waits, too, until this many "
        "wait",
    )
    grant_s: float = _key(
        0.0,
        "seconds until another machine is granted for a lost one; if too few nodes are left to go "
        "on, the job waits twice as long and 10 s more for it; 0: the job asks for no machine; "
        "refused with agents on several machines, where --operator says whom to ask",
    )
    devices_per_node: int = _key(1, "number of devices in each node")
    device: str = _key(
        "auto",
        "type of the devices, as torch names it, such as cpu, cuda or xpu; auto: an accelerator if "
        "torch finds one on the machine, else the processor; late: the processor as a device with "
        "memory of its own, whose copies are as late as they may be, for tests; ranks share a "
        "device if there are more of them",
    )
    transport: Literal["auto", "host", "nccl"] = _key(
        "auto",
        "how tensors go from rank to rank; host: over TCP, through the memory of the machines; "
        "nccl: from GPU to GPU (not run on two GPUs yet); auto: nccl where every rank has an "
        "NVIDIA GPU of its own, torch has NCCL and encryption is off, else host, and a line says "
        "why",
    )
    device_memory_bytes: int = _key(
        0,
        "bytes that a device may hold; 0: the bytes that the profile says, which is a rank's share "
        "of its accelerator, if it has one; no limit if it says none",
    )
    pinned_memory_bytes: int = _key(
        0,
        "memory of its machine that a rank on an accelerator may pin for copies of its state; what "
        "is beyond that is copied through memory that is not pinned, which training waits for, and "
        "a line says so; 0: the rank's share of half of what the machine has left when it starts",
    )
    lease_s: float = _key(
        3.0,
        "a node counts as lost when nothing has come from it for this many seconds; at least 0.5",
    )
    patience_s: float = _key(
        600.0,
        "seconds in which a node on another machine that has lost the head keeps its workers and "
        "copies and looks for it, once its lease has run out; then the node saves what it holds by "
        "itself, and ends",
    )
    wait_s: float = _key(
        600.0,
        "seconds that a job on several machines waits for more of them when fewer nodes are left "
        "than can hold the model; before that it saves what is whole; 0: it ends at once",
    )
    checksums: Literal["auto", "on", "off"] = _key(
        "auto",
        "auto: messages between ranks have checksums where nodes are on several machines; on, off: "
        "they have them everywhere, or nowhere; what NCCL carries has none",
    )
    encryption: Literal["off", "on"] = _key(
        "off",
        "on: messages between ranks are encrypted by TLS 1.3, so that nobody can read or change "
        "them on their way, and never go over NCCL, which encrypts nothing; off: they are plain; "
        "what goes to a head is encrypted in any case",
    )
    notice_s: float = _key(
        30.0, "seconds from a notice that says no time, as a SIGTERM, until the node is gone"
    )
    notice: str = _key(
        "",
        "where each node looks for a notice that it will be taken away; the absolute path of a "
        "file that is made as the notice, or an http:// or https:// URL that answers with one (its "
        "text may be the number of seconds that are left, or a time such as 2026-01-31T12:00:00Z); "
        "ec2 or gcp: the machine's own metadata in that cloud; slurm: whether Slurm drains it; "
        "{node} is replaced by the node's number; empty: nowhere",
    )
    health_check: str = _key(
        "",
        "command for the shell that ends with 0 within 40 s if the machine is fit for a node, and "
        "else says what is wrong; it runs on each of several machines before it gets a node, and "
        "after a failure there; an unfit machine takes no node, and its node leaves in peace",
    )
    rejoin_delay_s: float = _key(
        10.0,
        "seconds until a machine is taken back whose nodes failed twice; each further failure "
        "doubles it",
    )

    @property
    def num_ranks_max(self) -> int:
        """Largest number of ranks that the job file asks for, those of standby nodes included."""
        return max(self.nodes + self.standby, self.max_nodes) * self.devices_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """A whole job: model, data, training, evaluation, resilience, checkpoints and cluster."""

    name: str = _key("job", "the job's name in reports and logs")
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of the whole job in one iteration."""
        return self.training.global_batch_size // self.training.microbatch_size

    @property
    def held_out(self) -> DataConfig:
        """The data of evaluations."""
        own = self.evaluation
        return replace(self.data, path=own.path, target=own.target)

    @property
    def sends_copies_over_devices(self) -> bool:
        """Whether copies in memory go from device to device; those of a paced job only seem to."""
        is_asked = self.checkpoint.copies > 1 and self.checkpoint.path == "device"
        return is_asked and self.model.kind != "paced"

    @property
    def chunk_buffers_bytes(self) -> int:
        """Bytes of a device that hold chunks of copies: those that leave and those that arrive."""
        return 2 * self.checkpoint.buffer_bytes if self.sends_copies_over_devices else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The facts from which the model of a save is built again without the job's data.

    Attributes:
        model: the job's model; its path is absolute.
        sequence_length: number of tokens in a sample.
        vocabulary_size: number of token ids of the data; 0: not known.
    """

    model: ModelConfig
    training: TrainingConfig
    sequence_length: int
    vocabulary_size: int
