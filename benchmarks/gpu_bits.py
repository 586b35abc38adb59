"""Proves on one GPU that the bits of a job do not depend on its nodes, nor on what dies.

Six ranks share the GPU, each a node of its own, and train in deterministic mode. Each job's hashes
of the final parameters and of the optimizer state are compared with those of the same job in one
process on the same GPU. The parts, in the order of their importance:

    gpt2        GPT-2 with dropout, 100 million parameters in float32: six ranks without a fault
    kills       nodes killed one by one, a node that joins, two killed at once, a crash, a lost
                coordinator
    harder      a flipped bit, then a loss; and the loss of all holders of a stage,
                whose layers come back from copies in memory
    llama       a Llama of as many parameters, with a loss
    plain       the job in one process against a loop in plain torch on the GPU, without planaria:
                relative difference of each layer at most 1e-5; how many bits differ is printed
    bfloat16    GPT-2 in bfloat16 with float32 masters, with a loss
    memory      twenty recoveries; the GPU memory in use does not grow
    copies      the loss of all holders of a stage, whose copies went through the GPU in chunks
    comm        the tests that every transport must pass, over links on the GPU, and the abort of a
                group of NCCL whose peer never comes (needs pytest)

Each part is independent of the others, but for the hashes of `gpt2`, which it runs anew if they are
missing. Logs, job files and reports are kept in --directory. Exits 2 without a GPU, 1 if a part
failed or missed its goal. `--device cpu --small` tries everything out on a processor.
"""

import argparse
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpu.jobs import JobRun, Runner, Started, Tables, merged, write_text
from gpu.memory_watch import MemoryWatch, gpu_reader, growth, resident_bytes
from gpu.running import (
    ROOT,
    NotRunError,
    Parts,
    Row,
    accelerator,
    begin_parts,
    comm_tests,
    last_json,
    run_command,
    say,
)

PARTS: Final = (
    *("gpt2", "kills", "harder", "llama", "plain", "bfloat16", "memory", "copies"),
    "comm",
)
NUM_NODES: Final = 6
NUM_RECOVERIES: Final = 20
SETTLED: Final = 5
RELATIVE_GOAL: Final = 1e-5
GROWTH_SLACK_BYTES: Final = 64 << 20
GROWTH_SHARE: Final = 0.02
LEAST_S: Final = 40.0
TURN: Final = 3  # Iterations from one fault to the next in the part `memory`.

FAULTS: Final = {
    "gpt2-kills": ("kill:4@2.backward", "kill:1@4.commit", "join:1@5"),
    "gpt2-two-at-once": ("kill:0,3@3.reduce", "crash:1@5.forward", "leader:@7"),
    "gpt2-flip": ("flip:2@3", "kill:5@9.optimizer"),
    "gpt2-stage-lost": ("kill:0,2,4@5",),
    "gpt2-over-devices": ("kill:0,2,4@5.backward",),
    "llama-six": ("kill:3@4.forward",),
    "bfloat16-six": ("kill:2@4.backward",),
}
COPIES: Final = {"checkpoint": {"copies": 2, "every": 1, "profile_iterations": 0}}


@dataclass(frozen=True, slots=True)
class Size:
    """What is trained.

    Attributes:
        gpt2, llama: keys of the models' configs.
        bytes_by_model: device memory that holds half of the model and its activations, but not all
            of it, so that pipelines have two stages.
        shallow: number of blocks of the GPT-2 of the part `memory`.
    """

    gpt2: Tables
    llama: Tables
    sequence_length: int
    shallow: int
    bytes_by_model: Mapping[str, int]


LARGE: Final = Size(
    gpt2={"n_layer": 14, "n_embd": 768, "n_head": 12},
    llama={
        "num_hidden_layers": 14,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
    sequence_length=256,
    shallow=4,
    bytes_by_model={
        "gpt2": 2_300_000_000,  # All of it takes 2.53 GB, half of it 1.73.
        "llama": 1_800_000_000,  # 1.97 and 1.25.
        "bfloat16": 1_900_000_000,  # 2.06 and 1.26.
        "shallow": 680_000_000,  # 0.73 and 0.50.
    },
)
SMALL: Final = Size(
    gpt2={"n_layer": 6, "n_embd": 16, "n_head": 2},
    llama={
        "num_hidden_layers": 6,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    sequence_length=16,
    shallow=4,
    bytes_by_model={"gpt2": 900_000, "llama": 700_000, "bfloat16": 900_000, "shallow": 600_000},
)


def main() -> int:
    """Runs the parts; returns the exit code."""
    options = _options()
    device = options.device if options.device != "auto" else accelerator()
    parts = begin_parts("gpu_bits", options, device)
    if parts is None:
        return 2
    runner = Runner(options.directory, device, options.directory / "saves")
    bits = _Bits(
        size=SMALL if options.small else LARGE,
        runner=runner,
        parts=parts,
        job_s=options.job_seconds,
        at_once=options.at_once,
        iterations=options.iterations,
    )
    write_text(options.directory / "text", num_bytes=1 << 20)
    for name in PARTS:
        parts.run(name, getattr(bits, name), least_s=LEAST_S)
    return parts.report()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="auto", help="type of the device, such as cuda or cpu")
    parser.add_argument("--small", action="store_true", help="tiny models")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for all parts")
    parser.add_argument("--job-seconds", type=float, default=120.0, help="time for each job")
    parser.add_argument("--at-once", type=int, default=2, help="jobs of a part that run at once")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=(), choices=PARTS)
    parser.add_argument("--directory", type=Path, default=ROOT / "reports" / "gpu-bits")
    parser.add_argument("--results", type=Path, help="JSON file, written after each part")
    return parser.parse_args()


@dataclass(slots=True)
class _Bits:
    """The parts, and what they know of each other.

    Attributes:
        job_s: time limit of a job, in seconds.
        expected: hashes of one process, by model.
        plain: the Llama job of one process, whose save the loop in plain torch is compared with.
    """

    size: Size
    runner: Runner
    parts: Parts
    job_s: float
    at_once: int
    iterations: int
    expected: dict[str, tuple[str, str]] = field(default_factory=dict)
    plain_run: JobRun | None = None

    def gpt2(self) -> list[Row]:
        """Six ranks without a fault."""
        return self._compared("gpt2", [self._six("gpt2-six")])

    def kills(self) -> list[Row]:
        """Losses, a crash and a join."""
        return self._compared("gpt2", [self._six("gpt2-kills"), self._six("gpt2-two-at-once")])

    def harder(self) -> list[Row]:
        """A flip, a loss within a recovery, and a stage that no live node holds."""
        lost = self._six("gpt2-stage-lost", COPIES)
        return self._compared("gpt2", [self._six("gpt2-flip"), lost])

    def copies(self) -> list[Row]:
        """Copies that go from device to device."""
        return self._compared("gpt2", [self._six("gpt2-over-devices", self.over_devices())])

    def over_devices(self) -> Tables:
        """The keys that have copies go so, in buffers for which a device has memory of its own."""
        memory_bytes = self.size.bytes_by_model["gpt2"]
        buffer_bytes = max(1 << 16, memory_bytes // 200)
        changes = {
            "checkpoint": {"path": "device", "buffer_bytes": buffer_bytes},
            "cluster": {"device_memory_bytes": memory_bytes + 2 * buffer_bytes},
        }
        return merged(COPIES, changes)

    def llama(self) -> list[Row]:
        """Another family of models."""
        return self._compared("llama", [self._six("llama-six")])

    def bfloat16(self) -> list[Row]:
        """The same bits in bfloat16."""
        return self._compared("bfloat16", [self._six("bfloat16-six")])

    def plain(self) -> list[Row]:
        """The job of one process against plain torch."""
        if self.plain_run is None or self.plain_run.problem:
            raise NotRunError("the part llama has no save of one process")
        job = self.runner.directory / "llama-one" / "job.toml"
        script = Path(__file__).parent / "gpu" / "plain_oracle.py"
        command = [sys.executable, str(script), str(job), "--device", self.runner.torch_device]
        command += ["--saves", str(self.plain_run.saves)]
        log = self.runner.directory / "plain" / "log"
        workspace = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        ended = run_command(command, log=log, timeout_s=self._timeout_s(), environment=workspace)
        self.plain_run.remove_saves()
        if ended.problem:
            raise RuntimeError(ended.problem)
        found = last_json(log)
        is_met = found["relative"] <= RELATIVE_GOAL
        say(
            f"   plain torch: {found['different']} of {found['parameters']} parameters differ in "
            f"some bit; largest relative difference of a layer {found['relative']:.1e}, goal "
            f"{RELATIVE_GOAL:.0e}: {'met' if is_met else 'MISSED'}"
        )
        return [{"name": "plain", "seconds": ended.seconds, **found, "is_met": is_met}]

    def comm(self) -> list[Row]:
        """The tests of what goes between ranks."""
        if importlib.util.find_spec("pytest") is None:
            raise NotRunError("its Python has no pytest")
        chosen = f"host and {self.runner.torch_device} or nccl_itself"
        log = self.runner.directory / "comm" / "log"
        ended = run_command(comm_tests(chosen), log=log, timeout_s=self._timeout_s())
        say(f"   tests of {chosen}: {ended.problem or 'passed'}")
        return [{"name": "comm", "seconds": ended.seconds, "is_met": not ended.problem}]

    def memory(self) -> list[Row]:
        """GPU memory over many recoveries."""
        started = Started("memory-four", self._memory_tables(nodes=4), memory_faults())
        read = resident_bytes if self.runner.torch_device == "cpu" else gpu_reader()
        with MemoryWatch(read, self.runner.directory / started.name / "log") as watch:
            run = self.runner.run(started, timeout_s=self.parts.left_s())
        row = self._row(run, expected=None)
        if run.problem:
            return [row]
        num_recoveries = max(sample.num_recoveries for sample in watch.samples)
        pid = next(worker["pid"] for worker in run.report["workers"] if worker["node"] == 0)
        found = growth(watch.samples, pid=pid, settled=SETTLED, num_recoveries=num_recoveries)
        is_flat = found.is_flat(slack_bytes=GROWTH_SLACK_BYTES, share=GROWTH_SHARE)
        say(
            f"   {num_recoveries} recoveries: rank 0 peaked at {_mega(found.rank[0])} early and "
            f"{_mega(found.rank[1])} late, the device at {_mega(found.total[0])} and "
            f"{_mega(found.total[1])}: {'flat' if is_flat else 'IT GROWS'}"
        )
        row |= {"total_bytes": found.total, "rank_bytes": found.rank, "recovered": num_recoveries}
        rows = [row | {"is_met": row["is_met"] and is_flat}]
        if self.parts.left_s() > LEAST_S:
            rows += self._compare_memory(run)
        return rows

    def _compare_memory(self, run: JobRun) -> list[Row]:
        """The bits of the job of many recoveries beside those of one process."""
        one = self.runner.run(
            Started("memory-one", self._memory_tables(nodes=1)), timeout_s=self._timeout_s()
        )
        if one.problem:
            say(one.problem)
            return []
        is_equal = run.hashes == one.hashes
        say(f"   memory-four: hashes {'equal' if is_equal else 'DIFFER'} after all recoveries")
        return [{"name": "memory-hashes", "seconds": one.ended.seconds, "is_met": is_equal}]

    def _compared(self, model: str, jobs: Sequence[Started]) -> list[Row]:
        """Runs jobs, and the one of one process beside them if its hashes are not known."""
        is_known = model in self.expected
        one = Started(
            f"{model}-one", self._tables(model, nodes=1), keeps_saves="plain" in self._wanted(model)
        )
        started = [*([] if is_known else [one]), *jobs]
        runs = self.runner.run_all(started, timeout_s=self._timeout_s(), at_once=self.at_once)
        rows = []
        if not is_known:
            rows.append(self._row(runs[0], expected=None))
            if model == "llama":
                self.plain_run = runs[0]
            if not runs[0].problem:
                self.expected[model] = runs[0].hashes
            runs = runs[1:]
        expected = self.expected.get(model, ("", ""))
        return rows + [self._row(run, expected=expected) for run in runs]

    def _wanted(self, model: str) -> tuple[str, ...]:
        """The later parts that need the saves of a model's job of one process."""
        is_wanted = model == "llama" and (not self.parts.only or "plain" in self.parts.only)
        return ("plain",) if is_wanted else ()

    def _row(self, run: JobRun, *, expected: tuple[str, str] | None) -> Row:
        """The figures of a run, printed too; `expected` None: there is nothing to compare with."""
        is_equal = bool(run.hashes[0]) and (expected is None or run.hashes == expected)
        measured, predicted = run.peak_bytes()
        row = {
            "name": run.name,
            "injections": run.started.injections,
            "seconds": run.ended.seconds,
            "pipelines": run.pipelines,
            "hashes": run.hashes,
            "recoveries": run.recoveries,
            "unfired": run.unfired,
            "peak_bytes": measured,
            "predicted_peak_bytes": predicted,
            "problem": run.problem,
            "is_met": is_equal and not run.unfired,
        }
        compared = "equal" if is_equal else "DIFFER" if run.hashes[0] else "MISSING"
        compared = "alone" if expected is None and is_equal else compared
        say(
            f"   {run.name}: {run.ended.seconds:.0f} s, pipelines {run.pipelines}, "
            f"hashes {compared}; {_recovery_texts(run)}; "
            f"peak {_mega(measured)} (predicted {_mega(predicted)})"
        )
        if run.unfired:
            say(f"   {run.name}: NOT INJECTED: {', '.join(run.unfired)}")
        if run.problem:
            say(run.problem)
        return row

    def _six(self, name: str, changes: Tables | None = None) -> Started:
        tables = self._tables(name.partition("-")[0], nodes=NUM_NODES)
        return Started(name, merged(tables, changes or {}), FAULTS.get(name, ()))

    def _tables(self, model: str, *, nodes: int) -> dict[str, Any]:
        """The job file of a model; it draws dropout unless it is compared with plain torch."""
        size = self.size
        is_llama = model == "llama"
        config = {"model_type": "llama", **size.llama, "max_position_embeddings": 512}
        if not is_llama:
            config = {"model_type": "gpt2", **size.gpt2, "n_positions": size.sequence_length}
        return {
            "name": model,
            "model": {"kind": "hf", "config": {**config, "vocab_size": 256}},
            "data": {
                "kind": "text",
                "path": str(self.runner.directory.resolve() / "text"),
                "sequence_length": size.sequence_length,
            },
            "training": {
                "iterations": self.iterations,
                "global_batch_size": 24,
                "microbatch_size": 2,
                "learning_rate": 1e-3,
                "gradient_clip": 1.0,
                "seed": 7,
                "dtype": "bfloat16" if model == "bfloat16" else "float32",
            },
            "resilience": {"failures_tolerated": 2 if nodes > 1 else 0},
            "cluster": {
                "nodes": nodes,
                "device_memory_bytes": size.bytes_by_model[model] if nodes > 1 else 0,
                "rejoin_delay_s": 0.0,
            },
        }

    def _memory_tables(self, *, nodes: int) -> dict[str, Any]:
        changes = {
            "model": {"config": {"n_layer": self.size.shallow}},
            "training": {
                "iterations": TURN * (NUM_RECOVERIES + 1) + 1,
                "global_batch_size": 8,
            },
            "resilience": {"failures_tolerated": min(1, nodes - 1)},
            "cluster": {
                "device_memory_bytes": self.size.bytes_by_model["shallow"] if nodes > 1 else 0
            },
        }
        return merged(self._tables("gpt2", nodes=nodes), changes)

    def _timeout_s(self) -> float:
        return min(self.job_s, self.parts.left_s())


def memory_faults() -> tuple[str, ...]:
    """Twenty faults: workers of node 1 crash, and each fifth time a node dies and another joins.

    Node 0 lives from the beginning to the end. The nodes that die are 2, 3 and those that joined.
    """
    specs = []
    for number in range(NUM_RECOVERIES):
        iteration = TURN * (number + 1)
        if number % 5 == 4:
            specs += [f"kill:{2 + number // 5}@{iteration}", f"join:1@{iteration + 1}"]
        else:
            specs.append(f"crash:1@{iteration}")
    return tuple(specs)


def _recovery_texts(run: JobRun) -> str:
    if not run.recoveries:
        return "no recovery"
    texts = [f"{event['kind']} {event['downtime_s']:.2f} s" for event in run.recoveries]
    is_long = len(texts) > 6
    shown = ", ".join(texts[:6]) + (f" and {len(texts) - 6} more" if is_long else "")
    return f"{len(texts)} recoveries: {shown}"


def _mega(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
