"""Job files: what is read from them, and what is said about each mistake in them."""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import fields, replace
from math import nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.core.job import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    JobConfig,
    TrainingConfig,
)
from planaria.errors import ConfigError
from planaria.job.checks import check_inputs, check_machine, warnings_of
from planaria.job.config import job_from_dict, keys_page, keys_table, load_job, overridden_job
from planaria.job.training_job import Job

ROOT = Path(__file__).resolve().parents[2]
SMALLEST: Mapping[str, Any] = {"model": {"config": {"model_type": "gpt2"}}}


def job_file(folder: Path, text: str) -> Path:
    """A job file with a model and the given further text."""
    path = folder / "small.toml"
    path.write_text('[model]\nconfig = { model_type = "gpt2", n_layer = 2 }\n' + text)
    return path


def test_a_file_that_names_only_a_model_gets_every_default(tmp_path: Path) -> None:
    """What the table of keys prints as defaults is what a job gets."""
    job = load_job(job_file(tmp_path, ""))

    assert job.name == "small"
    assert job.model.config == {"model_type": "gpt2", "n_layer": 2}
    assert (job.data, job.training) == (JobConfig().data, JobConfig().training)
    assert (job.resilience, job.cluster) == (JobConfig().resilience, JobConfig().cluster)


def test_values_of_the_file_reach_their_keys(tmp_path: Path) -> None:
    """An integer is a fine number, and a table of arguments stays as it was written."""
    text = """
        [training]
        learning_rate = 1
        dtype = "bfloat16"
        optimizer = { name = "SGD", momentum = 0.9 }
        [cluster]
        nodes = 5
    """

    job = load_job(job_file(tmp_path, text))

    assert job.training.learning_rate == 1.0
    assert job.training.dtype == "bfloat16"
    assert job.training.optimizer == {"name": "SGD", "momentum": 0.9}
    assert job.cluster.nodes == 5


@pytest.mark.parametrize(
    ("given", "expected"), [(True, "full"), (False, "none"), ("selective", "selective")]
)
def test_activation_checkpointing_may_be_a_boolean(given: object, expected: str) -> None:
    """As it was before there were several kinds."""
    training = {"activation_checkpointing": given}

    assert job_from_dict({**SMALLEST, "training": training}).training.recomputation == expected


def test_selective_checkpointing_and_compiled_blocks_exclude_each_other() -> None:
    """A compiled block has no single operators to choose from."""
    training = {"activation_checkpointing": "selective", "compile": True}

    with pytest.raises(ConfigError, match=r"training\.compile"):
        job_from_dict({**SMALLEST, "training": training})


def test_the_name_of_optimizer_and_schedule_stays_when_only_other_keys_are_given() -> None:
    """`optimizer = { weight_decay = 0.1 }` means AdamW with it, not an optimizer without name."""
    training = {"optimizer": {"weight_decay": 0.1}, "schedule": {"warmup_iterations": 3}}

    job = job_from_dict({**SMALLEST, "training": training})

    assert job.training.optimizer == {"name": "AdamW", "weight_decay": 0.1}
    assert job.training.schedule == {"name": "constant", "warmup_iterations": 3}


def test_overrides_beat_the_file_and_later_ones_beat_earlier(tmp_path: Path) -> None:
    """Values are TOML where they can be, plain strings otherwise, at any depth."""
    overrides = [
        "name=night run",
        "training.seed=1",
        "training.seed = 2",
        "model.config.n_layer=4",
        "model.config.activation_function=gelu",
        "training.optimizer={name='SGD', momentum=0.5}",
        "training.deterministic=false",
    ]

    job = load_job(job_file(tmp_path, "[training]\nseed = 0\n"), overrides=overrides)

    assert job.name == "night run"
    assert job.training.seed == 2
    assert job.model.config == {
        "model_type": "gpt2",
        "n_layer": 4,
        "activation_function": "gelu",
    }
    assert job.training.optimizer == {"name": "SGD", "momentum": 0.5}
    assert job.training.deterministic is False


def test_an_evaluation_every_0_iterations_is_none_whatever_else_is_given(tmp_path: Path) -> None:
    """For one run without it nobody should have to edit the file; a script's job is the same."""
    evaluated = {**SMALLEST, "evaluation": {"every": 5, "path": __file__, "patience": 3}}
    path = job_file(tmp_path, f"[evaluation]\nevery = 5\npath = '{__file__}'\npatience = 3\n")
    off = "evaluation.every=0"

    assert load_job(path, overrides=[off]).evaluation == EvaluationConfig()
    job = job_from_dict(evaluated)
    assert overridden_job(job, directory=tmp_path, overrides=[off]).evaluation == EvaluationConfig()
    assert overridden_job(job, directory=tmp_path, overrides=[]).evaluation.every == 5
    with pytest.raises(ConfigError, match=r"only with evaluation\.every"):
        overridden_job(
            job_from_dict(SMALLEST), directory=tmp_path, overrides=["evaluation.samples=2"]
        )


def test_no_copies_are_none_whatever_else_is_given(tmp_path: Path) -> None:
    """For one run without them nobody should have to edit the file; a script's job is the same."""
    path = job_file(tmp_path, "[checkpoint]\ncopies = 2\nevery = 5\nkeep = 7\n")
    off, kept = "checkpoint.copies=0", CheckpointConfig(keep=7)
    copied, small = load_job(path), job_from_dict(SMALLEST)

    for job in (load_job(path, overrides=[off]), overridden(copied, off)):
        assert replace(job.checkpoint, directory=kept.directory) == kept
    assert overridden(copied).checkpoint == copied.checkpoint
    with pytest.raises(ConfigError, match=r"only with checkpoint\.copies"):
        overridden(small, "checkpoint.every=5")


def overridden(job: JobConfig, *overrides: str) -> JobConfig:
    return overridden_job(job, directory=Path(), overrides=overrides)


def test_inputs_lie_beside_the_file_and_outputs_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job file can be run from anywhere; a path in an override is typed where one stands."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "text.txt").write_text("beside the file")
    (tmp_path / "here.txt").write_text("in the current directory")
    path = job_file(tmp_path / "jobs", '[data]\npath = "text.txt"\n')
    monkeypatch.chdir(tmp_path)

    job = load_job(Path("jobs", path.name))
    overridden = load_job(path, overrides=["data.path=here.txt"])

    assert job.data.path == str(tmp_path / "jobs" / "text.txt")
    assert overridden.data.path == str(tmp_path / "here.txt")
    assert job.checkpoint.directory == str(tmp_path / "checkpoints")


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves went to a directory of that name."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    text = '[data]\npath = "~/text.txt"\n[checkpoint]\ndirectory = "~/saves"\n'
    path = job_file(tmp_path, text)

    job = load_job(path)
    overridden = load_job(path, overrides=["data.path=~/other.txt"])

    assert job.data.path == str(tmp_path / "home" / "text.txt")
    assert job.checkpoint.directory == str(tmp_path / "home" / "saves")
    assert Job(replace(job, checkpoint=CheckpointConfig(directory="~"))).config.checkpoint == (
        CheckpointConfig(directory=str(tmp_path / "home"))
    )
    assert overridden.data.path == str(tmp_path / "home" / "other.txt")


@pytest.mark.parametrize(
    ("tables", "field", "told"),
    [
        ({"trainning": {}}, "trainning", "did you mean training?"),
        ({"training": {"microbatchsize": 4}}, "training.microbatchsize", "mean microbatch_size?"),
        ({"training": 3}, "training", "must be a table: [training]"),
        ({"name": 3}, "name", "must be a string"),
        ({"name": "a/b"}, "name", "must not contain a slash"),
        ({"training": {"iterations": "ten"}}, "training.iterations", "must be an integer"),
        ({"training": {"iterations": 10.0}}, "training.iterations", "must be an integer"),
        ({"training": {"iterations": True}}, "training.iterations", "must be an integer"),
        ({"training": {"iterations": 0}}, "training.iterations", "must be at least 1"),
        ({"training": {"learning_rate": "1e-3"}}, "training.learning_rate", "must be a number"),
        ({"training": {"learning_rate": 0.0}}, "training.learning_rate", "must be more than 0"),
        ({"training": {"learning_rate": 1e999}}, "training.learning_rate", "finite"),
        ({"model": {"config": {"dropout": float("nan")}}}, "model.config.dropout", "finite"),
        (
            {"model": {"config": {"rope": {"factors": [1.0, float("inf")]}}}},
            "model.config.rope.factors[1]",
            "finite",
        ),
        ({"training": {"optimizer": {"eps": 10**30}}}, "training.optimizer.eps", "64 bits"),
        ({"training": {"gradient_clip": -1.0}}, "training.gradient_clip", "must be at least 0"),
        ({"training": {"seed": 2**63}}, "training.seed", "must fit in 64 bits"),
        ({"training": {"dtype": "bf16"}}, "training.dtype", "did you mean bfloat16?"),
        ({"training": {"deterministic": 1}}, "training.deterministic", "must be true or false"),
        ({"training": {"optimizer": "AdamW"}}, "training.optimizer", "must be a table"),
        ({"resilience": {"failures_tolerated": -1}}, "resilience.failures_tolerated", "at least 0"),
        (
            {"resilience": {"policy": "oobleck"}},
            "resilience.policy",
            'one of "absorb", "adaptive", "morph", "reinstantiate", "reroute"',
        ),
        ({"resilience": {"failure_rate": -1.0}}, "resilience.failure_rate", "at least 0"),
        ({"resilience": {"when_below": "halt"}}, "resilience.when_below", '"continue", "stop"'),
        ({"cluster": {"nodes": 0}}, "cluster.nodes", "must be at least 1"),
        ({"cluster": {"nodes": 4, "max_nodes": 3}}, "cluster.max_nodes", "cluster.nodes = 4, or 0"),
        ({"cluster": {"max_nodes": -1}}, "cluster.max_nodes", "must be at least 0"),
        ({"checkpoint": {"timeout_s": 1e10}}, "checkpoint.timeout_s", "must be at most 1e+08"),
        ({"cluster": {"max_nodes": 10_001}}, "cluster.max_nodes", "must be at most 10000"),
        ({"cluster": {"lease_s": "3 s"}}, "cluster.lease_s", "must be a number"),
        ({"cluster": {"notice": "leave"}}, "cluster.notice", "must be the absolute path of a file"),
        ({"cluster": {"lease_s": 0.0}}, "cluster.lease_s", "must be at least 0.5"),
        ({"checkpoint": {"every": 0}}, "checkpoint.every", 'at least 1, or "auto"'),
        ({"checkpoint": {"every": "often"}}, "checkpoint.every", 'must be: integer or "auto"'),
        ({"checkpoint": {"schedule": "dealt"}}, "checkpoint.schedule", '"measured", "paper"'),
        *(
            (
                {"checkpoint": {"schedule": "paper", "mode": mode}},
                "checkpoint.schedule",
                f'needs checkpoint.mode = "interleaved"; this job has "{mode}"',
            )
            for mode in ("unpipelined", "naive", "blocking")
        ),
        ({"checkpoint": {"copies": -1}}, "checkpoint.copies", "must be at least 0"),
        ({"checkpoint": {"strategy": "best"}}, "checkpoint.strategy", '"ring", "optimised"'),
        (
            {"checkpoint": {"failure_domains": [[0, 1], [1, 2]]}},
            "checkpoint.failure_domains",
            "is in two domains",
        ),
        (
            {"checkpoint": {"failure_domains": [[-1]]}},
            "checkpoint.failure_domains",
            "must be the number of a node",
        ),
        ({"checkpoint": {"failure_domains": [0]}}, "checkpoint.failure_domains", "must be"),
        ({"checkpoint": {"every": 10}}, "checkpoint.every", "checkpoint.persist_every says how"),
        ({"checkpoint": {"buffer_bytes": 8192}}, "checkpoint.buffer_bytes", "at least 65536"),
        ({"checkpoint": {"num_buffers": 1 << 20}}, "checkpoint.num_buffers", "at most 512"),
        ({"checkpoint": {"path": "device"}}, "checkpoint.path", "only with checkpoint.copies"),
        ({"cluster": {"standby": -1}}, "cluster.standby", "must be at least 0"),
        ({"cluster": {"grant_s": -1.0}}, "cluster.grant_s", "must be at least 0"),
        ({"cluster": {"notice_s": -5.0}}, "cluster.notice_s", "must be at least 0"),
        ({"cluster": {"rejoin_delay_s": -1.0}}, "cluster.rejoin_delay_s", "must be at least 0"),
        ({"cluster": {"lease_s": 1e300}}, "cluster.lease_s", "must be at most 1e+08"),
        ({"data": {"workers": 1_000_000}}, "data.workers", "must be at most 256"),
        ({"data": {"sequence_length": 0}}, "data.sequence_length", "must be at least 1"),
        ({"data": {"kind": "hf"}}, "data.path", "must name the directory"),
        ({"data": {"kind": "python"}}, "data.target", '"module:function"'),
        ({"data": {"path": "no/such.txt"}}, "data.path", "no such file"),
        ({"data": {"path": "/"}}, "data.path", 'is a directory; kind = "text" needs a file'),
        ({"data": {"kind": "hf", "path": __file__}}, "data.path", "is a file"),
        ({"data": {"target": "m:f"}}, "data.target", 'data.kind = "python"'),
        ({"data": {"tokenizer": "bpe", "vocabulary_size": 256}}, "data.vocabulary_size", "256"),
        ({"data": {"vocabulary_size": -5}}, "data.vocabulary_size", 'data.tokenizer = "bpe"'),
        ({"data": {"tokenizer": "model"}}, "data.tokenizer", "in the directory model.path"),
        ({"data": {"kind": "tokens", "tokenizer": "bpe"}}, "data.tokenizer", '"text" or "hf"'),
        ({"data": {"collate": "m:f"}}, "data.collate", 'data.kind = "python"'),
        ({"evaluation": {"path": __file__}}, "evaluation.path", "only with evaluation.every"),
        ({"evaluation": {"every": 5}}, "evaluation.path", "must name the held-out data"),
        ({"evaluation": {"every": 5, "path": "no.txt"}}, "evaluation.path", "no such file"),
        ({"evaluation": {"every": 5, "target": "m:f"}}, "evaluation.target", "evaluation.path"),
        (
            {"evaluation": {"every": 5, "path": __file__, "metrics": {"accuracy": "right"}}},
            "evaluation.metrics.accuracy",
            '"module:function"',
        ),
        ({"evaluation": {"every": -1}}, "evaluation.every", "must be at least 0"),
        ({"training": {"callbacks": "m:f"}}, "training.callbacks", "must be a list"),
        ({"model": {}}, "model.config.model_type", 'such as "gpt2"'),
        ({"model": {"config": {"model_type": 2}}}, "model.config.model_type", "architecture"),
        ({"model": {"path": "nowhere"}}, "model.path", "config.json"),
        ({"model": {"kind": "python"}}, "model.target", "returns the layers"),
        ({"model": {"kind": "python", "target": "a b"}}, "model.target", "returns the layers"),
        ({"model": {"kind": "paced"}}, "model.profile", "must name a profile"),
        ({"model": {"kind": "paced", "profile": "no.json"}}, "model.profile", "no such file"),
        ({"model": {"kind": "paced", "path": "x"}}, "model.path", 'model.kind = "hf"'),
        ({"model": {"jitter": 0.1}}, "model.jitter", 'model.kind = "paced"'),
        ({"model": {"kind": "paced", "jitter": -0.1}}, "model.jitter", "at least 0"),
        ({"checkpoint": {"directory": ""}}, "checkpoint.directory", "must name a directory"),
        ({"checkpoint": {"directory": __file__}}, "checkpoint.directory", "directory"),
    ],
)
def test_a_mistake_is_told_with_its_field_and_a_way_out(
    tables: Mapping[str, Any], field: str, told: str
) -> None:
    """The field is written as the user writes it, and what would do stands beside it."""
    with pytest.raises(ConfigError) as caught:
        check_inputs(job_from_dict({**SMALLEST, **tables}))

    assert caught.value.field == field
    assert told in caught.value.remedy


@pytest.mark.parametrize(
    "key",
    ["data.path", "evaluation.path", "model.path", "model.profile", "checkpoint.directory"],
)
def test_a_path_that_the_system_refuses_is_a_mistake_that_names_its_key(key: str) -> None:
    """So it does where the user may not enter a directory, which root always may. No user may have
    a name that is this long."""
    table, name = key.split(".")
    tables = {**SMALLEST, table: {**SMALLEST.get(table, {}), name: "x" * 300}}
    if table == "evaluation":
        tables[table]["every"] = 5

    with pytest.raises(ConfigError) as caught:
        check_inputs(job_from_dict(tables))

    assert caught.value.field == key


@pytest.mark.parametrize(
    "key", ["name", "data.path", "evaluation.path", "model.path", "model.profile", "checkpoint"]
)
def test_a_name_that_is_not_utf_8_is_a_mistake_that_names_its_key(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No message or record can hold it: the job ended with a traceback. checkpoint.directory lies
    in a current directory of such a name."""
    odd = os.fsdecode(b"\xe9")
    tables: dict[str, Any] = {**SMALLEST}
    if key == "checkpoint":
        (tmp_path / odd).mkdir()
        monkeypatch.chdir(tmp_path / odd)
        key = "checkpoint.directory"
    elif key == "name":
        tables["name"] = odd
    else:
        table, name = key.split(".")
        tables[table] = {**SMALLEST.get(table, {}), name: odd}
    with pytest.raises(ConfigError) as caught:
        job_from_dict(tables)

    assert caught.value.field == key
    assert caught.value.remedy.startswith("its name is not UTF-8; rename it, or name another ")
    assert str(caught.value).isascii()


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        ({"resilience": {"policy": "adaptve"}}, "resilience.policy = 'adaptve'"),
        ({"training": {"iterations": 5.5}}, "training.iterations = 5.5"),
        ({"training": {"learning_rate": nan}}, "training.learning_rate = nan"),
        ({"training": {"callbacks": "m:f"}}, "training.callbacks = 'm:f'"),
        ({"training": {"dtype": "float16"}}, "training.dtype = 'float16'"),
        ({"data": {"workers": -1}}, "data.workers = -1"),
    ],
)
def test_a_programs_job_is_checked_as_a_job_file_is(
    tables: Mapping[str, Mapping[str, Any]], told: str
) -> None:
    """Else a process of the job would be the first to find the mistake, and die of it."""
    good = job_from_dict(SMALLEST)
    wrong = {name: replace(getattr(good, name), **table) for name, table in tables.items()}

    with pytest.raises(ConfigError) as caught:
        Job(replace(good, **wrong))

    assert str(caught.value).startswith(told)


def test_a_programs_job_keeps_its_values_and_input_paths() -> None:
    """Those are relative to the script, which only the command line knows."""
    training = TrainingConfig(optimizer={"weight_decay": 0.1}, learning_rate=1)
    data = DataConfig(kind="tokens", path="beside.bin")
    given = replace(job_from_dict(SMALLEST), training=training, data=data)

    job = Job(given).config

    assert (job.data, job.cluster, job.model) == (given.data, given.cluster, given.model)
    assert job.training.optimizer == {"name": "AdamW", "weight_decay": 0.1}


def test_where_nodes_look_for_notices_is_looked_for_where_nodes_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job is sent to Slurm from a machine that runs no job of it."""
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)

    job = job_from_dict({**SMALLEST, "cluster": {"notice": "slurm"}})

    with pytest.raises(ConfigError, match="SLURMD_NODENAME"):
        check_machine(job)


def test_the_values_that_there_are_are_listed_once() -> None:
    """Also where none of them is near."""
    with pytest.raises(ConfigError) as caught:
        job_from_dict({**SMALLEST, "resilience": {"policy": "foo"}})

    assert caught.value.remedy.count("rollback") == 1


def test_a_directory_names_the_model_and_the_configuration_may_add_to_it(tmp_path: Path) -> None:
    """Weights of a directory are trained with another dropout, say."""
    (tmp_path / "config.json").write_text("{}")
    model = {"path": str(tmp_path), "config": {"resid_pdrop": 0.0}}

    job = job_from_dict({"model": model})

    assert (job.model.path, job.model.config) == (str(tmp_path), {"resid_pdrop": 0.0})


@settings(max_examples=150)
@given(
    batch=st.integers(-5, 500) | st.integers((1 << 16) - 5, 1 << 22),
    microbatch=st.integers(1, 60),
    failures=st.integers(0, 9) | st.just(1 << 20),
)
def test_a_global_batch_that_will_not_do_is_told_the_nearest_sizes_that_do(
    batch: int, microbatch: int, failures: int
) -> None:
    """Above and below, where there are. Each is accepted and has a microbatch for each of f + 1
    pipelines, and none between them does."""

    def job(size: int) -> JobConfig:
        return job_from_dict(
            {
                **SMALLEST,
                "training": {"global_batch_size": size, "microbatch_size": microbatch},
                "resilience": {"failures_tolerated": failures},
            }
        )

    if batch % microbatch == 0 and 1 <= batch // microbatch <= 1 << 16:
        assert job(batch).num_microbatches * microbatch == batch
        return
    with pytest.raises(ConfigError) as caught:
        job(batch)

    assert (caught.value.field, caught.value.value) == ("training.global_batch_size", batch)
    named = caught.value.remedy.partition(":")[2]
    sizes = [int(word) for word in named.split() if word.isdigit()]
    works = range((failures + 1) * microbatch, (1 << 16) * microbatch + 1, microbatch)
    above = works[bisect_right(works, batch) :][:1]
    below = works[: bisect_left(works, batch)][-1:]
    assert sizes == [*below, *above]
    assert all(job(size).training.global_batch_size == size for size in sizes)


@settings(max_examples=100)
@given(
    tables=st.dictionaries(
        st.sampled_from([*(f.name for f in fields(JobConfig)), "other"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=2)
                | st.dictionaries(
                    st.sampled_from(["kind", "config", "path", "target", "iterations", "nodes"]),
                    inner,
                    max_size=3,
                )
            ),
            max_leaves=6,
        ),
        max_size=3,
    )
)
def test_any_tables_give_a_job_or_a_config_error(tables: dict[str, Any]) -> None:
    """Never another exception, whatever a file holds."""
    told: tuple[str, ...] = ()
    try:
        job_from_dict(tables)
    except ConfigError as error:
        told = (error.field, error.remedy)

    assert all(told)


@pytest.mark.parametrize(
    ("cluster", "num_joining", "highest"),
    [
        ({"nodes": 4}, 0, 3),
        ({"nodes": 4, "standby": 1}, 0, 4),
        ({"nodes": 4, "standby": 1}, 2, 6),
        ({"nodes": 4, "max_nodes": 7}, 2, 6),
    ],
)
def test_failure_domains_name_nodes_that_there_may_be(
    cluster: Mapping[str, int], num_joining: int, highest: int
) -> None:
    """One of another node keeps no copy apart from anything, and nobody would notice. Machines that
    are granted have numbers that nobody knows before."""

    def told(node: int, **more: float) -> str:
        domains = {"copies": 2, "failure_domains": [[0, node]]}
        job = job_from_dict({**SMALLEST, "cluster": {**cluster, **more}, "checkpoint": domains})
        return "".join(warnings_of(job, num_joining=num_joining))

    assert told(highest) == told(highest, grant_s=9.0) == ""
    with pytest.raises(ConfigError, match=f"= {highest + 1}: the job has nodes 0 to {highest}"):
        told(highest + 1)
    assert f"names node {highest + 1}; the job" in told(highest + 1, grant_s=9.0)


@pytest.mark.parametrize(("warmup", "is_told"), [(0, False), (5, False), (6, True)])
def test_a_warmup_that_is_longer_than_the_training_is_told(warmup: int, is_told: bool) -> None:
    """The learning rate never reaches its value; that may be meant, but seldom is."""
    training = {"iterations": 5, "schedule": {"warmup_iterations": warmup}, "learning_rate": 0.25}
    job = job_from_dict({**SMALLEST, "training": training})

    told = "".join(warnings_of(job, num_joining=0))
    assert ("warmup_iterations = 6 is more than training.iterations = 5" in told) == is_told
    assert ("never reaches 0.25" in told) == is_told


def test_a_syntax_error_names_its_line(tmp_path: Path) -> None:
    """The user looks for it in an editor."""
    with pytest.raises(ConfigError, match=r"is not TOML: .*line 4"):
        load_job(job_file(tmp_path, "[training]\niterations = ten\n"))


def test_a_file_may_begin_with_the_mark_of_an_editor(tmp_path: Path) -> None:
    """Editors of Windows write one, which nobody sees."""
    path = job_file(tmp_path, "[training]\niterations = 7\n")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())

    assert load_job(path).training.iterations == 7


def test_files_that_cannot_be_read_are_told_apart(tmp_path: Path) -> None:
    """A missing file names its nearest neighbour."""
    job_file(tmp_path, "")
    (tmp_path / "latin.toml").write_bytes(b'name = "caf\xe9"')

    with pytest.raises(ConfigError, match=r"no such file; did you mean small\.toml\?"):
        load_job(tmp_path / "smal.toml")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 11"):
        load_job(tmp_path / "latin.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_job(tmp_path)


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("training.seed", "--set"),
        ("=3", "--set"),
        ("training..seed=3", "--set"),
        ("training.seed.low=3", "training.seed.low"),
        ("training.sed=3", "training.sed"),
        ("training.seed=three", "training.seed"),
        ("training=3", "training"),
    ],
)
def test_a_wrong_override_is_told(tmp_path: Path, override: str, field: str) -> None:
    """An override is checked as the file is."""
    with pytest.raises(ConfigError) as caught:
        load_job(job_file(tmp_path, "[training]\nseed = 0\n"), overrides=[override])

    assert caught.value.field == field


def test_the_page_of_keys_is_up_to_date() -> None:
    """Run `make docs` after changing a key."""
    assert (ROOT / "docs" / "JOB.md").read_text() == keys_page()


def test_the_table_has_a_row_for_every_key() -> None:
    """A key without a row is a key that nobody finds."""
    tables = [field for field in fields(JobConfig) if field.name != "name"]
    keys = [
        f"{table.name}.{field.name}"
        for table in tables
        for field in fields(getattr(JobConfig(), table.name))
    ]

    rows = keys_table().splitlines()[2:]

    assert [row.split("`")[1] for row in rows] == ["name", *keys]


def test_the_example_is_a_job_that_at_least_two_pipelines_can_share() -> None:
    """`make demo` trains it."""
    job = load_job(ROOT / "examples" / "gpt2-text.toml")

    assert job.name == "gpt2-text"
    assert job.cluster.nodes == 5
    assert job.num_microbatches > job.resilience.failures_tolerated + 1
