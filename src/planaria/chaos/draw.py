"""Draws the faults that strike a run of a job, and the run's surroundings, from a seed.

About half of the faults strike at a step of an iteration or of a recovery, the others at any
second. Some strike together. The struck nodes are drawn too, so some runs lose more nodes than a
job can. Four of five draws that would leave too few nodes are drawn again.

Some runs have bad surroundings: a temporary directory that is full, missing or unwritable; or a
pipe or terminal that nobody reads, or that closes. A terminal that closes stops the job (SIGHUP);
nothing else of these may end it.

Source: TigerBeetle draws its faults from one seed likewise.
"""

from dataclasses import dataclass, replace
from random import Random
from typing import Final

from planaria.core.inject import (
    ITERATION_STEPS,
    LOCAL_KINDS,
    NODELESS_KINDS,
    RECOVERY_STEPS,
    parse_injection,
)

FAULTS_MAX: Final = 6
_TOGETHER_SHARE: Final = 0.3  # Share of faults that strike where the fault before them does.
_DRAWS_MAX: Final = 20
_HOPELESS_SHARE: Final = 0.2
# Weights of kinds of faults, 1 if not given. A preemption notice, or the end of a coordinator, is
# over within less than a lease.
_WEIGHTS: Final = {"kill": 3, "crash": 2, "preempt": 2, "join": 2, "leader": 2}
TEMPORARIES: Final = ("full", "missing", "unwritable")
OUTPUTS: Final = ("pipe", "terminal")
_TEMPORARY_SHARE: Final = 0.1  # Share of runs with a temporary directory that cannot be used.
_OUTPUT_SHARE: Final = 0.25  # Share of runs whose output nobody reads; half of these outputs close.
# Faults after which a node is gone, or may be.
_LOSES_NODE: Final = ("kill", "preempt", "flip", "hang", "cut")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawLimits:
    """The job and machine for which faults are drawn.

    Attributes:
        num_nodes: number of nodes that the job begins with.
        num_needed: smallest number of nodes with which the job goes on.
        iterations: number of iterations of a run.
        training_s: seconds that the job trains without faults.
        kinds: kinds of faults that may be drawn.
        temporaries: bad temporary directories that can be made on this machine.
    """

    num_nodes: int
    num_needed: int
    iterations: int
    training_s: float
    lease_s: float
    kinds: tuple[str, ...] = LOCAL_KINDS
    temporaries: tuple[str, ...] = TEMPORARIES


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The bad surroundings of a run; by default nothing is bad.

    Attributes:
        temporary: fault of the temporary directory, one of TEMPORARIES; "": none.
        output: kind of output that nobody reads, one of OUTPUTS; "": somebody reads the output.
        closes_at: iteration at whose commit that output closes; -1: it does not close.
    """

    temporary: str = ""
    output: str = ""
    closes_at: int = -1

    @property
    def words(self) -> tuple[str, ...]:
        """The surroundings in words for a person."""
        how = "blocked" if self.closes_at < 0 else f"closed@{self.closes_at}"
        temporary = (f"temporary={self.temporary}",) if self.temporary else ()
        return temporary + ((f"{self.output}={how}",) if self.output else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The faults and the surroundings of a run.

    Attributes:
        specs: faults, as --inject takes them.
        num_joins: number of nodes that are to join.
        persist_every: iterations between saves to disk; 0: only the last save.
    """

    specs: tuple[str, ...]
    num_joins: int
    persist_every: int
    surroundings: Surroundings = Surroundings()

    @property
    def words(self) -> tuple[str, ...]:
        """The faults and surroundings in words for a person."""
        return self.specs + self.surroundings.words


def draw_run(limits: DrawLimits, rng: Random) -> Draw:
    """The faults of a run, and its surroundings."""
    return replace(_draw_survivable(limits, rng), surroundings=_draw_surroundings(limits, rng))


def _draw_surroundings(limits: DrawLimits, rng: Random) -> Surroundings:
    has_temporary = rng.random() < _TEMPORARY_SHARE and bool(limits.temporaries)
    temporary = rng.choice(limits.temporaries) if has_temporary else ""
    if rng.random() >= _OUTPUT_SHARE:
        return Surroundings(temporary=temporary)
    closes_at = rng.choice((-1, rng.randrange(limits.iterations)))
    return Surroundings(temporary=temporary, output=rng.choice(OUTPUTS), closes_at=closes_at)


def _draw_survivable(limits: DrawLimits, rng: Random) -> Draw:
    draw = _draw_faults(limits, rng)
    for _ in range(_DRAWS_MAX):
        num_left = limits.num_nodes - _num_lost(draw)
        if num_left >= limits.num_needed or rng.random() < _HOPELESS_SHARE:
            break
        draw = _draw_faults(limits, rng)
    if limits.num_nodes - _num_lost(draw) >= 2 * limits.num_needed:
        return draw
    # With so few nodes a flipped bit may have no holder left to be compared with.
    specs = tuple(spec for spec in draw.specs if not spec.startswith("flip"))
    return replace(draw, specs=specs or ("kill:0@0",))


def _draw_faults(limits: DrawLimits, rng: Random) -> Draw:
    num_faults = min(rng.randint(1, FAULTS_MAX), rng.randint(1, FAULTS_MAX))
    weights = [_WEIGHTS.get(kind, 1) for kind in limits.kinds]
    # A flipped bit is found by a majority of holders, which two flips at once may not leave.
    kinds = list(dict.fromkeys(rng.choices(limits.kinds, weights, k=1)))
    while len(kinds) < num_faults:
        (kind,) = rng.choices(limits.kinds, weights)
        if kind != "flip" or "flip" not in kinds:
            kinds.append(kind)
    joins = [rng.randint(1, 2) if kind == "join" else 0 for kind in kinds]
    num_nodes = limits.num_nodes + sum(joins)
    specs: list[str] = []
    place = ""
    for kind, num_joining in zip(kinds, joins, strict=True):
        if not place or rng.random() >= _TOGETHER_SHARE:
            place = _place(limits, rng, is_first=not specs)
        value = _value(kind, limits, rng)
        nodes = str(num_joining) if num_joining else _nodes(kind, num_nodes, rng)
        where = str(rng.randrange(limits.iterations)) if kind in ("flip", "slow") else place
        specs.append(f"{kind}{value}:{nodes}@{where}")
    persist_every = rng.choice((0, 0, 1, max(1, limits.iterations // 3)))
    return Draw(specs=tuple(specs), num_joins=sum(joins), persist_every=persist_every)


def _place(limits: DrawLimits, rng: Random, *, is_first: bool) -> str:
    if rng.random() < 0.5:
        return f"~{rng.uniform(0.0, 1.2 * limits.training_s):.2f}"
    if not is_first and rng.random() < 0.4:
        return f"{rng.randrange(limits.iterations) // 2}.{rng.choice(RECOVERY_STEPS)}"
    return f"{rng.randrange(limits.iterations)}.{rng.choice(ITERATION_STEPS)}"


def _value(kind: str, limits: DrawLimits, rng: Random) -> str:
    """The value of a fault: a duration below or above the lease, none (for ever), or an amount."""
    match kind:
        case "hang" | "cut":
            short_s, long_s = rng.uniform(0.1, 0.6), rng.uniform(1.3, 2.5)
            return rng.choice(
                ("", f"={short_s * limits.lease_s:.2f}", f"={long_s * limits.lease_s:.2f}")
            )
        case "preempt":
            return rng.choice((f"={rng.uniform(0.05, 0.5):.2f}", f"={rng.uniform(1.0, 5.0):.2f}"))
        case "slow":
            return f"={rng.uniform(2.0, 5.0):.1f}"
        case "store":
            return f"={rng.uniform(0.02, 0.5):.2f}"
        case "disk":
            return f"={rng.uniform(0.3, 3.0) * limits.lease_s:.2f}"
        case "refuse":  # The last save tries again every 2 s, for nearly checkpoint.timeout_s.
            return f"={rng.uniform(0.2, 5.0):.2f}"
    return ""


def _nodes(kind: str, num_nodes: int, rng: Random) -> str:
    if kind in NODELESS_KINDS:
        return ""
    count = 1 if kind == "flip" else rng.choice((1, 1, 1, 1, 2, 2, 3))
    return ",".join(map(str, sorted(rng.sample(range(num_nodes), min(count, num_nodes)))))


def _num_lost(draw: Draw) -> int:
    """The number of nodes that may be gone in the end; nodes that join may come too late."""
    injections = [parse_injection(spec) for spec in draw.specs]
    return len({n for i in injections if i.kind in _LOSES_NODE for n in i.nodes})
