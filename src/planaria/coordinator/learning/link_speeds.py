"""The speed of links between machines, as the job's own traffic shows it.

Each rank reports the bytes and seconds of large messages that came from other machines
(transport/connection.py), by source. The pairs of nodes are in two classes, which are kinds of
links in a profile: "inter_node" for two nodes of one failure domain or of none, and "inter_domain"
for all others. In each iteration, and in each recovery, the bytes per second of a class are the
median of its receiving ranks. The link is priced at the median of the newest of these, so that some
slow iterations change nothing. Its latency stays as it was measured at the start.

A rank that receives from several at once sees a share of its link for each. So the median is what a
stream gets in this job, which is at most what the link carries. What transfers take corrects that
(overhead.py).

Ranks of one machine report nothing, nor do those with paced links.
"""

from collections.abc import Iterable
from statistics import median
from typing import Final

import msgspec

from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.state import JobState
from planaria.core.messages import EpochReady, IterationDone
from planaria.policies.policy import Prices

NUM_NEWEST: Final = 9
_NEAR: Final = "inter_node"
_FAR: Final = "inter_domain"


def measured_prices(rules: Rules, state: JobState) -> Prices:
    """The prices by the profile, with domains of nodes and links as the job has measured them."""
    links = dict(rules.prices.links)
    for kind, rates in state.learning.findings.links.items():
        links[kind] = replace(links.get(kind, links[_NEAR]), bandwidth_bytes_per_s=median(rates))
    return replace(rules.prices, links=links, domains=domains_of(rules, state))


def link_speeds(state: JobState) -> dict[str, float]:
    """The measured bytes per second by kind of link; empty: none was measured."""
    return {kind: median(rates) for kind, rates in state.learning.findings.links.items()}


def with_link_speeds(
    rules: Rules, state: JobState, reports: Iterable[EpochReady | IterationDone]
) -> JobState:
    """The state that knows how fast large messages came to the ranks that report."""
    reports = [report for report in reports if report.receptions]
    if not reports:
        return state
    domains, per_node = domains_of(rules, state), state.devices_per_node
    # Where no node is in a domain, all links are of the class by which they are priced.
    same = _FAR if not domains and _FAR in rules.prices.links else _NEAR
    rates: dict[str, list[float]] = {}
    for report in reports:
        sums: dict[str, tuple[int, float]] = {}
        target = domains.get(report.rank // per_node)
        for source, (num_bytes, seconds) in report.receptions.items():
            kind = same if domains.get(source // per_node) == target else _FAR
            bytes_before, before_s = sums.get(kind, (0, 0.0))
            sums[kind] = bytes_before + num_bytes, before_s + seconds
        for kind, (num_bytes, seconds) in sums.items():
            if num_bytes > 0 and seconds > 0.0:
                rates.setdefault(kind, []).append(num_bytes / seconds)
    if not rates:
        return state
    findings = state.learning.findings
    newest = {
        kind: (*findings.links.get(kind, ()), median(of_ranks))[-NUM_NEWEST:]
        for kind, of_ranks in sorted(rates.items())
    }
    if newest.keys() - findings.links.keys():
        # Transfers so far were priced by the profile; what that was wrong by is in the rates now.
        findings = msgspec.structs.replace(findings, transfers_s=())
    findings = msgspec.structs.replace(findings, links={**findings.links, **newest})
    return replace(state, learning=replace(state.learning, findings=findings))


def without_receptions(report: IterationDone) -> IterationDone:
    """The report as others need it; what names each peer of a rank is for this part alone."""
    return msgspec.structs.replace(report, receptions={}) if report.receptions else report


def domains_of(rules: Rules, state: JobState) -> dict[int, str]:
    """Name of the failure domain of each node that is in one."""
    return {**rules.domains, **state.membership.domains}
