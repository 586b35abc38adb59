"""Measures on one GPU what planaria costs a job that does not fail, beside a plain loop.

A GPT-2 of 1.3 billion parameters trains in bfloat16 with float32 masters on one rank, in fast mode
(`training.deterministic = false`), with 0.5 million tokens in an iteration. The plain loop
(gpu/plain_loop.py) has the same modules, kernels, microbatches and sums. Runs take turns, one at a
time. The parts, in the order of their importance:

    raw         copies between pinned memory and the GPU, and products of matrices, at their best
    speed       tokens per second: plain loop, planaria, plain loop again; goal: planaria at least
                0.95 of the plain loop. In the second half of its iterations planaria copies its
                state to memory after each one; goal: at most 1% slower than in the first half. Peak
                memory, measured and predicted
    compile     both with compiled blocks
    loop        a loop of one's own in float32, with and without MemoryCheckpointer.save after each
                iteration: the stall of the copy from the device

The first iteration of each run is left out. Each figure is a median, with the smallest and the
largest beside it. Logs, job files and reports are kept in --directory; the saves that jobs make at
their ends, 16 GB each, are removed. Exits 2 without a GPU, 1 if a part failed or missed its goal.
`--device cpu --small` tries everything out on a processor.
"""

import argparse
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpu.jobs import (
    JobRun,
    Runner,
    Started,
    Tables,
    merged,
    toml_text,
    write_text,
)
from gpu.running import (
    ROOT,
    Parts,
    Row,
    accelerator,
    begin_parts,
    last_json,
    run_command,
    say,
)

PARTS: Final = ("raw", "speed", "compile", "loop")
LEAST_S: Final = {"raw": 10.0, "speed": 60.0, "compile": 90.0, "loop": 30.0}
SPEED_GOAL: Final = 0.95
SLOWDOWN_GOAL: Final = 0.01
MEMORY_GOAL: Final = 0.10
STATE_BYTES: Final = 12  # Of a parameter: its float32 master, and two moments of AdamW.
_SHARED: Final = Path("/dev/shm")

LARGE: Final = {"n_layer": 24, "n_embd": 2048, "n_head": 16, "vocab_size": 50304}
SMALL: Final = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 256}


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second of some iterations.

    Attributes:
        seconds: seconds of each measured iteration.
    """

    tokens: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Tokens per second of the median iteration."""
        return self.tokens / statistics.median(self.seconds)

    def __str__(self) -> str:
        low, high = self.tokens / max(self.seconds), self.tokens / min(self.seconds)
        return f"{self.median:,.0f} tokens/s ({low:,.0f} to {high:,.0f}, n = {len(self.seconds)})"


def main() -> int:
    """Runs the parts; returns the exit code."""
    options = _options()
    device = options.device if options.device != "auto" else accelerator()
    parts = begin_parts("gpu_speed", options, device)
    if parts is None:
        return 2
    saves = _saves_directory(options.directory, is_small=options.small)
    try:
        speed = _Speed(options, Runner(options.directory, device, saves), parts)
        write_text(options.directory / "text", num_bytes=(1 << 16) if options.small else (8 << 20))
        for name in PARTS:
            parts.run(name, getattr(speed, name), least_s=LEAST_S[name])
    finally:
        shutil.rmtree(saves, ignore_errors=True)
    return parts.report()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="auto", help="type of the device, such as cuda or cpu")
    parser.add_argument("--small", action="store_true", help="a tiny model and few tokens")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for all parts")
    parser.add_argument("--job-seconds", type=float, default=200.0, help="time for each run")
    parser.add_argument("--iterations", type=int, default=7, help="of each run of planaria")
    parser.add_argument("--tokens", type=int, default=1 << 19, help="in an iteration")
    parser.add_argument("--microbatch", type=int, default=8, help="sequences in a microbatch")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--only", nargs="*", default=(), choices=PARTS)
    parser.add_argument("--directory", type=Path, default=ROOT / "reports" / "gpu-speed")
    parser.add_argument("--results", type=Path, help="JSON file, written after each part")
    return parser.parse_args()


def _saves_directory(directory: Path, *, is_small: bool) -> Path:
    """A directory for saves: in memory if there is room for a large one, else beside the logs."""
    has_room = _SHARED.is_dir() and shutil.disk_usage(_SHARED).free > (48 << 30)
    saves = _SHARED / "planaria-gpu-speed" if has_room and not is_small else directory / "saves"
    saves.mkdir(parents=True, exist_ok=True)
    return saves


@dataclass(slots=True)
class _Speed:
    """The parts, and what they know of each other.

    Attributes:
        to_host: GB/s of pinned copies to the host; 0: not measured.
    """

    options: argparse.Namespace
    runner: Runner
    parts: Parts
    to_host: float = 0.0
    tables: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.tables = _tables(self.options, text=self.runner.directory.resolve() / "text")

    @property
    def tokens(self) -> int:
        """Number of tokens in an iteration."""
        samples: int = self.tables["training"]["global_batch_size"]
        length: int = self.tables["data"]["sequence_length"]
        return samples * length

    def raw(self) -> list[Row]:
        """What the device can do at best."""
        sizes = ["--bytes", str(1 << 20), "--width", "64"] if self.options.small else []
        found = self._script(
            "raw", "raw_figures.py", ["--device", self.runner.torch_device, *sizes]
        )
        self.to_host = found["to_host_gb_per_s"]
        say(
            f"   {found['name']}: pinned copies {found['to_host_gb_per_s']:.1f} GB/s to the host, "
            f"{found['to_device_gb_per_s']:.1f} to the device, {found['within_gb_per_s']:.0f} "
            f"within it (read and written); bfloat16 products {found['tflop_per_s']:.0f} TFLOP/s"
        )
        return [{"name": "raw", **found}]

    def speed(self) -> list[Row]:
        """planaria between two runs of the plain loop."""
        first = self._plain("plain-1")
        half = self.options.iterations // 2 + 1
        copies = {"copies": 1, "every": 1, "profile_iterations": half}
        run = self._job("planaria", {"checkpoint": copies})
        if run.problem:
            raise RuntimeError(run.problem)
        ours = self._rate(run.iteration_s(first=1)[: half - 1])
        say(f"   planaria: {ours}")
        rows = [_run_row(run), _memory_row(run, plain_bytes=first["peak_bytes"])]
        rows.append(self._copies_row(run, ours, self._rate(run.iteration_s(first=half))))
        seconds = list(first["seconds"])
        if self.parts.left_s() > LEAST_S["speed"]:
            again = self._plain("plain-2")
            seconds += again["seconds"]
            drift = statistics.median(again["seconds"]) / statistics.median(first["seconds"])
            say(f"   A/A: the second plain run takes {drift:.3f} of the first")
            rows.append({"name": "plain again over plain", "ratio": drift})
        rows.append(_ratio_row("planaria over plain loop", ours, self._rate(seconds)))
        return rows

    def _copies_row(self, run: JobRun, without: Rate, found: Rate) -> Row:
        """What copies of the state in memory cost, and what they consist of."""
        slowdown = without.median / found.median - 1.0
        is_met = slowdown <= SLOWDOWN_GOAL
        num_bytes = STATE_BYTES * self._num_parameters()
        copy_s = num_bytes / self.to_host / 1e9 if self.to_host else 0.0
        stall_s = run.report["ledger"]["checkpoint_stall"]
        say(
            f"   with a copy after each iteration: {found}; {100 * slowdown:+.2f}%, goal at most "
            f"{100 * SLOWDOWN_GOAL:.0f}%: {'met' if is_met else 'MISSED'}"
        )
        say(
            f"   {num_bytes / 1e9:.2f} GB of state, {copy_s:.2f} s at the rate of pinned copies; "
            f"stall of the whole job {stall_s:.3f} s; report: {run.report['checkpoints']}"
        )
        row = {"name": "copies", "slowdown": slowdown, "is_met": is_met, "seconds": found.seconds}
        beside = {"state_bytes": num_bytes, "copy_s": copy_s, "stall_s": stall_s}
        return row | beside | {"checkpoints": run.report["checkpoints"]}

    def compile(self) -> list[Row]:
        """Both loops with compiled blocks."""
        run = self._job("planaria-compile", {"training": {"compile": True}})
        if run.problem:
            raise RuntimeError(run.problem)
        ours = self._rate(run.iteration_s(first=1))
        say(f"   planaria, compiled: {ours}")
        theirs = self._rate(self._plain("plain-compile", "--compile")["seconds"])
        return [_run_row(run), _ratio_row("planaria over plain loop, compiled", ours, theirs)]

    def loop(self) -> list[Row]:
        """What saves of MemoryCheckpointer cost a loop of one's own."""
        sizes = ["--width", "64", "--layers", "2", "--batch", "64"] if self.options.small else []
        found = self._script("loop", "own_loop.py", ["--device", self.runner.torch_device, *sizes])
        without, saved, again = (
            statistics.median(found[turn]) for turn in ("without", "saved", "again")
        )
        slowdown, drift = saved / without - 1.0, again / without - 1.0
        copy_s = found["state_bytes"] / self.to_host / 1e9 if self.to_host else 0.0
        say(
            f"   MemoryCheckpointer: {100 * slowdown:+.2f}% ({1e3 * (saved - without):.2f} ms of "
            f"{1e3 * without:.1f} ms), A/A {100 * drift:+.2f}%; {found['state_bytes'] / 1e9:.2f} "
            f"GB of state, {copy_s:.2f} s at the rate of pinned copies; {found['begun']} of "
            f"{found['saves']} saves began a version"
        )
        return [{"name": "MemoryCheckpointer", "slowdown": slowdown, "drift": drift, **found}]

    def _num_parameters(self) -> int:
        """Number of elements of all parameters, from the log of the plain loop."""
        log = self.runner.directory / "plain-1" / "log"
        return int(last_json(log)["parameters"])

    def _rate(self, seconds: Sequence[float]) -> Rate:
        if not seconds:
            raise RuntimeError("no iteration was measured")
        return Rate(self.tokens, tuple(seconds))

    def _job(self, name: str, changes: Tables) -> JobRun:
        return self.runner.run(
            Started(name, merged(self.tables, changes)), timeout_s=self._timeout_s()
        )

    def _plain(self, name: str, *more: str) -> Row:
        job = self.runner.directory / name / "job.toml"
        job.parent.mkdir(parents=True, exist_ok=True)
        # The plain loop reads the job file without the keys that it does not obey.
        known = {key: self.tables[key] for key in ("name", "model", "data", "training")}
        job.write_text(toml_text(known))
        number = str(max(2, self.options.iterations // 2))
        words = [str(job), "--device", self.runner.torch_device, "--iterations", number, *more]
        found = self._script(name, "plain_loop.py", words)
        say(f"   {name}: {self._rate(found['seconds'])}, losses {found['losses']}")
        return found

    def _script(self, name: str, script: str, words: Sequence[str]) -> Row:
        """The JSON that a script of gpu/ prints in its last line."""
        log = self.runner.directory / name / "log"
        command = [sys.executable, str(Path(__file__).parent / "gpu" / script), *words]
        ended = run_command(command, log=log, timeout_s=self._timeout_s())
        if ended.problem:
            raise RuntimeError(ended.problem)
        return last_json(log)

    def _timeout_s(self) -> float:
        limit_s: float = self.options.job_seconds
        return min(limit_s, self.parts.left_s())


def _tables(options: argparse.Namespace, *, text: Path) -> dict[str, Any]:
    """The job file: GPT-2 without dropout, and attention by fused kernels."""
    length, tokens = (16, 256) if options.small else (1024, options.tokens)
    microbatch = 2 if options.small else options.microbatch
    return {
        "name": "speed",
        "model": {
            "kind": "hf",
            "config": {
                "model_type": "gpt2",
                **(SMALL if options.small else LARGE),
                "n_positions": length,
                "attn_implementation": "sdpa",
                "activation_function": "gelu_pytorch_tanh",
                **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            },
        },
        "data": {"kind": "text", "path": str(text), "sequence_length": length},
        "training": {
            "iterations": options.iterations,
            "global_batch_size": max(microbatch, tokens // length // microbatch * microbatch),
            "microbatch_size": microbatch,
            "learning_rate": 1e-4,
            "seed": 7,
            "dtype": "bfloat16",
            "deterministic": False,
            "activation_checkpointing": options.checkpointing,
        },
        "resilience": {"failures_tolerated": 0},
        "cluster": {"nodes": 1},
    }


def _run_row(run: JobRun) -> Row:
    say(f"   {run.name}: {run.ended.seconds:.0f} s in all")
    seconds = [record["seconds"] for record in run.report.get("iterations", ())]
    ledger = run.report.get("ledger", {})
    return {"name": run.name, "wall_s": run.ended.seconds, "seconds": seconds, "ledger": ledger}


def _ratio_row(name: str, ours: Rate, theirs: Rate) -> Row:
    ratio = ours.median / theirs.median
    is_met = ratio >= SPEED_GOAL
    say(f"   {name}: {ratio:.3f}, goal {SPEED_GOAL}: {'met' if is_met else 'MISSED'}")
    medians = {"planaria": ours.median, "plain": theirs.median}
    return {"name": name, "ratio": ratio, "is_met": is_met, **medians}


def _memory_row(run: JobRun, *, plain_bytes: int) -> Row:
    """The peak memory of planaria, beside its prediction and that of the plain loop."""
    measured, predicted = run.peak_bytes()
    error = predicted / measured - 1.0 if measured else 0.0
    say(
        f"   peak memory: measured {measured / 1e9:.2f} GB, predicted {predicted / 1e9:.2f} GB "
        f"({100 * error:+.1f}%, wanted within {100 * MEMORY_GOAL:.0f}%), plain loop "
        f"{plain_bytes / 1e9:.2f} GB"
    )
    bytes_by_name = {"measured": measured, "predicted": predicted, "plain": plain_bytes}
    return {"name": "peak memory", **bytes_by_name, "error": error}


if __name__ == "__main__":
    sys.exit(main())
