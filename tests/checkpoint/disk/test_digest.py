"""The digests that two runs are compared by: they see every bit that counts and nothing else."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from planaria.checkpoint.disk.tiers import Manifest, tier_of
from planaria.job.report import digests

Tensors = dict[str, np.ndarray]

# Layer 1 uses a parameter of layer 0 again under another name; names are in the model's order.
PARAMETERS = (("weight", "bias"), ("own",))


def layers() -> list[Tensors]:
    """Two layers with AdamW-like state, the tied parameter in both."""
    rng = np.random.default_rng(5)

    def of(name: str, *shape: int) -> Tensors:
        return {
            f"parameter/{name}": rng.standard_normal(shape).astype(np.float32),
            f"optimizer/{name}/step": np.array(7, dtype=np.int64),
            f"optimizer/{name}/exp_avg": rng.standard_normal(shape).astype(np.float32),
        }

    first = {**of("weight", 2, 3), **of("bias", 3)}
    tied = {path.replace("weight", "tied"): array for path, array in of("weight", 2, 3).items()}
    return [first, {**of("own", 4), **tied}]


def digests_of(directory: Path, tensors: list[Tensors], **manifest: int) -> tuple[str, str]:
    """The digests of a checkpoint with these layers."""
    tier = tier_of(str(directory))
    where = {"iteration": 1, "epoch": 0} | manifest
    files = tuple(
        tier.write_layer(where["iteration"], where["epoch"], layer, tensors[layer])
        for layer in range(len(tensors))
    )
    made = Manifest(**where, job={}, layers=files)
    tier.publish(made)
    return digests(tier, made, parameters=PARAMETERS)


def test_the_digests_are_those_of_the_documented_order(tmp_path: Path) -> None:
    """Layers in order, parameters as the model names them, state by sorted name, tied ones once."""
    first, last = layers()
    parameters = [first["parameter/weight"], first["parameter/bias"], last["parameter/own"]]
    state = [
        tensors[f"optimizer/{name}/{key}"]
        for tensors, name in ((first, "weight"), (first, "bias"), (last, "own"))
        for key in ("exp_avg", "step")
    ]

    expected = tuple(
        hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
        for arrays in (parameters, state)
    )
    assert expected == digests_of(tmp_path, [first, last])


def _changed(tensors: list[Tensors], layer: int, path: str) -> list[Tensors]:
    """The same with the lowest bit of one number flipped."""
    copy: list[Tensors] = [dict(each) for each in tensors]
    array = copy[layer][path].copy()
    array.reshape(-1).view(np.uint8)[0] ^= 1
    copy[layer][path] = array
    return copy


def test_one_bit_changes_the_digest_that_it_belongs_to(tmp_path: Path) -> None:
    """And not the other; later uses of a tied parameter are not counted again."""
    whole = layers()
    parameters, state = digests_of(tmp_path / "whole", whole)
    seen: Mapping[tuple[int, str], tuple[bool, bool]] = {
        (0, "parameter/weight"): (True, False),
        (1, "parameter/own"): (True, False),
        (0, "optimizer/bias/exp_avg"): (False, True),
        (1, "optimizer/own/step"): (False, True),
        (1, "parameter/tied"): (False, False),
        (1, "optimizer/tied/exp_avg"): (False, False),
    }
    for index, ((layer, path), changes) in enumerate(seen.items()):
        changed = digests_of(tmp_path / str(index), _changed(whole, layer, path))

        assert (changed[0] != parameters, changed[1] != state) == changes, path


def test_the_digests_do_not_depend_on_when_and_how_it_was_saved(tmp_path: Path) -> None:
    """Neither iteration nor epoch nor the order of tensors in a file counts."""
    reordered = [dict(reversed(tensors.items())) for tensors in layers()]

    early = digests_of(tmp_path / "a", layers())
    late = digests_of(tmp_path / "b", reordered, iteration=9, epoch=4)
    assert early == late


def test_a_layer_without_parameters_adds_nothing(tmp_path: Path) -> None:
    """An activation of the user's may be a layer of its own."""
    first, last = layers()
    tier = tier_of(str(tmp_path / "b"))
    files = tuple(
        tier.write_layer(1, 0, layer, tensors) for layer, tensors in enumerate((first, {}, last))
    )
    manifest = Manifest(iteration=1, epoch=0, job={}, layers=files)
    tier.publish(manifest)
    spread = digests(tier, manifest, parameters=(PARAMETERS[0], (), PARAMETERS[1]))

    assert spread == digests_of(tmp_path / "a", [first, last])
