"""What ranks cannot save, or not whole, all of them refuse, and all tell the same of a save."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from helpers.forked_ranks import order, tell, told_by_ranks
from helpers.keepers import keepers
from planaria.checkpoint.memory.arena import Arena
from planaria.errors import CheckpointError, ConfigError
from planaria.nodes.forkserver import ForkServer
from planaria.torchrun.gathering import gather_records
from planaria.torchrun.memory_checkpointer import MemoryCheckpointer
from planaria.torchrun.save_checks import check_on_all
from planaria.torchrun.shards import TrainingState


class Sampler:
    """Its state is a type that torch.load does not know."""

    def state_dict(self) -> dict[str, object]:
        return {"at": 3, "is": self}

    def load_state_dict(self, state_dict: dict[str, object], /) -> None:
        raise AssertionError(state_dict)


def stepped(make: Callable[[nn.Module], Optimizer]) -> TrainingState:
    """A model that all ranks hold, and an optimizer that has taken a step."""
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = make(model)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    return TrainingState(model, optimizer, {})


def refusal(held: TrainingState) -> str:
    """Empty if there is none."""
    try:
        check_on_all(held)
    except ConfigError as error:
        return str(error)
    return ""


def _of(held: TrainingState, name: str) -> nn.Parameter:
    return dict(held.model.named_parameters())[name]


def sharded() -> TrainingState:
    """A model of DTensors, of whose parts the ranks have plain tensors."""
    model = nn.Linear(4, 4)
    fully_shard(model)
    optimizer = SGD(model.parameters())
    weight = model.weight
    assert isinstance(weight, DTensor)
    optimizer.state[weight]["momentum"] = weight.to_local().detach().clone()
    return TrainingState(model, optimizer, {})


def pipelined(*names: str) -> TrainingState:
    """A stage of layers of such names, which only this rank holds, as FSDP2 has it."""
    number = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stages", "peers"))
    torch.manual_seed(number)
    stage = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})
    for layer in stage.values():
        fully_shard(layer, mesh=mesh["peers"])
    return TrainingState(stage, SGD(stage.parameters()), {})


def parallel() -> TrainingState:
    """A model that tensor parallelism cuts in part, and FSDP2 among those of the same part."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("peers", "parts"))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parallelize_module(model, mesh["parts"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["peers"])
    return TrainingState(model, SGD(model.parameters()), {})


class Sampled:
    """A position in the data, with values whose bytes differ between processes."""

    def __init__(self, position: int) -> None:
        self._position = position
        self.more: object = 0

    def state_dict(self) -> dict[str, object]:
        names = {f"file{n}" for n in range(9)}  # Each process has another order of it.
        return {
            "at": self._position,
            "done": names,
            "of": [torch.tensor([3.0]), np.float64(0.5)],
            "is": self.more,
        }

    def load_state_dict(self, state_dict: dict[str, object], /) -> None:
        raise AssertionError(state_dict)


class Scaled(nn.Linear):
    """A layer that keeps a scale which is in no tensor, as layers of 8 bits do."""

    scale: object = 0

    def get_extra_state(self) -> object:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, object]) -> None:
        self.scale = state["scale"]


def scaled(number: int) -> TrainingState:
    torch.manual_seed(1)
    model = Scaled(2, 2)
    model.scale = number
    return TrainingState(model, SGD(model.parameters()), {})


def others_apart(held: TrainingState, number: int) -> dict[str, str]:
    """What is refused of other objects that are the same on all ranks, and of such that are not."""
    alike, apart = {"sampler": Sampled(5)}, {"fine": Sampled(5), "sampler": Sampled(number)}
    return {
        "alike": refusal(TrainingState(held.model, held.optimizer, alike)),
        "apart": refusal(TrainingState(held.model, held.optimizer, apart)),
        "own": refusal(TrainingState(held.model, held.optimizer, {}, apart)),
        "scaled": refusal(scaled(number)),
    }


def of_one_rank() -> TrainingState:
    """A model of whose weight rank 0 alone has a part."""
    model = nn.Linear(4, 4)
    weight = distribute_tensor(torch.ones(4, 4), DeviceMesh("cpu", [0]), [Replicate()])
    model.weight = nn.Parameter(weight)
    return TrainingState(model, SGD(model.parameters()), {})


def lost_keeper(held: TrainingState, number: int, place: Path) -> dict[str, str]:
    """What saves tell, after the first one on a machine of rank 1 whose keeper cannot be had."""
    saver = MemoryCheckpointer(held.model, held.optimizer, directory=str(place))
    told = [saver.save(1)]
    saver.wait_ended()
    if number:
        (process,) = keepers(place)
        process.kill()
        process.wait()
    with patch("planaria.torchrun.keeper._start_keeper", side_effect=CheckpointError("no process")):
        told += [saver.save(2), saver.save(3)]
    dist.barrier()
    saver.close()
    return {"lost keeper": str(told)}


def refused_late(place: Path) -> dict[str, str]:
    """What the second save tells of an optimizer that had no state at the first one."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # As below.

    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.1)
    saver = MemoryCheckpointer(model, optimizer, directory=str(place))
    told = f"{saver.save(0)} "
    saver.wait_ended()
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    try:
        saver.save(1)
    except ConfigError as error:
        told += str(error)
    saver.close()
    return {"late": told}


def odd_later(held: TrainingState, number: int, place: Path) -> dict[str, str]:
    """What saves tell whose first state can be read, and a later one of rank 1 cannot."""
    told = ""
    for kind in ("others", "per_rank"):
        sampler = Sampled(5)
        more: Any = {kind: {"sampler": sampler}, "directory": str(place / kind)}
        saver = MemoryCheckpointer(held.model, held.optimizer, **more)
        told += f"{saver.save(1)} "
        saver.wait_ended()
        sampler.more = Sampler() if number or kind == "others" else 0
        try:
            saver.save(2)
        except ConfigError as error:
            told += (
                f"{error.field} {[labels[0].age for labels in saver._memory.versions().values()]} "
            )
        sampler.more = 7
        told += f"{saver.save(2)} "
        saver.wait_ended()
        dist.barrier()
        saver.close()
    return {"odd later": told}


def alone(number: int, directory: str) -> None:
    """A run of one rank, whose memory outlives it."""
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store of {number}", rank=0, world_size=1
    )
    saver = saver_of(float(number), f"{directory}/run{number}")
    saver.save(1)
    saver.wait_ended()
    saver._memory._slot.close()
    saver.close()
    dist.destroy_process_group()


def back_from_two_runs(number: int, directory: str) -> dict[str, str]:
    """The iteration and the weights after `alone` on each rank's machine."""
    saver = saver_of(-1.0, f"{directory}/run{number}")
    first = saver.restore()
    (weight,) = saver._group._state.model.parameters()
    saver.close()
    return {"two runs": f"{first} {weight.flatten().tolist()}"}


def lost_shards(number: int, place: Path) -> dict[str, str]:
    """What restores tell when the machine of rank 1 is another one: after two saves, after one, and
    after one that was cut off."""
    told = ""
    for num_saves, is_cut_off in ((2, False), (2, True), (1, False)):
        where = place / f"{num_saves} {is_cut_off}"
        saver = sharded_saver(where / f"{number}")
        for iteration in range(num_saves):
            if is_cut_off and iteration == num_saves - 1:
                with patch.object(Arena, "finish"):  # As if the rank had died before.
                    saver.save(1 + iteration)
                    saver.wait_ended()
            else:
                saver.save(1 + iteration)
                saver.wait_ended()
            dist.barrier()
        saver._memory._slot.close()
        saver.close()
        saver = sharded_saver(where / ("another" if number else "0"))
        try:
            told += f"{saver.restore()}. "
        except CheckpointError as error:
            told += f"{str(error).rpartition(';')[0]}. "
        dist.barrier()
        saver.close()
        for process in keepers(where / f"{number}"):  # That of the machine that is lost.
            process.kill()
            process.wait()
    return {"lost shards": told}


def sharded_saver(place: Path) -> MemoryCheckpointer:
    """Of a model of which each rank has a part, without copies on other machines."""
    model = nn.Linear(4, 4)
    fully_shard(model)
    return MemoryCheckpointer(model, SGD(model.parameters()), directory=str(place), copies=1)


def of_one_name(number: int, directory: str) -> dict[str, str]:
    """What rank 0 warns of, and how many nodes there are, where machines have one name, and paths
    on them are the same."""
    here = Path(directory) / f"machine{number}"
    here.mkdir()
    os.chdir(here)
    with patch("planaria.torchrun.group_copies.logger.warning") as warned:
        for copies in (2, 3):
            saver = saver_of(1.0, "place", copies=copies)
            dist.barrier()  # All are linked.
            saver.close()
    warnings = gather_records(list[str], [str(call) for call in warned.mock_calls])[0]
    return {"one name": f"{len({*saver._group._nodes})} nodes: {warnings}"}


def saver_of(value: float, place: str, copies: int = 2) -> MemoryCheckpointer:
    """Of a model of two weights, which every rank holds."""
    model = nn.Linear(2, 1, bias=False)
    model.weight.data.fill_(value)
    return MemoryCheckpointer(model, SGD(model.parameters()), directory=place, copies=copies)


def rank(payload: bytes, answer_fd: int) -> None:
    """Tells what is refused of states that are shared in various ways."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # Warns of torch's own use of jit.

    called = order(payload)
    number, directory = called["number"], called["directory"]
    alone(number, directory)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=number, world_size=2
    )
    torch.set_num_threads(1)
    whole = stepped(lambda model: AdamW(model.parameters()))
    zero = stepped(lambda model: ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.1))
    by_hand = stepped(lambda model: AdamW(list(model.parameters())[number::2]))
    stateless = stepped(lambda model: SGD(list(model.parameters())[number::2], lr=0.1))
    for index, parameter in enumerate(stateless.model.parameters()):
        dist.broadcast(parameter.data, index % 2)
    stage = nn.Linear(2, 2 + number)
    stages = TrainingState(stage, SGD(stage.parameters()), {})
    own_statistics = stepped(lambda model: AdamW(model.parameters()))
    own_statistics.model.register_buffer("mean", torch.tensor(float(number)))
    by_experts = stepped(lambda model: AdamW(model.parameters()))
    _of(by_experts, "module.1.weight").data.add_(number)
    own_moments = stepped(lambda model: AdamW(model.parameters()))
    moments = own_moments.optimizer.state[_of(own_moments, "module.0.bias")]
    moments["exp_avg"].add_(number)
    odd = TrainingState(whole.model, whole.optimizer, {"sampler": Sampler()} if number else {})
    told = {
        name: refusal(held)
        for name, held in (
            *(("whole", whole), ("zero", zero), ("by hand", by_hand)),
            *(("stateless", stateless), ("stages", stages), ("odd", odd)),
            *(("statistics", own_statistics), ("experts", by_experts), ("moments", own_moments)),
            *(("sharded", sharded()), ("layers", pipelined(f"layer{number}"))),
            *(
                ("same names", pipelined("0")),
                ("parallel", parallel()),
                ("one rank", of_one_rank()),
            ),
        )
    }
    saver = MemoryCheckpointer(zero.model, zero.optimizer, directory=f"{directory}/{number}")
    try:
        saver.save(1)
    except ConfigError as error:
        told["save"] = str(error)
    saver.close()
    told |= others_apart(whole, number)
    told |= refused_late(Path(directory) / f"late{number}")
    told |= odd_later(whole, number, Path(directory) / f"odd{number}")
    told |= lost_keeper(whole, number, Path(directory) / f"of{number}")
    told |= back_from_two_runs(number, directory)
    told |= lost_shards(number, Path(directory) / "lost")
    told |= of_one_name(number, directory)
    dist.destroy_process_group()
    tell(answer_fd, told)


def test_what_would_not_be_whole_is_refused_by_all_ranks(
    server: ForkServer, tmp_path: Path
) -> None:
    """Parts of an optimizer whose model is not sharded, other models, stages, other values, and
    states of no known type. What is the same on all ranks is let through, whatever their buffers
    are, and so is a sharded optimizer without a state. Versions of one age but of two runs are not
    mixed."""
    told, told_by_other = told_by_ranks(server, f"{__name__}:rank", tmp_path)

    assert told == told_by_other
    assert told["whole"] == told["stateless"] == told["statistics"] == told["parallel"] == ""
    later = ("others.sampler.is", "per_rank.sampler.is")
    assert told["odd later"] == "".join(f"True {field} [1] True " for field in later)
    assert told["alike"] == told["own"] == told["scaled"] == ""
    assert "others = 'sampler': rank 1 has another state of it than rank 0" in told["apart"]
    assert told["two runs"] in ("1 [0.0, 0.0]", "1 [1.0, 1.0]")  # Whichever began last.
    unusable, lack = "no version in memory can be used: iteration", "lacks shards 1 of 2"
    two = f"{unusable} 2 {lack}; iteration 1 {lack}"
    assert told["lost shards"] == f"{two}. {unusable} 1 {lack}. 0. "
    assert told["one name"].startswith("2 nodes: ")
    assert told["one name"].count("call(") == 1
    assert told["lost keeper"] == "[True, False, False]"
    assert told["zero"] == told["save"]
    assert "parameter/weight = " in told["one rank"]
    assert "rank 1 is no part of its mesh" in told["one rank"]
    assert told["late"] == f"True {told['zero']}"
    assert "'ZeroRedundancyOptimizer': the state of the AdamW within it" in told["zero"]
    assert "optimizer = 'AdamW': rank 1 holds other parts of its state" in told["by hand"]
    assert "model = 'Linear': rank 1 holds other tensors than rank 0" in told["stages"]
    assert "others.sampler.is = 'Sampler': " in told["odd"]
    assert "model = 'parameter/module.1.weight': rank 1 holds other values" in told["experts"]
    assert "'optimizer/module.0.bias/exp_avg': rank 1 holds other values" in told["moments"]
    assert "'optimizer/weight/momentum': rank 1 holds other values than rank 0" in told["sharded"]
    assert "rank 1 has no 'parameter/layer0.bias', and rank 0 has" in told["layers"]
    assert "'parameter/0.weight from (0, 0)': rank 1 holds other values" in told["same names"]
