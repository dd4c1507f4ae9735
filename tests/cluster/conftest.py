"""Clusters on one machine, for tests marked `campaign`.

Where a cluster is impossible its tests skip. In CI (CI=true in the environment) they fail instead, because CI would
otherwise pass without them. MPITRAIN_CANNOT="slurm namespaces browser" names what a CI machine can never do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import slurm_cluster
from link import Link
from namespace_hosts import Hosts, why_not
from slurm_cluster import SlurmCluster
from support import memory_cgroup
from warm import Warm


def impossible(what: str, reason: str) -> None:
    """Skip or fail a test that needs something this machine lacks. what: "slurm" or "namespaces"."""
    if os.environ.get("CI") == "true" and what not in os.environ.get("MPITRAIN_CANNOT", "").split():
        pytest.fail(
            f'{reason}; a machine that cannot do this for good says so by MPITRAIN_CANNOT="{what}"', pytrace=False
        )
    pytest.skip(reason)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Yield three hosts in network namespaces; processes that a test leaves running there are killed."""
    if reason := why_not():
        impossible("namespaces", reason)
    with Hosts(3) as cluster:
        yield cluster


@pytest.fixture
def linked_hosts() -> Iterator[Hosts]:
    """Yield two hosts, joined by a link of 1 Gbit/s and 10 ms."""
    link = Link(bits_per_second=1e9, seconds=0.010)
    if reason := why_not(link):
        impossible("namespaces", reason)
    with Hosts(2, link) as cluster:
        yield cluster


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory, forked: Warm) -> Iterator[SlurmCluster]:
    """Yield three idle Slurm nodes of two cores each, whose jobs fork their Python from a warm one (warm.py)."""
    folder = tmp_path_factory.mktemp("slurm")
    cluster = SlurmCluster(folder, 3)
    cluster.variables = {"VENV": forked.make_environment(folder / "venv")}
    yield from _cluster(cluster)


@pytest.fixture
def slurm_with_devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Yield one Slurm node of two cores and two devices."""
    yield from _cluster(SlurmCluster(tmp_path_factory.mktemp("slurm"), 1, devices=2))


@pytest.fixture
def slurm_with_limits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Yield one Slurm node of two cores, which limits the memory of jobs by cgroups."""
    with memory_cgroup(1 << 30):  # skips the test where cgroups cannot be made
        yield from _cluster(SlurmCluster(tmp_path_factory.mktemp("slurm"), 1, limits_memory=True))


def _cluster(starting: SlurmCluster) -> Iterator[SlurmCluster]:
    try:
        cluster = starting.__enter__()
    except slurm_cluster.Impossible as reason:
        impossible("slurm", f"no Slurm cluster: {reason}")
        return
    with ExitStack() as stack:
        stack.push(cluster)
        yield cluster
