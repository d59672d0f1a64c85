"""`gpulayer workers`, `worker status`: a machine's CPUs are not a worker's slots; one that is gone has nothing free."""

from __future__ import annotations

import json
from dataclasses import replace

from tests.cli.conftest import Cli
from tests.sdk.benches import Bench


def test_the_machine_s_cpus_are_not_the_slots_of_a_worker(cli: Cli, bench: Bench) -> None:
    bench.queue.register(replace(bench._registration("w_bench"), slots=3, node_cpus=8))

    document = json.loads(cli("worker", "status", "alpha", "--json").out)
    assert (document["cpus"], document["slots"]["cpu"]) == (8, {"total": 3, "free": 3})
    assert ", 8 CPUs, " in cli("worker", "status", "alpha").out


def test_a_worker_that_is_gone_has_nothing_free(cli: Cli, bench: Bench) -> None:
    bench.hand.link.call("ZADD", bench.hand.key("workers"), 1, bench.machine.id)

    name, state, cpus, memory, *_ = cli("workers").out.split("\t")
    assert (name, cpus, memory) == ("alpha", "-/64", "-/64.0 GB")
    assert state.startswith("offline for ")
    assert json.loads(cli("workers", "--json").out)[0]["slots"]["cpu"] == {"total": 64, "free": 0}
