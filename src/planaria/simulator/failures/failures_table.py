"""The table `[failures]` of a scenario, and the source of failures that it describes.

`FailuresConfig` holds the keys with their defaults; docs/FAILURES.md lists them. `failure_source`
checks that they fit each other and the cluster, and builds the source. What the table asks for
besides its `kind` (whole failure domains, slow spells, maintenance) is merged with it, each with
random numbers of its own: a sweep over one of them leaves the others as they were. Notices are
given of all losses but those of maintenance, which has its own.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

from planaria.errors import ConfigError
from planaria.simulator.failures.occurrences import FailureSource, MergedSource
from planaria.simulator.failures.planned_losses import (
    EC2_NOTICE_S,
    GCP_NOTICE_S,
    Maintenance,
    NoticedSource,
)
from planaria.simulator.failures.presets import PRESETS, preset_losses
from planaria.simulator.failures.random_losses import (
    BURST_NODES,
    WEIBULL_SHAPE,
    DomainLosses,
    Domains,
    Lemons,
    PoissonLosses,
    WeibullLosses,
)
from planaria.simulator.failures.recorded_trace import TraceSource, Window
from planaria.simulator.failures.repair_times import NEVER, RepairTime, TimeShape
from planaria.simulator.failures.slow_spells import HIGHEST_SPEED, SlowSpells
from planaria.simulator.failures.spot_prices import PriceLosses, SpotPrices
from planaria.simulator.failures.trace_files import trace_at

_REPAIR_S: Final = 600.0
_RATE_MAX: Final = 3600.0
_WEIBULL_SHAPE_MIN: Final = 0.1  # A mean of far less has too many digits for a float.


def _key(default: Any, about: str) -> Any:
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True, slots=True, kw_only=True)
class FailuresConfig:
    """The keys of `[failures]`; each field's metadata has the sentence that documents it."""

    kind: Literal["poisson", "weibull", "bursts", "preset", "trace", "prices"] = _key(
        "poisson",
        "poisson: losses of single nodes at a constant rate; weibull: at a rate that depends on "
        "the node's age; bursts: losses of several nodes at once; preset: a published rate; trace: "
        "a recorded trace; prices: nodes of a zone are lost while its price is above their bid",
    )
    per_node_hour: float = _key(
        0.0,
        "poisson, weibull, bursts: losses per hour of a node that is there, 0: none; preset: this "
        "rate instead of the published one",
    )
    repair: Literal["exponential", "fixed", "lognormal", "never"] = _key(
        "exponential",
        "how long lost nodes are away; lognormal: most are back soon and a few very late, as in "
        "InfiniteHBD's trace; never: none comes back",
    )
    repair_s: float = _key(
        0.0, f"mean seconds that a lost node is away; 0: as in the preset, else {_REPAIR_S:g}"
    )
    notice_s: float = _key(
        0.0,
        f"seconds before a loss at which its nodes are told; EC2 gives {EC2_NOTICE_S:g} and Google "
        f"Cloud {GCP_NOTICE_S:g}; 0: none",
    )
    preset: str = _key("", f"preset: one of {', '.join(PRESETS)}")
    path: str = _key("", "trace: a file, or the name of a shipped trace")
    window: Literal["drawn", "start"] = _key(
        "drawn",
        "trace: the part that is replayed; drawn: each seed draws a time to begin at and the "
        "places of the nodes; start: the trace from its start, the same for all seeds",
    )
    trace_nodes: int = _key(
        0, "trace: number of machines that were recorded, where the file does not name all; 0: all"
    )
    weibull_shape: float = _key(
        WEIBULL_SHAPE, "weibull: shape; below 1 nodes that just came back fail more often"
    )
    burst_nodes: float = _key(
        round(BURST_NODES, 2), "bursts: mean number of nodes that are lost at once"
    )
    domains: tuple[tuple[int, ...], ...] = _key(
        (), "nodes that may fail together, such as [[0, 1], [2, 3]]; a burst stays in one domain"
    )
    domain_nodes: int = _key(
        0, "number of nodes in a domain, instead of domains: nodes 0, 1, ... are the first one"
    )
    per_domain_hour: float = _key(
        0.0, "losses of all nodes of a domain at once, per hour of a domain; besides kind"
    )
    lemon_nodes: float = _key(
        0.0, "poisson, bursts: share of the nodes that fail more often than others; 0: none"
    )
    lemon_losses: float = _key(0.41, "poisson, bursts: share of the losses that those nodes have")
    slow_per_node_hour: float = _key(
        0.0, "spells in which a node is slow, per hour of a fast node; besides kind"
    )
    slow_s: float = _key(1800.0, "mean seconds of such a spell; most are short and a few very long")
    slow_speed: float = _key(
        0.3,
        "speed of a node in the worst spell, as a share of the normal one; in the mildest it is "
        f"{HIGHEST_SPEED}",
    )
    maintenance_every_s: float = _key(
        0.0, "seconds in which every node is taken out once, one after the other; 0: none is"
    )
    maintenance_s: float = _key(3600.0, "seconds that a node is away then")
    maintenance_notice_s: float = _key(600.0, "seconds before that at which the node is told")
    maintenance_nodes: int = _key(1, "number of nodes that are taken out at once")
    bid: float = _key(1.5, "prices: bid as a multiple of the median price")
    price_sigma: float = _key(0.35, "prices: standard deviation of the logarithm of the price")
    zones: int = _key(3, "prices: number of zones, each with a price of its own")


# Keys that mean something for these kinds only.
_KINDS: Final = {
    "per_node_hour": ("poisson", "weibull", "bursts", "preset"),
    "repair": ("poisson", "weibull", "bursts", "preset"),
    "repair_s": ("poisson", "weibull", "bursts", "preset"),
    "preset": ("preset",),
    "path": ("trace",),
    "window": ("trace",),
    "trace_nodes": ("trace",),
    "weibull_shape": ("weibull",),
    "burst_nodes": ("bursts",),
    "lemon_nodes": ("poisson", "bursts"),
    "lemon_losses": ("poisson", "bursts"),
    "bid": ("prices",),
    "price_sigma": ("prices",),
    "zones": ("prices",),
}
_POSITIVE: Final = (
    *("weibull_shape", "slow_s", "slow_speed", "maintenance_s", "maintenance_nodes"),
    *("bid", "price_sigma", "zones"),
)
_SHARES: Final = ("lemon_nodes", "lemon_losses")


def failure_source(
    config: FailuresConfig, *, num_nodes: int, devices_per_node: int, directory: Path
) -> FailureSource:
    """The source that the table describes, for a cluster of so many nodes.

    Args:
        directory: directory to which `path` is relative.

    Raises:
        ConfigError: a value is wrong, or does not fit the others or the cluster; or a trace cannot
            be read.
    """
    _check(config, num_nodes)
    domains = _domains(config, num_nodes)
    losses: FailureSource = MergedSource(
        (
            _source(
                config,
                domains,
                num_nodes=num_nodes,
                devices_per_node=devices_per_node,
                directory=directory,
            ),
            DomainLosses(domains, config.per_domain_hour, _repair(config)),
        )
    )
    # What is not asked for is there as well, at a rate of 0: so it changes no seed of the others.
    return MergedSource(
        (
            NoticedSource(losses, config.notice_s) if config.notice_s else losses,
            SlowSpells(
                config.slow_per_node_hour,
                RepairTime(config.slow_s, TimeShape.LOGNORMAL),
                config.slow_speed,
            ),
            Maintenance(
                config.maintenance_every_s,
                config.maintenance_s,
                config.maintenance_notice_s,
                config.maintenance_nodes,
            ),
        )
    )


def _source(
    config: FailuresConfig,
    domains: Domains,
    *,
    num_nodes: int,
    devices_per_node: int,
    directory: Path,
) -> FailureSource:
    """The source of the table's kind alone."""
    match config.kind:
        case "poisson" | "bursts":
            lemons = Lemons(config.lemon_nodes, config.lemon_losses)
            return PoissonLosses(
                config.per_node_hour,
                _repair(config),
                burst_nodes=config.burst_nodes if config.kind == "bursts" else 1.0,
                domains=domains if config.kind == "bursts" else (),
                lemons=lemons if config.lemon_nodes else None,
            )
        case "weibull":
            return WeibullLosses(config.per_node_hour, _repair(config), config.weibull_shape)
        case "preset":
            has_repair = config.repair_s or config.repair == "never"
            return preset_losses(
                config.preset,
                devices_per_node=devices_per_node,
                per_node_hour=config.per_node_hour,
                repair=_repair(config) if has_repair else None,
            )
        case "trace":
            trace = trace_at(directory, config.path, num_machines=config.trace_nodes)
            source = TraceSource(trace, Window(config.window))
            source.check_places(num_nodes)
            return source
        case "prices":
            prices = SpotPrices(sigma=config.price_sigma, num_zones=config.zones)
            return PriceLosses(prices, config.bid)


def _repair(config: FailuresConfig) -> RepairTime:
    if config.repair == "never":
        return NEVER
    return RepairTime(config.repair_s or _REPAIR_S, TimeShape(config.repair))


def _domains(config: FailuresConfig, num_nodes: int) -> Domains:
    if not config.domain_nodes:
        return config.domains
    size = config.domain_nodes
    return tuple(
        tuple(range(first, min(first + size, num_nodes))) for first in range(0, num_nodes, size)
    )


def _check(config: FailuresConfig, num_nodes: int) -> None:
    unset = FailuresConfig()
    for key in fields(config):
        value = getattr(config, key.name)
        kinds = _KINDS.get(key.name)
        is_for_domains = key.name.startswith("repair") and config.per_domain_hour > 0
        has_meaning = not kinds or config.kind in kinds or is_for_domains
        if not has_meaning and value != getattr(unset, key.name):
            raise _error(key.name, value, f"has no meaning for kind {config.kind}")
        if isinstance(value, int | float) and value < 0:
            raise _error(key.name, value, "must be 0 or more")
        if key.name in _POSITIVE and not value:
            raise _error(key.name, value, "must be more than 0")
        if key.name.endswith("_hour") and value > _RATE_MAX:
            raise _error(key.name, value, f"must be at most {_RATE_MAX:g}, one in a second")
        if key.name in _SHARES and value >= 1:
            raise _error(key.name, value, "must be a share, 0 or more and less than 1")
    if config.kind == "preset" and config.preset not in PRESETS:
        raise _error("preset", config.preset, f"must be one of {', '.join(PRESETS)}")
    if config.kind == "trace" and not config.path:
        raise _error("path", config.path, "must name a trace, by its file or its shipped name")
    if config.repair == "never" and config.repair_s:
        raise _error("repair_s", config.repair_s, "has no meaning for failures.repair never")
    is_default = config.repair in {unset.repair, "never"}
    if config.kind == "preset" and not is_default and not config.repair_s:
        raise _error("repair", config.repair, "needs failures.repair_s, for a preset has its own")
    if config.burst_nodes < 1:
        raise _error("burst_nodes", config.burst_nodes, "must be 1 or more")
    if config.weibull_shape < _WEIBULL_SHAPE_MIN:
        remedy = f"must be {_WEIBULL_SHAPE_MIN:g} or more"
        raise _error("weibull_shape", config.weibull_shape, remedy)
    if config.slow_speed > HIGHEST_SPEED:
        raise _error("slow_speed", config.slow_speed, f"must be at most {HIGHEST_SPEED}")
    if 0 < config.maintenance_every_s <= config.maintenance_s:
        remedy = f"must be more than failures.maintenance_s, {config.maintenance_s:g}"
        raise _error("maintenance_every_s", config.maintenance_every_s, remedy)
    _check_domains(config, num_nodes)


def _check_domains(config: FailuresConfig, num_nodes: int) -> None:
    if config.domains and config.domain_nodes:
        remedy = "is set, and so is failures.domains; leave one of them out"
        raise _error("domain_nodes", config.domain_nodes, remedy)
    if config.per_domain_hour and not (config.domains or config.domain_nodes):
        remedy = "needs failures.domains or failures.domain_nodes"
        raise _error("per_domain_hour", config.per_domain_hour, remedy)
    in_domains: set[int] = set()
    for node in (node for domain in config.domains for node in domain):
        if not 0 <= node < num_nodes:
            remedy = f"the cluster has nodes 0 to {num_nodes - 1}"
            raise _error("domains", node, remedy)
        if node in in_domains:
            raise _error("domains", node, "this node is in two domains; name it in one of them")
        in_domains.add(node)
    if any(not domain for domain in config.domains):
        raise _error("domains", config.domains, "has an empty domain; leave it out")


def _error(key: str, value: object, remedy: str) -> ConfigError:
    return ConfigError(f"failures.{key}", value, remedy)
