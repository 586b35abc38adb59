"""Checks a job before any node starts: its model, data and optimizer; and provides its profile.

This runs in a process of its own, so that the launcher does not need torch, and so that the user's
mistakes are found and reported before anything is started.
"""

import importlib.util
import os
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from planaria.checkpoint.disk.tiers import tier_of
from planaria.checkpoint.disk.time_limits import with_time_limit
from planaria.checkpoint.memory.room import available_bytes
from planaria.core.job import JobConfig, ModelConfig, TrainingConfig
from planaria.core.plan import Link, ModelProfile
from planaria.core.samples import sample_numbers
from planaria.core.specs import NodeSpec, NumSamples, Prepared, PrepareRequest
from planaria.data.batches import copied_text, refuse_unshifted, unrepeated_text
from planaria.data.datasets import (
    Dataset,
    has_own_tokens,
    load_dataset,
    own_tokens_text,
    vocabulary_size,
)
from planaria.data.padding import refuse_unhidden_padding
from planaria.data.saved_rows import HELD_OUT, left_out_text, unused_columns_text
from planaria.data.text import TokenDataset
from planaria.engine.blame import mistake_of, text_of, user_traceback
from planaria.engine.comm.choice import (
    ENCRYPTED,
    fallback_text,
    nccl_obstacle,
    transport_mistake,
)
from planaria.engine.devices import Device, find_device
from planaria.engine.iteration.evaluation import load_evaluation, try_evaluation
from planaria.engine.optimizer import learning_rate, optimizer_factory
from planaria.engine.profiler import examine_layers, profile_model
from planaria.engine.stage import RankStage
from planaria.errors import CheckpointError, ConfigError
from planaria.models.layers import SplitModel
from planaria.models.paced import PacedData, paced_model
from planaria.models.user_layers import split_user_model
from planaria.transport.connection import MESSAGE_BYTES_MAX
from planaria.transport.pacing import Pacing
from planaria.transport.sockets import is_loopback
from planaria.transport.timekeeping import Timekeeper
from planaria.user_functions import user_function

# A profile that was not measured may be wrong, and commit vectors are in no profile.
_MESSAGE_SLACK_BYTES: Final = 1 << 30
_COMPILED_LAYERS_MAX: Final = 1 << 16  # Of one process, each shape of inputs counted.


def load_model(
    job: JobConfig,
    *,
    cache_directory: Path,
    profile: ModelProfile | None,
    timekeeper: Timekeeper,
) -> SplitModel:
    """The job's model, split into layers; a paced model imitates its profile.

    Args:
        profile: profile of a paced model; ignored for other models.
        timekeeper: clock by which a paced model sleeps.
    """
    # Loaders import these alone. What a module draws depends on which module imports it first, and
    # all processes must get the same.
    for field, target in (("data.target", job.data.target), ("data.collate", job.data.collate)):
        if target:
            user_function(target, field=field)
    if job.model.kind == "paced":
        assert profile is not None
        return paced_model(
            profile, seed=job.training.seed, jitter=job.model.jitter, timekeeper=timekeeper
        )

    def split(objective: str) -> SplitModel:
        size, has_learned_tokens = 0, False
        if job.model.kind == "hf":  # Own layers do not ask for it.
            size = vocabulary_size(
                job.data,
                cache_directory=cache_directory,
                seed=job.training.seed,
                objective=objective,
                model=job.model,
            )
            has_learned_tokens = job.data.tokenizer == "bpe" and has_own_tokens(job.data)
        return split_model(
            job.model,
            seed=job.training.seed,
            vocabulary_size=size,
            sequence_length=job.data.sequence_length,
            is_deterministic=job.training.deterministic,
            has_learned_tokens=has_learned_tokens,
        )

    model = split("causal")
    if job.model.kind == "python" and job.data.kind in ("text", "tokens"):
        model.objective = "causal"  # It learns the next token.
    # A masked objective may need one token more, the mask.
    return split(model.objective) if model.objective == "masked" else model


def device_of(job: JobConfig, *, rank: int, pinned_bytes: int = 0) -> Device:
    """The device of a rank, ready to compute; paced layers sleep on a processor.

    Args:
        pinned_bytes: upper bound on the pinned memory that holds the state of layers; 0: there is
            none.

    Raises:
        ConfigError: this machine has no device of the type that the job asks for.
    """
    device = find_device("cpu" if job.model.kind == "paced" else job.cluster.device, rank=rank)
    device.begin(is_deterministic=job.training.deterministic, pinned_bytes=pinned_bytes)
    if not job.training.compile:
        # A user's layers may be compiled. Where the first backward is a whole one, torch would
        # compile it to reuse the memory of activations, and refuse to split a later one.
        functorch: Any = importlib.import_module("torch._functorch.config")
        with suppress(AttributeError):  # Not every release of torch has the key.
            functorch.donated_buffer = False
    else:
        # Processes that compile would outlive a worker that is killed.
        inductor: Any = importlib.import_module("torch._inductor.config")
        inductor.compile_threads = 1
        if job.training.deterministic:
            _choose_kernels_untimed(inductor)
        # Layers share code that is compiled for each. After 8 torch would run the others without,
        # and their bits would depend on how many layers a rank has.
        dynamo: Any = importlib.import_module("torch._dynamo.config")
        dynamo.recompile_limit = dynamo.accumulated_recompile_limit = _COMPILED_LAYERS_MAX
    return device


def _choose_kernels_untimed(inductor: Any) -> None:
    """Keeps kernels of a GPU from being chosen by their speed, which differs each time."""
    try:
        inductor.deterministic = True
    except AttributeError:  # Older releases of torch have a key for each choice.
        inductor.dynamic_scale_rblock = inductor.shape_padding = False


def pinned_bytes_of(spec: NodeSpec) -> int:
    """Upper bound on the memory that a rank pins for the state of layers.

    If the job names none, it is the rank's share of half of what its machine has left now.
    """
    cluster = spec.job.cluster
    num_nodes = max(cluster.nodes, cluster.max_nodes) if is_loopback(spec.host) else 1
    share = available_bytes() // 2 // (num_nodes * cluster.devices_per_node)
    return cluster.pinned_memory_bytes or max(1, share)


def pacing_of(spec: NodeSpec) -> Pacing | None:
    """The pacing of the links of a paced job's worker; None for any other job."""
    if spec.job.model.kind != "paced":
        return None
    assert spec.profile is not None
    return Pacing(
        clocks_fd=spec.clocks_fd,
        devices_per_node=spec.job.cluster.devices_per_node,
        inter_node=spec.profile.links["inter_node"],
        intra_node=spec.profile.links["intra_node"],
    )


def message_bytes_max(spec: NodeSpec) -> int:
    """Upper bound on the bytes of a message between ranks of the job.

    The largest messages are a layer's state, or its piece in a buffer for copies; the gradient sums
    of a bucket, which may hold all layers, in float64 where the parameters are bfloat16; and the
    output of a layer, which is larger than the profile says where samples vary in length.
    """
    if spec.profile is None:
        return MESSAGE_BYTES_MAX
    layers = spec.profile.layers
    state_bytes = sum(layer.parameter_bytes + layer.optimizer_bytes for layer in layers)
    output_bytes = max(layer.output_bytes for layer in layers)
    return (
        _MESSAGE_SLACK_BYTES
        + spec.job.checkpoint.buffer_bytes
        + 4 * state_bytes
        + 16 * output_bytes
    )


def storage_of(spec: NodeSpec) -> Link | None:
    """The link over which a paced job's worker reads saves, its inter-node link; else None."""
    pacing = pacing_of(spec)
    return pacing.inter_node if pacing else None


def split_model(
    model: ModelConfig,
    *,
    seed: int,
    vocabulary_size: int,
    sequence_length: int,
    is_deterministic: bool = True,
    has_learned_tokens: bool = False,
) -> SplitModel:
    """The model of a job as layers; only shapes stay in memory.

    Args:
        seed: seed of the initial weights.
        vocabulary_size: upper bound on token ids, exclusive; the model's vocabulary size if its
            config names none.
        sequence_length: number of tokens in a sample.
        is_deterministic: whether kernels repeat their bits; else they are the fastest ones. A
            model's config may name others.
        has_learned_tokens: see `hf_config`.

    Raises:
        ConfigError: the model cannot be built, or cannot be trained as a chain of layers.
    """
    if model.kind == "python":
        return split_user_model(model.target, seed=seed)
    if model.kind != "hf":
        raise ConfigError(
            "model.kind", model.kind, 'only models of kind "hf" and "python" have layers to split'
        )
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "model.kind",
            model.kind,
            "it needs more packages: pip install -e '.[hf]' in planaria's checkout",
        )
    # Importing transformers takes seconds, and jobs with user-defined layers do not need it.
    from planaria.models.hf_layers import split_hf_model
    from planaria.models.hf_model import hf_config

    config = hf_config(
        model,
        vocabulary_size=vocabulary_size,
        sequence_length=sequence_length,
        has_learned_tokens=has_learned_tokens,
    )
    return split_hf_model(
        model,
        config,
        seed=seed,
        sequence_length=sequence_length,
        is_deterministic=is_deterministic,
    )


def load_data(job: JobConfig, *, objective: str, cache_directory: Path) -> Dataset:
    """The job's data in the form that the model's objective needs."""
    if job.model.kind == "paced":
        return PacedData()
    return load_dataset(
        job.data,
        objective=objective,
        seed=job.training.seed,
        cache_directory=cache_directory,
        model=job.model,
    )


# What torch says of an operator that may not be used where it is to repeat itself.
_UNREPEATABLE: Final = "does not have a deterministic implementation"


def main(payload: bytes, result_fd: int) -> None:
    """Prepares a job in a forked process, and writes a `Prepared` to result_fd.

    Args:
        payload: a `PrepareRequest` as JSON.
    """
    torch.set_num_threads(1)
    request = msgspec.json.decode(payload, type=PrepareRequest)
    try:
        result = _prepare(request)
    except ConfigError as error:
        result = Prepared(mistake=mistake_of(error))
    except (Exception, SystemExit) as error:
        if _UNREPEATABLE in text_of(error):
            reason = text_of(error).partition(",")[0]
            remedy = (
                f"torch has no kernel for this device that repeats itself: {reason}; take another "
                "operator, or set it to false, which promises no bits"
            )
            mistake = ConfigError("training.deterministic", True, remedy)
            result = Prepared(mistake=mistake_of(mistake))
        else:
            result = Prepared(traceback=user_traceback(error))
    with os.fdopen(result_fd, "wb") as file:
        file.write(msgspec.json.encode(result))


def _prepare(request: PrepareRequest) -> Prepared:
    job = request.job
    cache_directory = Path(request.cache_directory)
    model = load_model(
        job, cache_directory=cache_directory, profile=request.profile, timekeeper=Timekeeper()
    )
    dataset = load_data(job, objective=model.objective, cache_directory=cache_directory)
    refuse_unhidden_padding(dataset, model.mask_problem, key="data.path", path=job.data.path)
    evaluated = load_evaluation(job, dataset, model=model, cache_directory=cache_directory)
    _check_trained(job, model)
    sample_numbers(
        0,
        seed=job.training.seed,
        num_samples=len(dataset),
        global_batch_size=job.training.global_batch_size,
    )
    refuse_unshifted(dataset, job.training)
    learning_rate(job.training, 0)
    optimizer_factory(job.training)
    device = device_of(job, rank=0)
    data_notes = _data_notes(job, dataset, cache_directory)
    tokenizer_file = dataset.tokenizer_file if isinstance(dataset, TokenDataset) else ""
    keeps_tokenizer = request.keeps_tokenizer and bool(tokenizer_file)
    kept_notes = _keep_tokenizer(job, tokenizer_file) if keeps_tokenizer else ()
    notes = (*_transport_notes(request, device), *data_notes, *kept_notes, *model.notes)
    later = {use for group in model.tied for use in group.uses[1:]}
    shapes = [model.parameter_shapes(layer) for layer in range(model.num_layers)]
    parameters = tuple(
        tuple(name for name in names if all((layer, name) != (u.layer, u.name) for u in later))
        for layer, names in enumerate(shapes)
    )
    profile = _profile(request, model, dataset, device)
    if evaluated and job.model.kind != "paced":
        training = replace(job.training, compile=False)  # Compiling takes minutes.
        try_evaluation(evaluated, RankStage(model, training=training, device=device))
    return Prepared(
        profile=profile,
        num_samples=NumSamples(len(dataset), evaluated.held_out.num_samples if evaluated else 0),
        vocabulary_size=dataset.vocabulary_size,
        objective=model.objective,
        parameters=parameters,
        num_parameters=sum(
            shapes[layer][name].numel() for layer, names in enumerate(parameters) for name in names
        ),
        config=dict(model.config),
        notes=notes,
        has_own_tokens=job.model.kind != "paced" and has_own_tokens(job.data),
        tokenizer_file=tokenizer_file,
    )


def _keep_tokenizer(job: JobConfig, file: str) -> tuple[str, ...]:
    """Keeps a learned tokenizer beside the saves, of which exports need it; returns why not.

    The cache that it is in is this machine's, and may be emptied.
    """
    place, timeout_s = job.checkpoint.directory, job.checkpoint.timeout_s
    try:
        content = Path(file).read_bytes()
        storage = with_time_limit(tier_of(place), timeout_s=timeout_s).storage
        storage.create(Path(file).name, content)
    except (CheckpointError, OSError) as error:
        text = (
            f"the tokenizer that was learned is only in {file}, where planaria checkpoint export "
            f"looks for it: it could not be kept beside the saves ({error})"
        )
        return (text,)
    return ()


def _check_trained(job: JobConfig, model: SplitModel) -> None:
    """Refuses a model of which nothing is trained."""
    if job.model.kind == "paced":
        return
    if not any(model.parameter_shapes(layer) for layer in range(model.num_layers)):
        raise ConfigError("model", job.model.kind, "none of its parameters requires a gradient")


_DETOUR_TEXT: Final = (
    'with checkpoint.path = "device" copies pass the memory of their machines once more on either '
    'side, because ranks do not exchange tensors over NCCL; "host" saves that'
)


def _transport_notes(request: PrepareRequest, device: Device) -> tuple[str, ...]:
    """The lines that say why tensors or copies will not go from GPU to GPU, where a user wonders.

    Raises:
        ConfigError: the job asks for NCCL, which cannot be used on this machine.
    """
    cluster = request.job.cluster
    num_ranks = cluster.devices_per_node
    if request.processors:  # All nodes share this machine.
        # Any epoch whose ranks share a GPU ends a job of NCCL alone; others say so when it begins.
        is_strict = cluster.transport == "nccl"
        num_ranks = cluster.num_ranks_max if is_strict else num_ranks * cluster.nodes
    reason = nccl_obstacle(device, num_ranks=num_ranks)
    if cluster.encryption == "on":
        reason = ENCRYPTED
    if reason and cluster.transport == "nccl":
        raise transport_mistake(reason)
    is_silent = not reason or cluster.transport == "host" or device.place.type == "cpu"
    is_detour = request.job.sends_copies_over_devices and (reason or cluster.transport == "host")
    return (
        *(() if is_silent else (fallback_text(reason),)),
        *((_DETOUR_TEXT,) if is_detour else ()),
    )


def _data_notes(job: JobConfig, dataset: Dataset, cache_directory: Path) -> tuple[str, ...]:
    """The lines that say what in the job's data may not be as the user means it."""
    texts = [unrepeated_text(dataset, job.training), own_tokens_text(job.data, job.model)]
    if job.model.kind != "paced":
        left_out = partial(left_out_text, cache_directory=cache_directory)
        texts += [left_out(job.data), unused_columns_text(job.data)]
        if job.evaluation.every:
            texts.append(left_out(job.held_out, splits=HELD_OUT, key="evaluation.path"))
            texts.append(unused_columns_text(job.held_out, splits=HELD_OUT, key="evaluation.path"))
    if job.model.kind == "python":
        texts.append(copied_text(dataset, data=job.data, training=job.training))
    return tuple(filter(None, texts))


def _profile(
    request: PrepareRequest, model: SplitModel, dataset: Dataset, device: Device
) -> ModelProfile:
    """The profile that was given, else one that is measured; it examines layers in either case.

    Raises:
        ConfigError: the profile is one of another job, or the user's layers cannot be trained.
    """
    job, given = request.job, request.profile
    if given is None:
        num_ranks = job.cluster.nodes * job.cluster.devices_per_node
        processors = request.processors
        return profile_model(
            job, model, dataset, num_ranks=num_ranks, processors=processors, device=device
        )
    if job.model.kind == "paced":
        return given
    _check_profile(job, given, model)
    if job.model.kind == "python" or _may_be_selective(job.training, given):
        return examine_layers(job, model, dataset, profile=given, device=device)
    return given


def _may_be_selective(training: TrainingConfig, profile: ModelProfile) -> bool:
    """Whether backwards may compute again what "selective" does, of which layers may refuse it."""
    is_known = any("selective" in layer.recomputed for layer in profile.layers)
    is_chosen = training.chooses_recomputation and is_known
    return is_chosen or training.recomputation == "selective"


def _check_profile(job: JobConfig, profile: ModelProfile, model: SplitModel) -> None:
    """Refuses a profile of another model, or of other microbatches.

    Raises:
        ConfigError: the profile differs from the job; the message names the first difference.
    """
    remedy = (
        "this profile belongs to another job: {}; measure this job with planaria profile JOB "
        "-o FILE"
    )
    facts: list[tuple[str, object, object]] = [
        ("microbatch_size", profile.microbatch_size, job.training.microbatch_size),
        ("dtype", profile.dtype, job.training.dtype),
        ("number of layers", len(profile.layers), model.num_layers),
    ]
    for layer, (name, measured) in enumerate(zip(model.layer_names, profile.layers, strict=False)):
        num_bytes = 4 * sum(shape.numel() for shape in model.parameter_shapes(layer).values())
        facts.append((f"name of layer {layer}", measured.name, name))
        facts.append((f"parameter_bytes of layer {name}", measured.parameter_bytes, num_bytes))
    for what, there, here in facts:
        if there != here:
            difference = f"{what} is {there} in the profile and {here} in the job"
            raise ConfigError("model.profile", job.model.profile, remedy.format(difference))
