"""A job raises the limit of open files as far as it may, and says so where that does not do."""

import resource

import pytest

from planaria.core.job import ClusterConfig
from planaria.errors import ConfigError
from planaria.nodes.descriptors import raise_open_files
from planaria.transport.strangers import NUM_UNPROVEN_MAX, Unproven, num_unproven_max

UNLIMITED = resource.RLIM_INFINITY


def limits_set(
    soft: int, hard: int, monkeypatch: pytest.MonkeyPatch, *, cluster: ClusterConfig
) -> list[tuple[int, int]]:
    """What the limits are set to, where they are these."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: told.append(limits))
    raise_open_files(cluster)
    return told


@pytest.mark.parametrize("hard", [4096, UNLIMITED])
def test_a_low_soft_limit_is_raised_to_what_the_job_needs(
    hard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no further: programs that look at each number up to the limit would take long."""
    ((soft, kept),) = limits_set(40, hard, monkeypatch, cluster=ClusterConfig(nodes=32))
    ((more, _),) = limits_set(40, hard, monkeypatch, cluster=ClusterConfig(nodes=8, max_nodes=64))

    assert 64 < soft < more < 2048
    assert kept == hard


def test_strangers_fit_in_beside_the_connections_of_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The job's own could take all descriptors, and no machine was let in any more."""
    cluster = ClusterConfig(nodes=32)
    ((ample, _),) = limits_set(40, UNLIMITED, monkeypatch, cluster=cluster)
    ((scarce, _),) = limits_set(40, 300, monkeypatch, cluster=cluster)
    own = ample - 2 * NUM_UNPROVEN_MAX

    assert own > 64
    assert scarce == 300
    assert not limits_set(300, 300, monkeypatch, cluster=cluster)
    with pytest.raises(ConfigError):
        limits_set(40, own + 31, monkeypatch, cluster=cluster)


def test_all_ranks_of_a_large_job_fit_in_while_they_connect_to_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unproven connections may take a quarter of the descriptors, and those of peers were refused
    when more came."""
    cluster = ClusterConfig(nodes=100, devices_per_node=8)
    ((soft, _),) = limits_set(40, UNLIMITED, monkeypatch, cluster=cluster)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    unproven = Unproven[int](num_unproven_max(cluster.num_ranks_max))
    for peer in range(799):
        unproven.add(peer, bytes([peer % 100]))

    assert cluster.num_ranks_max == 800
    assert unproven.surplus(0) is None


@pytest.mark.parametrize("soft", [4096, UNLIMITED])
def test_a_limit_that_does_is_left_alone(soft: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not limits_set(soft, UNLIMITED, monkeypatch, cluster=ClusterConfig(nodes=32))


def test_a_hard_limit_that_is_too_low_is_the_users_to_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which one it is, and how much a job of so many nodes needs."""
    with pytest.raises(ConfigError, match=r"may have 40 .*RLIMIT_NOFILE.*needs \d+: raise"):
        limits_set(40, 40, monkeypatch, cluster=ClusterConfig(nodes=32))
