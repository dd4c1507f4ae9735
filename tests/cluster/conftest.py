"""Clusters on one machine, for tests marked `campaign`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import slurm_cluster
from namespace_hosts import Hosts, why_not
from slurm_cluster import SlurmCluster


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Three hosts in network namespaces; whatever a test leaves running there is killed."""
    if reason := why_not():
        pytest.skip(reason)
    with Hosts(3) as made:
        yield made


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Three Slurm nodes of two cores each, idle."""
    try:
        cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"), 3).__enter__()
    except slurm_cluster.Impossible as reason:
        pytest.skip(f"no Slurm cluster: {reason}")
    with ExitStack() as stack:
        stack.push(cluster)
        yield cluster
