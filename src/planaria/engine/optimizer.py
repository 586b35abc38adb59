"""Optimizers by name, their state by parameter name, and the learning rate of an iteration.

Every layer has an optimizer of its own, made by the factory, so that a layer with its state can
move between ranks. The state is sent and saved as named tensors: "{parameter}/{name}", for example
"weight/exp_avg", with step counts as int64. Any class of torch.optim that keeps its state per
parameter can be used. Where matrices alone decay, an optimizer has two groups of parameters.

Differs: foreach and fused are switched off in classes that have them. Both round differently from
the plain loop on some devices or builds, and the bits of a parameter must not depend on the node
that steps it. In fast mode a class that can step parameters in one kernel does so, and the layers
of a rank are stepped together: all ranks then run that kernel, which computes each element alone.
"""

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from planaria.core.job import TrainingConfig
from planaria.errors import CheckpointError, ConfigError

OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]

_PINNED = {"foreach": False, "fused": False}
_REFUSED_CLASSES = {
    "LBFGS": "it steps on all parameters at once and calls the model several times a step",
    "SparseAdam": "it needs sparse gradients, which planaria cannot sum over pipelines",
}
_REFUSED_ARGUMENTS = {
    "lr": "give it as training.learning_rate",
    "foreach": "leave it out: planaria sets it to false, so that the result is always the same",
    "fused": "leave it out: planaria sets it to false, so that the result is always the same",
    "capturable": "leave it out: it is for CUDA graphs, which planaria does not capture",
    "differentiable": "leave it out: nothing differentiates through the optimizer's step",
}
_DECAY = "weight_decay"
_CLIP_EPSILON = 1e-6  # As in torch.nn.utils.clip_grad_norm_.
_ROW = 1024  # Elements of a gradient whose squares are added in float32, in fast mode.
_SCHEDULES = ("constant", "linear", "cosine")


def optimizer_factory(training: TrainingConfig) -> OptimizerFactory:
    """The function that makes a layer's optimizer from its named parameters, of which it needs one.

    Raises:
        ConfigError: there is no such class or argument, or it cannot work here. The returned
            factory raises it too, if the class refuses the parameters (Muon takes only matrices).
    """
    arguments = dict(training.optimizer)
    optimizer_class = _optimizer_class(arguments.pop("name", ""))
    known = inspect.signature(optimizer_class).parameters
    for key, value in arguments.items():
        _check_argument(optimizer_class, key, value)
    # TOML has no tuples, but some classes of torch.optim accept only tuples, not lists.
    settings = {
        key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()
    }
    settings |= {key: value for key, value in _PINNED.items() if key in known}
    settings["lr"] = float(training.learning_rate)
    if training.decay != "all" and _DECAY not in known:
        remedy = (
            f'{optimizer_class.__name__} has no {_DECAY}; leave the key out, or set it to "all"'
        )
        raise ConfigError("training.decay", training.decay, remedy)
    factory = partial(_optimizer, optimizer_class, settings, training)
    # This finds wrong values once, before every worker would.
    parameter = nn.Parameter(torch.zeros(1, 1))
    optimizer = factory([("trial", parameter)])
    parameter.grad = torch.ones(1, 1)
    try:
        take_step(optimizer, float(training.learning_rate))
    except (RuntimeError, OverflowError, TypeError, ValueError) as error:
        raise _refusal(training, error) from error
    return factory


def optimizer_state(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], *, num_steps: int
) -> dict[str, Tensor]:
    """The state of the named parameters after the last step, by "{parameter}/{name}".

    The tensors are the optimizer's own, not copies, except the step counts. A parameter that was
    never stepped has no state, so before the first step the whole state is empty.

    Args:
        num_steps: number of steps taken; reading it from a device would wait for the device.
    """
    state = {}
    for name, parameter in parameters.items():
        tensors = optimizer.state.get(parameter, {})
        if "step" in tensors and num_steps == 0:
            continue
        for key, value in tensors.items():
            assert isinstance(value, Tensor), f"{type(optimizer).__name__} keeps {key} = {value!r}"
            count = torch.tensor(num_steps, dtype=torch.int64)
            state[f"{name}/{key}"] = count if key == "step" else value.detach()
    return state


def load_optimizer_state(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Tensor]
) -> int:
    """Restores a state that `optimizer_state` returned; copies the tensors; returns num_steps.

    Raises:
        CheckpointError: the state names a parameter that is not in `parameters`.
    """
    tensors_by_name: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
    for path, tensor in state.items():
        name, _, key = path.rpartition("/")
        if name not in tensors_by_name:
            raise CheckpointError(
                f"optimizer state {path!r} fits none of the parameters {', '.join(parameters)}"
            )
        tensors_by_name[name][key] = tensor
    for name, tensors in tensors_by_name.items():
        parameter = parameters[name]
        optimizer.state[parameter] = (
            {key: _state_value(key, value, parameter, optimizer) for key, value in tensors.items()}
            if tensors
            else _initial_state(optimizer, parameter)
        )
    return max((int(tensors.get("step", 0)) for tensors in tensors_by_name.values()), default=0)


def joint_optimizers(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """One optimizer for each kernel and weight decay with which parameters of these are stepped.

    They have the same class and other arguments. `join_state` must be called before each step.
    """
    alike: dict[tuple[bool, Any], tuple[Optimizer, dict[str, Any]]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            key = bool(group.get("fused")), group.get(_DECAY)
            _, joint = alike.setdefault(key, (optimizer, {**group, "params": []}))
            joint["params"] += group["params"]
    return [_like(optimizer, joint, joint["params"]) for optimizer, joint in alike.values()]


def join_state(joined: Iterable[Optimizer], optimizers: Iterable[Optimizer]) -> None:
    """Has the joined optimizers step the state that the single ones hold now, and no copy of it."""
    states = {p: o.state[p] for o in optimizers for g in o.param_groups for p in g["params"]}
    for optimizer in joined:
        for parameter in optimizer.param_groups[0]["params"]:  # It has one group.
            optimizer.state[parameter] = states[parameter]


def parts_to_step(
    layers: Iterable[int], is_copied: Callable[[int], bool], training: TrainingConfig
) -> list[list[int]]:
    """The layers in parts, each for one optimizer step, in the order in which they should step.

    In fast mode all that no copy holds back are one part, the first, and each other one is a part.
    In deterministic mode each layer is one, so a step that raises costs no other layer.
    """
    free: list[int] = []
    others: list[int] = []
    for layer in layers:
        (others if training.deterministic or not is_copied(layer) else free).append(layer)
    return [*([free] if free else []), *([layer] for layer in others)]


def take_step(optimizer: Optimizer, learning_rate: float) -> None:
    """Takes a step of an optimizer at a learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()


def squared_norm(gradient: Tensor) -> Tensor:
    """The sum of squares in float64, a scalar."""
    if gradient.is_cpu:
        return gradient.double().pow_(2).sum()
    # Accelerators have a kernel for it that takes no memory.
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    return norm.square()


def squared_norm_of_rows(gradient: Tensor) -> Tensor:
    """The sum of squares, a scalar of float64; of `_ROW` elements at a time in float32.

    It takes a fifth of the time of `squared_norm`.
    """
    end = len(gradient) // _ROW * _ROW
    parts = (gradient[:end].view(-1, _ROW), gradient[end:].view(1, -1))
    norms = torch.cat([torch.linalg.vector_norm(part, dim=1) for part in parts])
    return norms.double().square_().sum()


def clip_scale(training: TrainingConfig, gradient_norm: float) -> float:
    """Factor by which clipping multiplies gradients of this global norm, at most 1."""
    if training.gradient_clip <= 0:
        return 1.0
    return min(1.0, training.gradient_clip / (gradient_norm + _CLIP_EPSILON))


def learning_rate(training: TrainingConfig, iteration: int) -> float:
    """The learning rate of an iteration; iterations count from 0.

    It rises in warmup_iterations equal steps to training.learning_rate. Then it stays there, or
    falls linearly or along a half cosine so as to reach final_fraction of training.learning_rate at
    training.iterations.

    Raises:
        ConfigError: the schedule has an unknown name, key or value.
    """
    assert iteration >= 0
    name, warmup_iterations, final_fraction = _schedule(training.schedule)
    highest = training.learning_rate
    if iteration < warmup_iterations:
        return highest * (iteration + 1) / warmup_iterations
    if name == "constant":
        return highest
    length = max(1, training.iterations - warmup_iterations)
    progress = min(1.0, (iteration - warmup_iterations) / length)
    left = 1 - progress if name == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return highest * (final_fraction + (1 - final_fraction) * left)


def _optimizer_class(name: object) -> type[Optimizer]:
    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    optimizer_class = classes.get(str(name).lower())
    if optimizer_class is None:
        names = sorted(c.__name__ for c in classes.values() if c.__name__ not in _REFUSED_CLASSES)
        raise ConfigError("training.optimizer.name", name, _choose(str(name), names))
    if optimizer_class.__name__ in _REFUSED_CLASSES:
        reason = _REFUSED_CLASSES[optimizer_class.__name__]
        raise ConfigError(
            "training.optimizer.name", name, f"{reason}; use another one, such as AdamW"
        )
    return optimizer_class


def _check_argument(optimizer_class: type[Optimizer], key: str, value: object) -> None:
    if key in _REFUSED_ARGUMENTS:
        raise ConfigError(f"training.optimizer.{key}", value, _REFUSED_ARGUMENTS[key])
    known = inspect.signature(optimizer_class).parameters.keys() - _REFUSED_ARGUMENTS - {"params"}
    if key not in known:
        remedy = f"{optimizer_class.__name__} has no such argument; {_choose(key, sorted(known))}"
        raise ConfigError(f"training.optimizer.{key}", value, remedy)


def _optimizer(
    optimizer_class: type[Optimizer],
    settings: Mapping[str, Any],
    training: TrainingConfig,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
) -> Optimizer:
    parameters = list(named_parameters)
    assert parameters, "a layer without parameters has no optimizer"
    if "fused" in settings:
        # On a processor the fused kernels take all memory to have one layout.
        is_plain = all(parameter.is_contiguous() for _, parameter in parameters)
        is_fast = is_plain and not training.deterministic
        device = parameters[0][1].device
        settings = {**settings, "fused": is_fast and can_fuse(optimizer_class.__name__, device)}
    groups: list[Any] = parameters
    if training.decay == "matrices":
        matrices = [(name, p) for name, p in parameters if p.dim() >= 2]
        others = [(name, p) for name, p in parameters if p.dim() < 2]
        groups = [{"params": matrices}, {"params": others, _DECAY: 0.0}]
        groups = [group for group in groups if group["params"]]
    try:
        return optimizer_class(groups, **settings)
    except (TypeError, ValueError) as error:
        raise _refusal(training, error) from error


@cache
def can_fuse(name: str, device: torch.device) -> bool:
    """Whether the class of this name, which has fused kernels, has one for the device; tries it."""
    parameter = nn.Parameter(torch.zeros(1, device=device))
    parameter.grad = torch.zeros_like(parameter)
    new: Any = _optimizer_class(name)  # As in `_like`.
    try:
        new([parameter], fused=True).step()
    except RuntimeError:
        return False
    return True


def _refusal(training: TrainingConfig, error: Exception) -> ConfigError:
    remedy = f"torch refuses it with learning rate {training.learning_rate}: {error}"
    return ConfigError("training.optimizer", dict(training.optimizer), remedy)


def _state_value(key: str, value: Tensor, parameter: nn.Parameter, optimizer: Optimizer) -> Tensor:
    """A copy of the value as torch keeps it: step counts as float32, and scalars on the host.

    A fused optimizer keeps step counts on the device, and any the moments of a scalar parameter.
    """
    if key == "step":
        device = parameter.device if optimizer.param_groups[0].get("fused") else None
        return torch.tensor(float(value), dtype=torch.float32, device=device)
    is_with_parameter = value.dim() > 0 or parameter.dim() == 0
    device = parameter.device if is_with_parameter else torch.device("cpu")
    return value.detach().to(device, copy=True)


def _initial_state(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """The state that a new optimizer of this class has for the parameter; empty but for Adagrad."""
    new = _like(optimizer, optimizer.param_groups[0], [parameter])
    return dict(new.state.get(parameter, {}))


def _like(
    optimizer: Optimizer, group: Mapping[str, Any], parameters: Sequence[nn.Parameter]
) -> Optimizer:
    """A new optimizer of the same class with the arguments of one of its groups."""
    known = inspect.signature(type(optimizer)).parameters.keys() - {"params"}
    # mypy checks the constructor of Optimizer itself, whose arguments no subclass shares.
    new: Any = type(optimizer)
    made: Optimizer = new(parameters, **{key: v for key, v in group.items() if key in known})
    return made


def _schedule(schedule: Mapping[str, Any]) -> tuple[str, int, float]:
    known = ("name", "warmup_iterations", "final_fraction")
    for key, value in schedule.items():
        if key not in known:
            remedy = f"there is no such key; {_choose(key, known)}"
            raise ConfigError(f"training.schedule.{key}", value, remedy)
    name = schedule.get("name", "constant")
    warmup_iterations = schedule.get("warmup_iterations", 0)
    final_fraction = schedule.get("final_fraction", 0.0)
    if name not in _SCHEDULES:
        raise ConfigError("training.schedule.name", name, _choose(str(name), _SCHEDULES))
    if type(warmup_iterations) is not int or warmup_iterations < 0:
        remedy = "give a whole number of iterations, 0 or more"
        raise ConfigError("training.schedule.warmup_iterations", warmup_iterations, remedy)
    if type(final_fraction) not in (int, float) or not 0 <= final_fraction <= 1:
        remedy = "give a part of the learning rate between 0 and 1"
        raise ConfigError("training.schedule.final_fraction", final_fraction, remedy)
    return name, warmup_iterations, float(final_fraction)


def _choose(given: str, known: Iterable[str]) -> str:
    """Text for a message: the known word nearest to `given`, if any is near, and all known ones."""
    words = {word.lower(): word for word in known}
    nearest = difflib.get_close_matches(given.lower(), words, n=1, cutoff=0.5)
    hint = f"did you mean {words[nearest[0]]}? " if nearest else ""
    return f"{hint}the choices are {', '.join(words.values())}"
