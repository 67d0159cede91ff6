"""A cluster on one machine: its nodes are network namespaces (tests/support/cluster.py).

What each fault gives is the table of docs/evidence.md#a-cluster-with-faults.
"""

import os
import re
import subprocess
from functools import partial

import forked_python
import helpers
import pytest
from cluster import Cluster, enter
from helpers import ROOT


@pytest.fixture(scope="module")
def nodes(long):
    cluster = Cluster(5)
    yield cluster
    cluster.end()


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict:
    values = helpers.workspace(tmp_path_factory.mktemp("cluster"))
    # 9 s: far longer than a rank of these runs waits for another one
    values |= {"shard": "fsdp", "precision": "float64", "collective_timeout": 0.15}
    return {**values, "num_epochs": 1, "save_every": 1}


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory) -> dict:
    """Flags of the run of one process on one machine."""
    values = helpers.variant(base, tmp_path_factory.mktemp("whole"))
    helpers.run(values)
    return values


def difference(values: dict, whole: dict) -> float:
    return helpers.largest_difference(values, whole, ("checkpoints/step_4", "final"))[0]


def test_torchrun_on_two_nodes_trains_as_one_process_does(nodes, base, whole, tmp_path):
    values = helpers.variant(base, tmp_path)
    launch = "-m torch.distributed.run --nnodes 2 --nproc_per_node 1".split()
    launch += ["--rdzv_endpoint", f"{nodes.address(0)}:29500", "--node_rank"]
    with forked_python.python() as program, open(tmp_path / "log", "w") as log:
        environment = os.environ | {"PYTHON_EXEC": program, "GLOO_SOCKET_IFNAME": "eth0"}
        line = [program, *launch]
        script = [str(ROOT / "grpo.py"), *helpers.words(values)]
        running = [
            subprocess.Popen(
                [*nodes.inside(node), *line, str(node), *script],
                stdout=log,
                stderr=log,
                env=environment,
            )
            for node in (0, 1)
        ]
        try:
            codes = [each.wait(240) for each in running]
        finally:
            for each in running:
                each.kill()
    assert codes == [0, 0], (tmp_path / "log").read_text()
    assert difference(values, whole) < 1e-9


def on_node(holder: int, place: str, command: str) -> None:
    """Let this process run on a node, and there a shell command at the n-th call of a function."""
    enter(holder)
    function, number = place.split(":")
    act = lambda calls: calls == int(number) and subprocess.run(command, shell=True, check=True)
    helpers._before(function, act)


DOWN = "ip link set eth0 down"
UP = "ip link set eth0 up"
LATE = "ranks [1] have not come, since the phase 'training'"
SILENT = "rank 0's machine does not answer"
# Where the fault is and what it does, on node 1; what each node's exit code is, and what it says.
FAULTS = {
    "link down": ("utils.Optimizer.step:5", DOWN, (2, 2), (LATE, SILENT)),
    "link down for 5 s": (
        "utils.Optimizer.step:5",
        f"{DOWN}; (sleep 5; {UP}) >/dev/null 2>&1 &",
        (0, 0),
        (LATE, SILENT),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_node(nodes, base, whole, tmp_path, long, fault):
    if fault != "link down" and not long:
        pytest.skip("runs with --long")
    place, command, codes, said = FAULTS[fault]
    values = helpers.variant(base, tmp_path)
    nodes.ip(1, "link set eth0 up")
    holders = [holder.pid for holder in nodes.holders[1:]]
    environment = {"MASTER_ADDR": nodes.address(0), "GLOO_SOCKET_IFNAME": "eth0"}
    environment |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    places = {0: partial(enter, holders[0]), 1: partial(on_node, holders[1], place, command)}
    ranks = helpers.start_ranks(values, 2, places, environment)
    for rank in ranks:
        rank.wait(100)
    seen = "\n----\n".join(rank.err for rank in ranks)
    print(seen)
    assert tuple(rank.code for rank in ranks) == codes, seen
    for number, (rank, text) in enumerate(zip(ranks, said)):
        where = rf"rank {number} of 2, in the phase '\w+'"
        assert re.search(rf"warning: {where}: {re.escape(text)}", rank.err), seen
        if rank.code == 2:
            (line,) = rank.errors
            assert re.match(rf"error: {where}.*: --collective_timeout: {re.escape(text)}", line)
    assert not list((helpers.folder_of(values) / "checkpoints").glob(".*")) or codes != (0, 0)
    if codes != (0, 0):
        helpers.run({**values, "resume": True})
    assert difference(values, whole) < 1e-9
