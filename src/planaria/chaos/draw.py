"""Draws what is to strike a job: several faults of all kinds, from a seed, and what surrounds it.

Half of the faults strike at a step of an iteration or of a recovery, half at any second. Some
strike together. Which nodes they strike is drawn too, so some runs lose more than a job can: four
of five draws that would leave too few nodes are drawn again.

Some runs have surroundings that are of no use: a temporary directory that is full, missing or not
to be written to; a pipe or terminal that nobody reads, or that closes. A terminal that closes stops
the job (SIGHUP); all else is no reason to end.

Source: DESIGN 7 (SPEC); TigerBeetle draws its faults from one seed likewise.
"""

from dataclasses import dataclass, replace
from random import Random
from typing import Final

from planaria.core.inject import AROUND, ITERATION_STEPS, KINDS, RECOVERY_STEPS, parse_injection

FAULTS_MAX: Final = 6
_TOGETHER: Final = 0.3  # Of the faults strike where the one before them does.
_DRAWS_MAX: Final = 20
_HOPELESS_KEPT: Final = 0.2
# How often a kind is drawn; a notice or a coordinator's end is over sooner than a lease.
_WEIGHTS: Final = {"kill": 3, "crash": 2, "preempt": 2, "join": 2, "leader": 2}
TEMPORARIES: Final = ("full", "missing", "unwritable")
OUTPUTS: Final = ("pipe", "terminal")
_TEMPORARY: Final = 0.1  # Of the runs have one of no use.
_OUTPUT: Final = 0.25  # Of the runs print to one that nobody reads, half of which close.
# After which of these a node is gone, and after which maybe.
_LASTING: Final = ("kill", "preempt", "flip", "hang", "cut")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What the faults are drawn for.

    Attributes:
        num_needed: nodes without which the job ends.
        training_s: how long the job trains in peace.
        kinds: that may be drawn.
        temporaries: what may be wrong with the temporary directory on this machine.
    """

    num_nodes: int
    num_needed: int
    iterations: int
    training_s: float
    lease_s: float
    kinds: tuple[str, ...] = KINDS
    temporaries: tuple[str, ...] = TEMPORARIES


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What stands around a run, if it is not as it should be.

    Attributes:
        temporary: what is wrong with the temporary directory, one of TEMPORARIES; "" if nothing.
        output: to what the run prints that nobody reads, one of OUTPUTS; "" if somebody does.
        closes_at: that is closed when this iteration is committed; -1: it is not.
    """

    temporary: str = ""
    output: str = ""
    closes_at: int = -1

    @property
    def words(self) -> tuple[str, ...]:
        """As a person reads them."""
        how = "blocked" if self.closes_at < 0 else f"closed@{self.closes_at}"
        temporary = (f"temporary={self.temporary}",) if self.temporary else ()
        return temporary + ((f"{self.output}={how}",) if self.output else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A run's faults, as --inject takes them, and what surrounds it.

    Attributes:
        num_joins: nodes that are to join.
        persist_every: iterations between saves to disk; 0: at the end only.
    """

    specs: tuple[str, ...]
    num_joins: int
    persist_every: int
    surroundings: Surroundings = Surroundings()

    @property
    def words(self) -> tuple[str, ...]:
        """All of it, as a person reads it."""
        return self.specs + self.surroundings.words


def drawn(world: World, rng: Random) -> Draw:
    """The faults of a run, and its surroundings."""
    return replace(_faults(world, rng), surroundings=_surroundings(world, rng))


def _surroundings(world: World, rng: Random) -> Surroundings:
    has_temporary = rng.random() < _TEMPORARY and bool(world.temporaries)
    temporary = rng.choice(world.temporaries) if has_temporary else ""
    if rng.random() >= _OUTPUT:
        return Surroundings(temporary=temporary)
    closes_at = rng.choice((-1, rng.randrange(world.iterations)))
    return Surroundings(temporary=temporary, output=rng.choice(OUTPUTS), closes_at=closes_at)


def _faults(world: World, rng: Random) -> Draw:
    draw = _drawn(world, rng)
    for _ in range(_DRAWS_MAX):
        num_left = world.num_nodes - _num_lost(draw)
        if num_left >= world.num_needed or rng.random() < _HOPELESS_KEPT:
            break
        draw = _drawn(world, rng)
    if world.num_nodes - _num_lost(draw) >= 2 * world.num_needed:
        return draw
    # Nothing would be left to compare a flipped bit with.
    specs = tuple(spec for spec in draw.specs if not spec.startswith("flip"))
    return replace(draw, specs=specs or ("kill:0@0",))


def _drawn(world: World, rng: Random) -> Draw:
    num_faults = min(rng.randint(1, FAULTS_MAX), rng.randint(1, FAULTS_MAX))
    weights = [_WEIGHTS.get(kind, 1) for kind in world.kinds]
    # A flip is found by comparing what is right with it: two at once have no majority.
    kinds = list(dict.fromkeys(rng.choices(world.kinds, weights, k=1)))
    while len(kinds) < num_faults:
        (kind,) = rng.choices(world.kinds, weights)
        if kind != "flip" or "flip" not in kinds:
            kinds.append(kind)
    joins = [rng.randint(1, 2) if kind == "join" else 0 for kind in kinds]
    num_nodes = world.num_nodes + sum(joins)
    specs: list[str] = []
    place = ""
    for kind, num_joining in zip(kinds, joins, strict=True):
        if not place or rng.random() >= _TOGETHER:
            place = _place(world, rng, is_first=not specs)
        value = _value(kind, world, rng)
        nodes = str(num_joining) if num_joining else _nodes(kind, num_nodes, rng)
        where = str(rng.randrange(world.iterations)) if kind in ("flip", "slow") else place
        specs.append(f"{kind}{value}:{nodes}@{where}")
    persist_every = rng.choice((0, 0, 1, max(1, world.iterations // 3)))
    return Draw(specs=tuple(specs), num_joins=sum(joins), persist_every=persist_every)


def _place(world: World, rng: Random, *, is_first: bool) -> str:
    if rng.random() < 0.5:
        return f"~{rng.uniform(0.0, 1.2 * world.training_s):.2f}"
    if not is_first and rng.random() < 0.4:
        return f"{rng.randrange(world.iterations) // 2}.{rng.choice(RECOVERY_STEPS)}"
    return f"{rng.randrange(world.iterations)}.{rng.choice(ITERATION_STEPS)}"


def _value(kind: str, world: World, rng: Random) -> str:
    """How long or how much: less than the lease, more than it, or for ever."""
    match kind:
        case "hang" | "cut":
            short_s, long_s = rng.uniform(0.1, 0.6), rng.uniform(1.3, 2.5)
            return rng.choice(
                ("", f"={short_s * world.lease_s:.2f}", f"={long_s * world.lease_s:.2f}")
            )
        case "preempt":
            return rng.choice((f"={rng.uniform(0.05, 0.5):.2f}", f"={rng.uniform(1.0, 5.0):.2f}"))
        case "slow":
            return f"={rng.uniform(2.0, 5.0):.1f}"
        case "store":
            return f"={rng.uniform(0.02, 0.5):.2f}"
        case "disk":
            return f"={rng.uniform(0.3, 3.0) * world.lease_s:.2f}"
    return ""


def _nodes(kind: str, num_nodes: int, rng: Random) -> str:
    if kind in AROUND:
        return ""
    count = 1 if kind == "flip" else rng.choice((1, 1, 1, 1, 2, 2, 3))
    return ",".join(map(str, sorted(rng.sample(range(num_nodes), min(count, num_nodes)))))


def _num_lost(draw: Draw) -> int:
    """Nodes that may be gone in the end; who joins may come too late."""
    injections = [parse_injection(spec) for spec in draw.specs]
    return len({n for i in injections if i.kind in _LASTING for n in i.nodes})
