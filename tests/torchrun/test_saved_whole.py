"""What an optimizer holds that would not come back is refused before the first version."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import SGD, AdamW

from planaria.errors import ConfigError
from planaria.torchrun.save_checks import check_on_all
from planaria.torchrun.shards import TrainingState


@pytest.fixture(autouse=True)
def _group(tmp_path: Path) -> Iterator[None]:
    """Of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_an_optimized_parameter_that_is_not_of_the_model_is_refused() -> None:
    """It would not be in a version, nor would its moments; a module that holds both will do."""
    model, temperature = nn.Linear(4, 4), nn.Parameter(torch.ones(3))
    optimizer = AdamW([model.bias])
    optimizer.add_param_group({"params": [model.weight, temperature]})

    with pytest.raises(ConfigError, match="make it a parameter of the model") as caught:
        check_on_all(TrainingState(model, optimizer, {}))
    assert caught.value.field == "optimizer.param_groups[1]['params'][1]"
    assert caught.value.value == "a parameter of shape (3,)"
    both = nn.Module()
    both.model, both.temperature = model, temperature
    check_on_all(TrainingState(both, optimizer, {}))


def test_state_that_is_of_no_parameter_is_refused() -> None:
    """Such as a count of all steps, or what is left of a parameter that is optimized no more."""
    model = nn.Linear(4, 4)
    optimizer = SGD(model.parameters())
    state: dict[object, object] = optimizer.state  # type: ignore[assignment]
    state["all"] = {"steps": 3}
    with pytest.raises(ConfigError, match="keep it in a param group") as caught:
        check_on_all(TrainingState(model, optimizer, {}))
    assert caught.value.value == "all"
    del state["all"]
    state[torch.ones(4)] = {}
    state[torch.ones(5)] = {"step": 3}
    with pytest.raises(ConfigError, match=r"shape \(5,\)'?: the model does not have it"):
        check_on_all(TrainingState(model, optimizer, {}))


@pytest.mark.parametrize("key", [0, "old/gradient"])
def test_state_under_a_name_that_is_not_kept_is_refused(key: object) -> None:
    """A number would come back as a string, and what is behind a / as another parameter's."""
    model = nn.Linear(4, 4)
    optimizer = SGD(model.parameters())
    state: dict[object, object] = optimizer.state[model.weight]
    state["momentum_buffer"] = torch.ones(4, 4)
    check_on_all(TrainingState(model, optimizer, {}))
    state[key] = torch.ones(4, 4)

    with pytest.raises(ConfigError, match="strings without a /") as caught:
        check_on_all(TrainingState(model, optimizer, {}))
    assert caught.value.field == "a key of optimizer.state of weight"
    assert caught.value.value == repr(key)


def test_state_that_is_cut_otherwise_than_its_parameter_is_refused() -> None:
    """A restore knows how parameters are cut, and cuts what has their shape like them."""
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Linear(4, 4)
    optimizer = SGD(model.parameters())
    optimizer.state[model.weight]["like"] = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    check_on_all(TrainingState(model, optimizer, {}))
    optimizer.state[model.weight]["rows"] = distribute_tensor(torch.ones(4, 1), mesh, [Shard(0)])

    with pytest.raises(ConfigError, match="whose shape is not") as caught:
        check_on_all(TrainingState(model, optimizer, {}))
    assert caught.value.field == "optimizer.state of weight, rows"


class Average:
    """A moving average of a model, say, which a script gives in `others`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"count": 3, "averages": [{"weight": self._tensor}]}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        raise AssertionError(state_dict)


def test_parts_of_tensors_among_others_are_refused() -> None:
    """All ranks would get the part of rank 0; an object of each rank's own gets its own back."""
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Linear(4, 4)
    optimizer = SGD(model.parameters())
    average = Average(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    check_on_all(TrainingState(model, optimizer, {}, {"average": average}))
    check_on_all(TrainingState(model, optimizer, {"average": Average(torch.ones(4, 4))}))

    with pytest.raises(ConfigError, match="per_rank") as caught:
        check_on_all(TrainingState(model, optimizer, {"average": average}))
    assert caught.value.field == "others.average.averages.0.weight"
    assert caught.value.value == "DTensor"
