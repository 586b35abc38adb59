"""The probe of a worker, and the faults that it injects into the worker when it calls for them."""

import logging
from collections.abc import Callable, Mapping

import torch

from planaria.checkpoint.disk.gate import Gate
from planaria.core.samples import mix
from planaria.core.specs import NodeSpec
from planaria.engine.stage import RankStage
from planaria.transport.credentials import credentials_of
from planaria.transport.frames import PROBES, derive
from planaria.transport.links import Links
from planaria.transport.probe import Cut, Probe
from planaria.transport.timekeeping import Timekeeper

logger = logging.getLogger(__name__)


def flip_bit(stage: RankStage, *, rank: int, iteration: int) -> None:
    """Flips one bit of a parameter that the rank holds; rank and iteration determine which one."""
    random_bits = mix(rank, iteration)
    sizes = {
        layer: sum(tensor.nbytes for tensor in held.masters.values())
        for layer, held in sorted(stage.layers.items())
    }
    layers = [stage.layers[layer] for layer, num_bytes in sizes.items() if num_bytes]
    if not layers:
        return
    held = layers[random_bits % len(layers)]
    bit = random_bits // len(layers) % (8 * sizes[held.layer])
    for name, master in held.masters.items():
        if bit < 8 * master.nbytes:
            flat = master.data.view(-1).view(torch.uint8)
            flat[bit // 8] ^= 1 << bit % 8
            logger.info("rank %s: a bit of %s in layer %s is flipped", rank, name, held.layer)
            return
        bit -= 8 * master.nbytes


class Slowness:
    """Makes a worker slow: it sleeps after each computation for the time a slow one would add.

    If a sleep takes too long, the next one is shorter by the excess.
    """

    def __init__(self, timekeeper: Timekeeper) -> None:
        self._timekeeper = timekeeper
        self._factor = 1.0
        self._owed_s = 0.0

    def begin(self, iteration: int, factor: float) -> None:
        """Makes all computation take `factor` times as long from now on; 1 ends the slowness."""
        logger.info("iteration %s: from now on all takes %s times as long", iteration, factor)
        self._factor, self._owed_s = factor, 0.0

    @property
    def is_slow(self) -> bool:
        """Whether it sleeps."""
        return self._factor != 1.0

    def on_computed(self, seconds: float) -> None:
        """Sleeps for the time that a slow worker would need beyond the seconds computed."""
        self._owed_s += (self._factor - 1.0) * seconds
        if self._owed_s > 0.0:
            start_s = self._timekeeper.now_s()
            self._timekeeper.sleep(self._owed_s)
            self._owed_s -= self._timekeeper.now_s() - start_s


def faults_by_kind(
    slowness: Slowness, stage: Callable[[], RankStage], *, rank: int
) -> Mapping[str, Callable[[int, float], None]]:
    """The function that injects each kind of fault, given the iteration and the fault's value.

    Args:
        stage: returns the stage that the rank holds at that time.
    """
    return {
        "flip": lambda iteration, _: flip_bit(stage(), rank=rank, iteration=iteration),
        "slow": slowness.begin,
    }


def probe_of(
    spec: NodeSpec,
    links: Links,
    gate: Gate,
    *,
    faults: Mapping[str, Callable[[int, float], None]],
) -> Probe:
    """The probe of a worker (transport/probe.py); it listens if the spec says so.

    Args:
        links: links that are cut where the worker is to be cut off.
        gate: gate before the place of saves, which is to be slow or to refuse.
        faults: see `faults_by_kind`.
    """
    probe = Probe(
        spec.node,
        places=spec.places,
        address=spec.injector,
        token=derive(spec.token, PROBES),
        credentials=credentials_of(spec.credentials),
        faults=faults,
    )
    if spec.heeds:
        cut = _cutter(links, devices_per_node=spec.job.cluster.devices_per_node)
        probe.listen(cut=cut, slow={"store": gate.slow, "refuse": gate.refuse})
    return probe


def _cutter(links: Links, *, devices_per_node: int) -> Callable[[Cut, float], None]:
    """The function that cuts this rank off, until `end_s`, from all nodes not in `cut.nodes`."""

    def cut_links(cut: Cut, end_s: float) -> None:
        links.cuts.add(lambda rank: rank // devices_per_node not in cut.nodes, end_s=end_s)

    return cut_links
