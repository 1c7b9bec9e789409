from __future__ import annotations

from typing import Any

import pytest

from fedsweep.config.load import load_config
from fedsweep.errors import ConfigError, ResourceError
from fedsweep.experiment.build import build_experiment
from fedsweep.sweeps.prepared_trial import make_entry
from fedsweep.sweeps.resources import Share, check_shares, largest
from fedsweep.sweeps.space import list_trials


def share(**runtime: Any) -> Share:
    return Share.of(load_config({"runtime": runtime}))


def node(**resources: float) -> dict[str, Any]:
    return {"Alive": True, "Resources": resources}


def test_a_small_trial_is_one_bundle_with_a_core() -> None:
    assert share().bundles == [{"CPU": 1.0}]
    assert share(client_actors=1).bundles == [{"CPU": 1.0}]


def test_several_actors_have_a_bundle_each_beside_the_server() -> None:
    found = share(client_actors=2, gpus_per_client=0.25, cpus_per_server=1.0)
    assert found.bundles == [{"CPU": 1.0}, {"CPU": 1.0, "GPU": 0.25}, {"CPU": 1.0, "GPU": 0.25}]


def test_a_server_without_cpu_holds_a_little_memory_so_that_its_bundle_is_none_of_nothing() -> None:
    first = share(backend="ray", client_actors=2).bundles[0]
    assert list(first) == ["memory"] and first["memory"] <= 2**20


def test_backend_ray_has_actors_and_local_has_none() -> None:
    assert share(backend="ray").actors == 1
    assert share(backend="local", client_actors=4).actors == 0


def test_a_local_trial_takes_its_share_of_a_gpu_for_its_process() -> None:
    assert share(gpus_per_client=0.5).bundles == [{"CPU": 1.0, "GPU": 0.5}]


def test_what_fits_in_total_but_on_no_node_is_refused() -> None:
    with pytest.raises(ResourceError, match="no room for client actor"):
        check_shares([node(CPU=1.0), node(CPU=1.0)], [share(client_actors=1, backend="ray", cpus_per_client=2.0)])


def test_gpu_shares_do_not_add_up_over_gpus() -> None:
    nodes = [node(CPU=8.0, GPU=2.0)]
    check_shares(nodes, [share(client_actors=4, gpus_per_client=0.5)])
    with pytest.raises(ResourceError, match="no room for client actor"):
        check_shares(nodes, [share(client_actors=3, gpus_per_client=1.0)])


def test_a_dead_node_has_no_room() -> None:
    with pytest.raises(ResourceError, match="no room"):
        check_shares([{"Alive": False, "Resources": {"CPU": 8.0}}], [share()])


def test_parts_of_gpus_of_one_process_add_up_to_a_part_that_ray_can_place() -> None:
    with pytest.raises(ResourceError, match=r"is 1\.5"):
        check_shares([node(CPU=8.0, GPU=4.0)], [share(gpus_per_client=1.0, gpus_per_server=0.5)])


def test_the_largest_share_sizes_the_cluster() -> None:
    big = share(client_actors=3)
    assert largest([share(), big]) == big


def test_gpus_that_are_only_counted_need_an_address_and_leave_the_work_on_the_cpu() -> None:
    counted = {"device": "cpu", "gpus_per_client": 0.25, "gpus_per_server": 0.5}
    with pytest.raises(ConfigError, match=r"uses no GPU.*runtime\.address"):
        build_experiment(load_config({"runtime": counted}))
    experiment = build_experiment(load_config({"runtime": {**counted, "address": "auto"}}))
    assert (experiment.device, experiment.server_device) == ("cpu", "cpu")


def test_a_trial_in_one_process_reserves_counted_gpus_but_is_a_run_for_any_machine() -> None:
    runtime = {"device": "cpu", "gpus_per_client": 0.25, "address": "auto", "client_actors": 1}
    config = load_config({"runtime": runtime, "sweep": {"space": {"seed": {"grid": [0]}}}})
    entry = make_entry(config, list_trials(config)[0], uri=None)
    assert entry.share.bundles == [{"CPU": 1.0, "GPU": 0.25}]
    assert (entry.config.runtime.address, entry.config.runtime.gpus_per_client) == (None, 0.0)
    assert build_experiment(entry.config).device == "cpu"
