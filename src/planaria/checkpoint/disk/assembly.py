"""Makes a save of the parts that nodes without a head have written (parts.py).

Only the newest run counts, and only the members of its newest epoch. Of their layers those of one
age are taken, the highest of which all layers exist as they were written. Layers of two ages never
meet, nor do files that differ though they are of one layer and age.

Source: docs/protocol.md, "Nodes without a head".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from planaria.checkpoint.disk.parts import (
    RankPart,
    RunContents,
    RunPlace,
    layer_file_name,
    newest_run,
)
from planaria.checkpoint.disk.tiers import Manifest, Tier
from planaria.core.messages import LayerFile
from planaria.errors import CheckpointError, UnreadableError

_NAMED_MAX: Final = 8  # Number of layers that a text names.

Files = Mapping[int, Sequence[LayerFile]]


@dataclass(frozen=True, slots=True)
class Assembly:
    """What became of the parts.

    Attributes:
        manifest: save that was made of them; None: none was.
        text: account of what was made, or of why nothing was; "": there are no parts.
    """

    manifest: Manifest | None = None
    text: str = ""


def has_parts(tier: Tier) -> bool:
    """Whether nodes of the newest run have written parts.

    Raises:
        CheckpointError: the storage refuses.
    """
    name = newest_run(tier.storage)
    return bool(name and RunPlace(tier.storage, name).contents().parts)


def assemble(tier: Tier, *, newer_than: int) -> Assembly:
    """Makes a save of the parts of the newest run, and publishes it.

    It reads all layers once and writes them once, one after the other.

    Args:
        newer_than: age of the newest save that there is; -1: there is none.

    Raises:
        CheckpointError: the storage refuses; an UnreadableError if the parts may prove complete
            another time.
    """
    name = newest_run(tier.storage)
    if not name:
        return Assembly()
    run = RunPlace(tier.storage, name)
    contents = run.contents()
    if not contents.answers and not contents.parts:
        return Assembly()
    reasons = [f"{name} is damaged" for name in contents.damage]
    epoch, parts, reason = member_parts(contents)
    if reason or contents.mark is None:
        return Assembly(text=_refusal(run, [*reasons, reason or "it has no mark of its head"]))
    ages = sorted({layer.age for part in parts for layer in part.layers}, reverse=True)
    for age in ages:
        if age <= newer_than:
            break
        files, reason = complete_files(parts, age=age)
        layers: tuple[LayerFile, ...] = ()
        if tier.is_published(age, epoch):  # It is damaged, or it would be the newest save.
            epoch = tier.next_epoch()
        if not reason:
            layers, reason = _copy_layers(run, tier, files, age=age, epoch=epoch)
        if reason:
            reasons.append(f"iteration {age}: {reason}")
            continue
        manifest = Manifest(iteration=age, epoch=epoch, job=contents.mark.job, layers=layers)
        tier.publish(manifest)
        ranks = ", ".join(str(part.rank) for part in parts)
        text = f"made a save of iteration {age} of what ranks {ranks} saved by themselves"
        return Assembly(manifest, text)
    if not reasons and ages:  # There is a save that is as new.
        return Assembly()
    return Assembly(text=_refusal(run, reasons or ["no layer was saved there"]))


def member_parts(contents: RunContents) -> tuple[int, tuple[RankPart, ...], str]:
    """The newest epoch, and the parts of its members.

    A member may have left an older epoch: it has not heard of the newest one, so that nobody has
    trained in that. Its state is as it was when it left (docs/protocol.md, R2).

    Returns:
        The epoch, the parts, and why they cannot be used; "": they can.
    """
    epochs = [answer.epoch for answer in contents.answers]
    epochs += [part.epoch for part in contents.parts]
    mark = contents.mark
    if mark is not None and mark.epoch >= max(epochs):
        epoch = mark.epoch
        parts = [part for part in contents.parts if part.node in mark.nodes]
    else:  # The mark did not come in time.
        epoch = max(epochs)
        parts = [part for part in contents.parts if part.epoch == epoch]
    since = max((part.since for part in parts), default=-1)
    parts = [part for part in parts if part.since == since]
    others = sorted({part.node for part in contents.parts} - {part.node for part in parts})
    reason = ""
    if not parts and others:
        those = ", ".join(map(str, others))
        reason = f"epoch {epoch} began without nodes {those}, whose parts are there"
    elif not parts:
        reason = "no node has completed its part"
    return epoch, tuple(parts), reason


def lacks_parts(contents: RunContents, *, devices_per_node: int) -> bool:
    """Whether parts are missing that ranks may still be writing and that make a newer save."""
    if not contents.answers and not contents.parts:
        return False
    if has_newest_state(contents):
        return False
    nodes = contents.mark.nodes if contents.mark else ()
    ranks = {
        node * devices_per_node + device for node in nodes for device in range(devices_per_node)
    }
    ranks |= {answer.rank for answer in contents.answers}
    return not ranks <= {part.rank for part in contents.parts}


def has_newest_state(contents: RunContents) -> bool:
    """Whether all layers exist at the age to which the newest vector brings all ranks."""
    if not contents.parts:
        return False
    _, parts, _ = member_parts(contents)
    ages = [layer.age for part in parts for layer in part.layers]
    ages += [answer.vector_iteration + 1 for answer in contents.answers]
    return bool(parts) and not complete_files(parts, age=max(ages))[1]


def complete_files(parts: Sequence[RankPart], *, age: int) -> tuple[Files, str]:
    """The files of each layer at an age, and why they are no whole state; "": they are."""
    files: dict[int, list[LayerFile]] = {}
    for part in parts:
        for layer in part.layers:
            name = layer_file_name(layer.file.layer, age=layer.age, rank=part.rank)
            if layer.age == age and layer.file.file == name:  # Another name may lead elsewhere.
                files.setdefault(layer.file.layer, []).append(layer.file)
    missing = [n for n in range(max(part.num_layers for part in parts)) if n not in files]
    if missing:
        named = ", ".join(map(str, missing[:_NAMED_MAX]))
        more = f" and {len(missing) - _NAMED_MAX} more" if len(missing) > _NAMED_MAX else ""
        return files, f"nobody saved layers {named}{more}"
    for number, copies in files.items():
        if len({copy.xxh3_128 for copy in copies}) > 1:
            return files, f"the holders of layer {number} saved different parameters"
    return files, ""


def _copy_layers(
    run: RunPlace, tier: Tier, files: Files, *, age: int, epoch: int
) -> tuple[tuple[LayerFile, ...], str]:
    """Copies each layer to the version, from the first file that is as it was written.

    Returns:
        The layers of the version, and why one could not be copied; "": all were.
    """
    copied: list[LayerFile] = []
    for layer in sorted(files):
        tensors, reason = _first_readable(run, files[layer])
        if tensors is None:
            tier.discard(age, epoch)
            return (), reason
        copied.append(tier.write_layer(age, epoch, layer, tensors))
    return tuple(copied), ""


def _first_readable(
    run: RunPlace, files: Sequence[LayerFile]
) -> tuple[dict[str, np.ndarray] | None, str]:
    """The tensors of the first file that is as it was written, or why there is none."""
    reason = ""
    for file in files:
        try:
            return run.read_layer(file), ""
        except UnreadableError:
            raise
        except CheckpointError as error:
            reason = str(error)
    return None, reason


def _refusal(run: RunPlace, reasons: Sequence[str]) -> str:
    return f"what nodes saved by themselves in {run.where} is not used: {'; '.join(reasons)}"
