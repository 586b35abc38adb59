"""The user's callbacks are called in order, off the loop, and may stop training."""

import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from planaria.core.job import JobConfig, TrainingConfig
from planaria.errors import ConfigError
from planaria.observe.metrics import EvaluationRecord, EventRecord, IterationRecord
from planaria.show.callbacks import Callbacks, CallbackThread, callbacks_of
from planaria.show.trackers import TensorBoard, WandB


class Noted(Callbacks):
    """Notes its calls; waits, returns and raises what it is told."""

    def __init__(self, *, stops_at: int = -1, raises_at: int = -1) -> None:
        self.calls: list[object] = []
        self.gate = threading.Event()
        self.gate.set()
        self._stops_at, self._raises_at = stops_at, raises_at

    def on_save(self, iteration: int) -> bool:
        self.gate.wait()
        if iteration == self._raises_at:
            raise ZeroDivisionError("mine")
        self.calls.append(iteration)
        return iteration == self._stops_at

    def on_end(self) -> None:
        self.calls.append("end")


def evaluation(iteration: int, loss: float) -> EvaluationRecord:
    return EvaluationRecord(
        iteration=iteration,
        loss=loss,
        samples=10,
        targets=20,
        metrics={"accuracy": 0.5},
        seconds=1.0,
        at_s=5.0,
    )


def test_calls_come_in_order_and_nobody_waits_for_one() -> None:
    """Until the end, which waits for all of them."""
    noted = Noted()
    noted.gate.clear()
    with CallbackThread([noted, other := Noted()]) as thread:
        for iteration in range(100):
            thread.post("on_save", iteration)
        assert noted.calls == []
        noted.gate.set()

    assert noted.calls == other.calls == [*range(100), "end"]
    assert thread.stop_reason == ""


def test_a_job_without_callbacks_has_no_thread() -> None:
    """And nothing is kept for it."""
    before = threading.active_count()
    with CallbackThread([]) as thread:
        thread.post("on_save", 3)
        assert threading.active_count() == before


def test_one_that_returns_true_stops_training() -> None:
    """With what to tell the user."""
    with CallbackThread([Noted(stops_at=2)]) as thread:
        for iteration in range(4):
            thread.post("on_save", iteration)

    assert thread.stop_reason == "on_save of Noted returned True"


def _post_many(thread: CallbackThread) -> None:
    for iteration in range(100_000):
        thread.post("on_save", iteration)


def test_what_one_raises_is_raised_at_the_next_call_and_no_further_one_is_made() -> None:
    """The job saves and ends with it."""
    noted = Noted(raises_at=1)
    thread = CallbackThread([noted])
    with pytest.raises(ZeroDivisionError, match="mine"), thread:
        _post_many(thread)

    assert noted.calls == [0, "end"]


def test_what_one_raises_last_is_told_and_costs_no_result(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What has been trained is saved by then, and its report is still to be written."""
    with CallbackThread([Noted(raises_at=0)]) as thread:
        thread.post("on_save", 0)

    assert "a callback raised ZeroDivisionError('mine')" in caplog.text


def test_what_was_raised_is_not_told_again_and_nothing_is_called_after_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The report is made after the end, and may post that it has no hashes."""
    noted = Noted(raises_at=0)
    with CallbackThread([noted]) as thread, pytest.raises(ZeroDivisionError):
        _post_many(thread)
    thread.post("on_save", 1)

    assert noted.calls == ["end"]
    assert "a callback raised" not in caplog.text


class _Leaves(Callbacks):
    def on_save(self, iteration: int) -> None:
        sys.exit(iteration)


def test_a_callback_that_exits_ends_the_job_and_not_its_thread() -> None:
    """It would have ended the thread, and nobody would have heard of it."""
    thread = CallbackThread([_Leaves()])
    with pytest.raises(RuntimeError, match="SystemExit"), thread:
        _post_many(thread)


def _with(function: str) -> TrainingConfig:
    return TrainingConfig(callbacks=(f"users_callbacks:{function}",))


def test_a_job_names_its_callbacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As functions in modules beside its file."""
    (tmp_path / "users_callbacks.py").write_text(
        "import planaria\n"
        "class Mine(planaria.Callbacks):\n    pass\n"
        "def mine():\n    return Mine()\n"
        "def number():\n    return 3\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)  # As a job file elsewhere may name a module that is here.
    (mine,) = callbacks_of(JobConfig(training=_with("mine")), search_path=[])

    assert type(mine).__name__ == "Mine"
    with pytest.raises(ConfigError, match="it returned an object of type int; return"):
        callbacks_of(JobConfig(training=_with("number")), search_path=[])
    with pytest.raises(ConfigError, match="no function 'none'"):
        callbacks_of(JobConfig(training=_with("none")), search_path=[])


class _Written:
    """Stands for the writers of both packages."""

    def __init__(self) -> None:
        self.numbers: list[tuple[str, float, int]] = []
        self.begun: list[Any] = []
        self.axes: list[tuple[str, str]] = []
        self.has_ended = False

    def define_metric(self, name: str, step_metric: str = "") -> None:
        self.axes.append((name, step_metric))

    def Writer(self, directory: str) -> "_Written":  # noqa: N802 (the package's name)
        self.begun.append(directory)
        return self

    def login(self) -> bool:
        return True

    def init(self, **arguments: Any) -> "_Written":
        self.begun.append(arguments)
        return self

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.numbers.append((name, value, step))

    def log(self, numbers: dict[str, float]) -> None:
        step = int(numbers.pop("iteration"))
        self.numbers += [(name, value, step) for name, value in numbers.items()]

    def flush(self) -> None: ...

    def close(self) -> None:
        self.has_ended = True

    finish = close


@pytest.mark.parametrize("kind", [TensorBoard, WandB])
def test_curves_go_where_they_are_looked_at(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers to both, at the number of iterations that they belong to."""
    written = _Written()
    for name in ("tensorboard", "tensorboard.summary", "wandb"):
        module: Any = ModuleType(name)
        module.Writer, module.init, module.login = written.Writer, written.init, written.login
        monkeypatch.setitem(sys.modules, name, module)
    record = IterationRecord(
        iteration=4,
        loss=2.5,
        samples=20,
        sample_digest="",
        seconds=0.5,
        epoch=0,
        predicted_s=0.4,
        peak_bytes=7,
        predicted_peak_bytes=8,
    )

    with CallbackThread([kind("here")]) as thread:
        thread.post("on_commit", record)
        thread.post("on_evaluation", evaluation(5, 1.5))
        thread.post("on_event", EventRecord(kind="kill", nodes=(1,), iteration=3, downtime_s=0.25))
        thread.post("on_save", 5)

    assert written.numbers == [
        ("train/loss", 2.5, 5),
        ("train/samples_per_second", 40.0, 5),
        ("train/peak_bytes", 7.0, 5),
        ("held_out/loss", 1.5, 5),
        ("held_out/accuracy", 0.5, 5),
        ("events/kill_downtime_s", 0.25, 3),
        ("checkpoint/saved", 5.0, 5),
    ]
    assert written.has_ended
    assert written.axes in ([], [("iteration", ""), ("*", "iteration")])
    assert written.begun[0] == "here" or written.begun[0]["project"] == "here"


def test_a_full_disk_costs_the_curves_and_nothing_else(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told once."""
    written = _Written()
    module: Any = ModuleType("tensorboard.summary")
    module.Writer = written.Writer
    monkeypatch.setitem(sys.modules, "tensorboard.summary", module)
    monkeypatch.setattr(written, "flush", _fail)

    with CallbackThread([TensorBoard("here")]) as thread:
        thread.post("on_save", 5)
        thread.post("on_save", 6)

    assert caplog.text.count("TensorBoard records nothing more: OSError") == 1


def _fail() -> None:
    raise OSError(28, "no space left on device")


@pytest.mark.parametrize(("kind", "package"), [(TensorBoard, "tensorboard"), (WandB, "wandb")])
def test_a_package_that_is_not_installed_is_named(
    kind: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the command that installs it."""
    for name in (package, f"{package}.summary"):
        monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(ConfigError, match=f"pip install {package}"):
        kind("here")


@pytest.mark.parametrize(
    ("kind", "package", "function", "option"),
    [
        (TensorBoard, "tensorboard.summary", "Writer", "--tensorboard"),
        (WandB, "wandb", "login", "--wandb"),
    ],
)
def test_a_tracker_that_cannot_begin_is_a_mistake(
    kind: Any, package: str, function: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that cannot be written, or no account: it was a traceback."""
    module: Any = ModuleType(package)
    setattr(module, function, lambda *_: _fail())
    monkeypatch.setitem(sys.modules, package, module)

    with pytest.raises(ConfigError, match=rf"{option} = 'here': cannot begin: .*no space left"):
        kind("here")


@pytest.mark.parametrize(("arguments", "logs_in"), [({}, True), ({"mode": "offline"}, False)])
def test_a_run_of_wandb_begins_with_what_is_recorded_first(
    arguments: dict[str, Any], logs_in: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was refused left an empty one behind. Whether there is an account is seen before,
    unless none is needed."""
    written, logins = _Written(), list[bool]()
    module: Any = ModuleType("wandb")
    module.init, module.login = written.init, lambda: logins.append(True)
    monkeypatch.setitem(sys.modules, "wandb", module)

    WandB("here").on_end()
    logins.clear()
    tracker = WandB("here", **arguments)

    assert bool(logins) == logs_in
    assert (written.begun, written.has_ended) == ([], False)
    tracker.on_save(5)
    tracker.on_save(6)
    tracker.on_end()
    assert [begun["project"] for begun in written.begun] == ["here"]
    assert written.has_ended
