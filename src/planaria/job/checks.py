"""Refuses jobs whose values are out of range or do not fit together, and missing inputs.

Inputs are looked for where the job runs, which may be on other machines than this one.

Two kinds of mistakes are not found here. Keys of model.config, of the optimizer and of the learning
rate's schedule are known only to torch and transformers; the engine checks them before it trains,
in the same words. How many nodes can have work is known only to the planner; planning.py checks it.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from planaria.checkpoint.disk.storage import absolute
from planaria.core.copies import BUFFER_BYTES_MIN
from planaria.core.job import CheckpointConfig, ClusterConfig, DataConfig, JobConfig, ModelConfig
from planaria.errors import ConfigError
from planaria.nodes.notices import check_notice_source, parse_notice_source
from planaria.profiles.shipped import NOT_FOUND, profile_path

_MINIMUM = {
    "model.jitter": 0,
    "data.sequence_length": 1,
    "data.workers": 0,
    "training.iterations": 1,
    "training.target_loss": 0,
    "training.microbatch_size": 1,
    "training.gradient_clip": 0,
    "training.seed": 0,
    "evaluation.every": 0,
    "evaluation.samples": 0,
    "evaluation.patience": 0,
    "resilience.failures_tolerated": 0,
    "resilience.failure_rate": 0,
    "resilience.dp_range": 0,
    "resilience.pp_range": 0,
    "resilience.failures_ahead": 0,
    "checkpoint.persist_every": 0,
    "checkpoint.keep": 0,
    "checkpoint.copies": 0,
    "checkpoint.buffer_bytes": BUFFER_BYTES_MIN,
    "checkpoint.num_buffers": 1,
    "checkpoint.profile_iterations": 0,
    "cluster.nodes": 1,
    "cluster.max_nodes": 0,
    "cluster.standby": 0,
    "cluster.grant_s": 0,
    "cluster.devices_per_node": 1,
    "cluster.device_memory_bytes": 0,
    "cluster.pinned_memory_bytes": 0,
    "cluster.lease_s": 0.5,
    "cluster.notice_s": 0,
    "cluster.rejoin_delay_s": 0,
    "cluster.wait_s": 0,
}
NODES_MAX = 10_000  # Nobody has more, so a number with one zero too many is refused at once.
_TIMEOUT_S_MAX = 1e8  # Three years. A thread cannot be waited for longer than 9e9 s.
_WORKERS_MAX = 256  # Each is a process, for each rank.
_MAXIMUM: dict[str, float] = {
    "data.workers": _WORKERS_MAX,
    "checkpoint.timeout_s": _TIMEOUT_S_MAX,
    "cluster.nodes": NODES_MAX,
    "cluster.max_nodes": NODES_MAX,
    "cluster.standby": NODES_MAX,
    "cluster.devices_per_node": NODES_MAX,
    "cluster.grant_s": _TIMEOUT_S_MAX,
    "cluster.lease_s": _TIMEOUT_S_MAX,
    "cluster.notice_s": _TIMEOUT_S_MAX,
    "cluster.patience_s": _TIMEOUT_S_MAX,
    "cluster.rejoin_delay_s": _TIMEOUT_S_MAX,
    "cluster.wait_s": _TIMEOUT_S_MAX,
}
# A plan has a route for each microbatch. With more than this, planning takes longer than training.
NUM_MICROBATCHES_MAX = 1 << 16
_POSITIVE = (
    *("training.learning_rate", "model.time_scale", "checkpoint.timeout_s"),
    "cluster.patience_s",
)

# The kinds of a key's table for which the key has a meaning; other keys have one for every kind.
_KINDS = {
    "model.config": ("hf",),
    "model.path": ("hf",),
    "model.lora": ("hf",),
    "model.target": ("python",),
    "model.time_scale": ("paced",),
    "model.jitter": ("paced",),
    "data.path": ("text", "tokens", "hf"),
    "data.tokenizer": ("text", "hf"),  # A saved data set may have texts.
    "data.target": ("python",),
    "data.collate": ("python",),
}

# The keys of [checkpoint] that have a meaning only with checkpoint.copies.
_COPY_KEYS = (
    *("every", "strategy", "failure_domains", "buffer_bytes", "num_buffers", "mode", "schedule"),
    *("path", "gamma", "profile_iterations"),
)
_PIECE_BYTES_MIN = BUFFER_BYTES_MIN // 4
_BYTE_TOKENS = 256


@contextmanager
def name_refusals(field: str, path: str) -> Iterator[None]:
    """Makes it a mistake of the user's if the system refuses to look for a path in the body.

    Raises:
        ConfigError: naming `field`: the user may not enter a directory, a name is too long, or the
            like.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(field, path, f"cannot be reached: {error.strerror}") from error


def is_utf_8(text: str) -> bool:
    """Whether messages and records can hold a text; a file's name may have any bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_job(job: JobConfig) -> None:
    """Refuses values out of range, and keys that do not fit together.

    Raises:
        ConfigError: the job has a mistake; the first one found is named.
    """
    _check_ranges(job)
    _check_kinds(job)
    _check_copies(job.checkpoint)
    _check_model(job.model)
    _check_data(job.data)
    if job.data.tokenizer == "model" and not job.model.path:
        remedy = (
            'it is the tokenizer in the directory model.path; name one, or set "bytes" or "bpe"'
        )
        raise ConfigError("data.tokenizer", "model", remedy)
    _check_evaluation(job)
    if job.model.kind == "paced" and job.data.workers:
        raise ConfigError(
            "data.workers", job.data.workers, "must be 0: a paced model has no samples"
        )
    _check_batch(job)
    _check_cluster(job.cluster)


def _check_ranges(job: JobConfig) -> None:
    for name, minimum in _MINIMUM.items():
        value = attrgetter(name)(job)
        if value < minimum:
            raise ConfigError(name, value, f"must be at least {minimum}")
    for name, maximum in _MAXIMUM.items():
        value = attrgetter(name)(job)
        if value > maximum:
            raise ConfigError(name, value, f"must be at most {maximum:g}")
    if job.checkpoint.every != "auto" and job.checkpoint.every < 1:
        raise ConfigError("checkpoint.every", job.checkpoint.every, 'must be at least 1, or "auto"')
    gamma = job.checkpoint.gamma
    if gamma != "auto" and not 0.0 < gamma <= 1.0:
        raise ConfigError(
            "checkpoint.gamma", gamma, 'must be above 0 and at most 1, a share of a span, or "auto"'
        )
    if job.training.compile and job.training.recomputation == "selective":
        remedy = 'is not possible with training.compile; "full" and "none" are'
        raise ConfigError("training.activation_checkpointing", "selective", remedy)
    _check_domains(job.checkpoint.failure_domains)
    if job.sends_copies_over_devices and job.checkpoint.mode == "naive":
        remedy = (
            "sends layers whole, for which the buffers of a device are too small; take another "
            'mode, or checkpoint.path = "host"'
        )
        raise ConfigError("checkpoint.mode", "naive", remedy)
    if job.checkpoint.schedule == "paper" and job.checkpoint.mode != "interleaved":
        remedy = (
            'deals copies to idle spans and needs checkpoint.mode = "interleaved"; this job has '
            f'"{job.checkpoint.mode}"'
        )
        raise ConfigError("checkpoint.schedule", "paper", remedy)
    for name in _POSITIVE:
        if (value := attrgetter(name)(job)) <= 0:
            raise ConfigError(name, value, "must be more than 0")
    if not job.name or "/" in job.name:
        raise ConfigError("name", job.name, "must not be empty and must not contain a slash")


def without_copies(checkpoint: CheckpointConfig) -> CheckpointConfig:
    """The same without copies in memory, and with the defaults of all keys of copies."""
    unset = CheckpointConfig()
    defaults: dict[str, Any] = {key: getattr(unset, key) for key in _COPY_KEYS}
    return replace(checkpoint, copies=0, **defaults)


def _check_copies(checkpoint: CheckpointConfig) -> None:
    """Refuses keys of copies in memory where there are none, and buffers that are too small."""
    num_buffers, most = checkpoint.num_buffers, checkpoint.buffer_bytes // _PIECE_BYTES_MIN
    if num_buffers > most:
        remedy = (
            f"must be at most {most}: checkpoint.buffer_bytes = {checkpoint.buffer_bytes} is "
            f"divided into so many, of at least {_PIECE_BYTES_MIN} bytes each"
        )
        raise ConfigError("checkpoint.num_buffers", num_buffers, remedy)
    unset = CheckpointConfig()
    for key in () if checkpoint.copies else _COPY_KEYS:
        if (value := getattr(checkpoint, key)) != getattr(unset, key):
            remedy = "has a meaning only with checkpoint.copies, for copies in memory"
            saves = "; checkpoint.persist_every says how often the job saves"
            raise ConfigError(f"checkpoint.{key}", value, remedy + saves * (key == "every"))


def _check_domains(domains: Sequence[Sequence[int]]) -> None:
    """Refuses a node that is in two failure domains, or whose number no node can have."""
    nodes_of_domains: set[int] = set()
    for node in (node for domain in domains for node in domain):
        if not 0 <= node < NODES_MAX:
            raise ConfigError(
                "checkpoint.failure_domains",
                node,
                f"must be the number of a node, from 0 to {NODES_MAX - 1}",
            )
        if node in nodes_of_domains:
            raise ConfigError(
                "checkpoint.failure_domains",
                node,
                "this node is in two domains; name it in one of them",
            )
        nodes_of_domains.add(node)


def warnings_of(job: JobConfig, *, num_joining: int) -> tuple[str, ...]:
    """What a user should know of a job that can be trained as it is.

    Args:
        num_joining: number of nodes that are to join while the job runs.

    Raises:
        ConfigError: failure domains name a node that can never exist.
    """
    texts = (_unknown_in_domains(job, num_joining=num_joining), _long_warmup(job))
    return tuple(filter(None, texts))


def _long_warmup(job: JobConfig) -> str:
    """The warning that the learning rate never reaches its value; "" if it does."""
    warmup, training = job.training.schedule.get("warmup_iterations"), job.training
    if not isinstance(warmup, int) or warmup <= training.iterations:
        return ""
    return (
        f"training.schedule.warmup_iterations = {warmup} is more than training.iterations = "
        f"{training.iterations}: the learning rate never reaches {training.learning_rate:g}"
    )


def _unknown_in_domains(job: JobConfig, *, num_joining: int) -> str:
    """The warning that failure domains name nodes that may never exist; "" if they do not.

    Args:
        num_joining: number of nodes that are to join while the job runs.

    Raises:
        ConfigError: such a node can never exist, because the job asks for no machines.
    """
    cluster, name = job.cluster, "checkpoint.failure_domains"
    num_nodes = max(cluster.nodes + num_joining, cluster.max_nodes) + cluster.standby
    domains = job.checkpoint.failure_domains
    highest = max((node for domain in domains for node in domain), default=0)
    if highest < num_nodes:
        return ""
    if not cluster.grant_s:
        raise ConfigError(name, highest, f"the job has nodes 0 to {num_nodes - 1}")
    return (
        f"{name} names node {highest}; the job has nodes 0 to {num_nodes - 1}, and only machines "
        "that are granted for lost ones are numbered above that"
    )


def _check_kinds(job: JobConfig) -> None:
    """Refuses a key that is set though it has no meaning for the kind of its table."""
    unset = JobConfig()
    for name, kinds in _KINDS.items():
        table = name.partition(".")[0]
        kind, value = getattr(job, table).kind, attrgetter(name)(job)
        if kind not in kinds and value != attrgetter(name)(unset):
            allowed = " or ".join(f'"{name}"' for name in kinds)
            remedy = (
                f"has a meaning only with {table}.kind = {allowed}, and this job has "
                f'{table}.kind = "{kind}"'
            )
            raise ConfigError(name, value, remedy)


def _check_model(model: ModelConfig) -> None:
    if model.kind == "hf":
        model_type = model.config.get("model_type", "")
        if not model.path and not (model_type and isinstance(model_type, str)):
            remedy = 'must name an architecture, such as "gpt2"; or give model.path'
            raise ConfigError("model.config.model_type", model_type, remedy)
    elif model.kind == "python":
        _check_target("model.target", model.target, returned="the layers")
    elif not model.profile:
        raise ConfigError(
            "model.profile",
            "",
            "must name a profile: a paced model is made from one, and has no layers to measure",
        )


def _check_target(name: str, target: str, *, returned: str) -> None:
    if not re.fullmatch(r"[^\W\d][\w.]*:[^\W\d]\w*", target):
        remedy = f'must be "module:function" of a function that returns {returned}'
        raise ConfigError(name, target, remedy)


def _check_data(data: DataConfig) -> None:
    if data.kind == "hf" and not data.path:
        raise ConfigError("data.path", "", "must name the directory of a saved dataset")
    if data.kind == "tokens" and not data.path:
        raise ConfigError("data.path", "", "must name a file of token ids")
    if data.kind == "python":
        _check_target("data.target", data.target, returned="an indexable dataset")
    if data.collate:
        _check_target("data.collate", data.collate, returned="inputs and targets")
    if data.tokenizer != "bpe" and data.vocabulary_size != DataConfig().vocabulary_size:
        remedy = (
            f'has a meaning only with data.tokenizer = "bpe", and this job has "{data.tokenizer}"'
        )
        raise ConfigError("data.vocabulary_size", data.vocabulary_size, remedy)
    # A byte-pair encoding starts with the single bytes and learns the tokens above them.
    if data.tokenizer == "bpe" and data.vocabulary_size <= _BYTE_TOKENS:
        remedy = f"must be more than {_BYTE_TOKENS}, because each single byte is a token"
        raise ConfigError("data.vocabulary_size", data.vocabulary_size, remedy)


def _check_evaluation(job: JobConfig) -> None:
    """Refuses an evaluation without held-out data, and keys of it that mean nothing."""
    evaluation, kind = job.evaluation, job.data.kind
    if not evaluation.every:
        for key, value in asdict(evaluation).items():
            if value:
                remedy = "has a meaning only with evaluation.every"
                raise ConfigError(f"evaluation.{key}", value, remedy)
        return
    if job.model.kind == "paced":
        remedy = "must be 0, because a paced model has no loss that means something"
        raise ConfigError("evaluation.every", evaluation.every, remedy)
    needed, other = ("target", "path") if kind == "python" else ("path", "target")
    if value := getattr(evaluation, other):
        remedy = f'has no meaning with data.kind = "{kind}"; give evaluation.{needed}'
        raise ConfigError(f"evaluation.{other}", value, remedy)
    if not getattr(evaluation, needed):
        remedy = "must name the held-out data, of the kind of [data]"
        raise ConfigError(f"evaluation.{needed}", "", remedy)
    for name, target in evaluation.metrics.items():
        _check_target(f"evaluation.metrics.{name}", target, returned="a number")
    if evaluation.target:
        _check_target("evaluation.target", evaluation.target, returned="an indexable dataset")


def _check_batch(job: JobConfig) -> None:
    """Refuses a global batch that is not a plannable number of whole microbatches.

    The error names the nearest sizes that would work. Whether there are enough microbatches for the
    nodes is checked by the planner.
    """
    batch, size = job.training.global_batch_size, job.training.microbatch_size
    if batch % size == 0 and 1 <= batch // size <= NUM_MICROBATCHES_MAX:
        return
    fewest = job.resilience.failures_tolerated + 1  # Each of f + 1 pipelines needs one.
    below = min(batch // size, NUM_MICROBATCHES_MAX)
    above = max(batch // size + 1, fewest)
    nearest = [n * size for n in (below, above) if fewest <= n <= NUM_MICROBATCHES_MAX]
    remedy = (
        f"must be a multiple of training.microbatch_size = {size}, "
        f"{fewest} to {NUM_MICROBATCHES_MAX} times it"
    )
    if nearest:
        remedy += f": {' or '.join(map(str, nearest))} would work"
    raise ConfigError("training.global_batch_size", batch, remedy)


def _check_cluster(cluster: ClusterConfig) -> None:
    if 0 < cluster.max_nodes < cluster.nodes:
        remedy = f"must be at least cluster.nodes = {cluster.nodes}, or 0 for the same number"
        raise ConfigError("cluster.max_nodes", cluster.max_nodes, remedy)
    if (cluster.transport, cluster.encryption) == ("nccl", "on"):
        remedy = 'NCCL encrypts nothing; take cluster.transport = "host", or "auto", which does'
        raise ConfigError("cluster.encryption", "on", remedy)
    if cluster.notice:
        parse_notice_source(cluster.notice, field="cluster.notice")  # Of whatever machine.


def _check_data_path(name: str, data: DataConfig) -> None:
    """Refuses a path that is not what the kind of data needs; none is no mistake here."""
    if not data.path:
        return
    path, is_directory = Path(data.path), data.kind == "hf"
    needed, other = ("directory", "file") if is_directory else ("file", "directory")
    with name_refusals(name, data.path):
        if not path.exists():
            raise ConfigError(name, data.path, f"there is no such {needed}")
        if path.is_dir() != is_directory:
            remedy = f'is a {other}; kind = "{data.kind}" needs a {needed}'
            raise ConfigError(name, data.path, remedy)
        if not is_directory and path.stat().st_size == 0:
            raise ConfigError(name, data.path, "the file is empty")


def check_profile(job: JobConfig) -> None:
    """Refuses a missing profile.

    Raises:
        ConfigError: it names the profile.
    """
    with name_refusals("model.profile", job.model.profile):
        if job.model.profile and not profile_path(Path(), job.model.profile).is_file():
            remedy = f"{NOT_FOUND}; planaria profile JOB -o FILE writes one"
            raise ConfigError("model.profile", job.model.profile, remedy)


def check_output(job: JobConfig) -> None:
    """Refuses an output directory that is a file, or that cannot be told to others.

    Raises:
        ConfigError: it names the directory.
    """
    directory = job.checkpoint.directory
    with name_refusals("checkpoint.directory", directory):
        if not directory or (Path(directory).exists() and not Path(directory).is_dir()):
            raise ConfigError(
                "checkpoint.directory", directory, "must name a directory, which may be new"
            )
    if not is_utf_8(place := absolute(directory)):
        remedy = "its name is not UTF-8; rename it, or name another directory"
        raise ConfigError("checkpoint.directory", place, remedy)


def check_machine(job: JobConfig) -> None:
    """Refuses a job whose inputs or source of notices are missing on this machine.

    Raises:
        ConfigError: it names what is missing.
    """
    check_inputs(job)
    if job.cluster.notice:
        check_notice_source(job.cluster.notice, field="cluster.notice")


def check_inputs(job: JobConfig) -> None:
    """Refuses a job whose model directory or data is missing on this machine.

    Raises:
        ConfigError: it names what is missing.
    """
    with name_refusals("model.path", job.model.path):
        if job.model.path and not Path(job.model.path, "config.json").is_file():
            remedy = "must be a directory with a config.json"
            raise ConfigError("model.path", job.model.path, remedy)
    _check_data_path("data.path", job.data)
    _check_data_path("evaluation.path", job.held_out)
