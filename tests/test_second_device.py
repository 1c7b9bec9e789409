"""Each method's clients on a device that is not the CPU, without one: by fake tensors, and on torch's lazy device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from second_device import DEVICE, HostTouched, Watch, clients_begun, no_collection

from fedsweep.algorithms.registry import METHODS
from fedsweep.client.compute_device import start_device
from fedsweep.client.lanes.grouping import lane_refused
from fedsweep.client.lanes.tile import Tile
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.config.load import load_config
from fedsweep.driver.run import plan_run, run_plan
from fedsweep.experiment.experiment import Experiment
from fedsweep.testing import local_engine, run_rounds
from fedsweep.testing.subject import subject_of
from fedsweep.world.availability import AlwaysAvailable

# What these read, a GPU's host waits for; in the loop alone, and where the method says so.
READS_IN_ITS_BEGINNING = {
    "fedgen": "how many samples of a class there are",
    "fjord": "which width is drawn",
    "prunefl": "which weights are masked",
    "feddst": "which weights are masked",
    "fedas": "whether a client has been there before",
    "augfl": "which samples are augmented",
    "ifca": "which cluster's model fits best",
}
# Their clients do not go together; each says why.
ALONE = ("fedmix", "fedktl", "dfedavgm", "aedfl_feddhad")
EXHAUSTIVE = (pytest.mark.slow, pytest.mark.exhaustive)
QUICK = (
    "fedavg",
    "fedprox",
    "fedadam",
    "scaffold",
    "feddyn",
    "fednova",
    "dynamicsgd",
    "dynamicfl",
    "heterofl",
    "prunefl",
)
# One of those that go alone, too.
FAKE = [
    name if name in (*QUICK, ALONE[0]) else pytest.param(name, marks=EXHAUSTIVE)
    for name in METHODS
    if name not in READS_IN_ITS_BEGINNING
]

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")


def world(name: str, **more: Any) -> Experiment:
    return subject_of(name).world(**more)


@pytest.mark.parametrize("name", FAKE)
def test_a_step_mixes_no_devices_and_copies_nothing_to_the_host(name: str) -> None:
    with clients_begun(world(name)) as (_, locals):
        for local in locals:
            with Watch(recorded=False) as watch:
                loss = local.steps.take(0)
            assert loss.device.type == DEVICE and watch.seen > 10


def test_clients_whose_training_accuracy_is_kept_read_nothing_back_in_a_step() -> None:
    work = world("fedavg")
    with_tracking = replace(work, world=replace(work.world, availability=AlwaysAvailable()))
    with clients_begun(with_tracking) as (worker, locals):
        assert worker._side.track_accuracy
        with Watch(recorded=False):
            locals[0].steps.take(0)


@pytest.mark.parametrize("optimizer", [OptimizerSettings(momentum=0.9, clip_norm=1.0), OptimizerSettings(name="adam")])
def test_no_optimizer_touches_the_host(optimizer: OptimizerSettings) -> None:
    with clients_begun(world("fedprox", optimizer=optimizer)) as (worker, locals):
        with Watch(recorded=False):
            locals[0].steps.take(0)
        check_recorded(worker, locals)


def check_recorded(worker: Any, locals: Any) -> bool:
    """Take a step of lanes under the watch that a recording needs; says whether the clients go together."""
    lanes = [lane for local in locals if (lane := local.lane()) is not None]
    fitting = [lane for lane in lanes if lane_refused(worker._side, lane) is None]
    if not fitting:
        return False
    tile = Tile(worker._side, fitting[0], 2)
    tile._load([lane for lane in fitting if lane.key() == fitting[0].key()])
    for tick in range(2):
        idle = tile._next_batch(tick)
        with Watch(recorded=True) as watch:
            losses, _ = tile._taken(idle=idle)
        assert losses.shape == (2,) and losses.device.type == DEVICE and watch.seen > 20
    return True


@pytest.mark.parametrize("name", FAKE)
def test_what_a_graph_records_has_no_part_on_the_host(name: str) -> None:
    with clients_begun(world(name, local_steps=2, local_epochs=None)) as (worker, locals):
        assert check_recorded(worker, locals) is (name not in ALONE)


# -- the watch sees what it is there for -------------------------------------------------------------------------------

FAULTS: dict[str, Any] = {
    "reads": lambda x: float(x.sum()),
    "copies": lambda x: x.cpu(),
    "copies into": lambda x: torch.zeros(3).copy_(x),
    "is sized by values": lambda x: x.nonzero(),
}
IN_A_GRAPH: dict[str, Any] = {
    "allocates": lambda x: torch.zeros(3),
    "takes from the host": lambda x: x + torch.arange(3.0).to(DEVICE),
    "has a constant made": lambda x: x * torch.tensor(0.5),
    "draws": lambda x: x + torch.rand(3, device=DEVICE),
    "drops": lambda x: torch.nn.functional.dropout(x, 0.5),
}


@pytest.mark.parametrize(
    ("recorded", "what"), [*((False, w) for w in FAULTS), *((True, w) for w in FAULTS | IN_A_GRAPH)]
)
def test_the_watch_refuses(recorded: bool, what: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    start_device(DEVICE)
    with no_collection(), FakeTensorMode():
        x = torch.ones(3, device=DEVICE)
        with pytest.raises(HostTouched), Watch(recorded=recorded):
            (FAULTS | IN_A_GRAPH)[what](x)
        with Watch(recorded=True):
            (x * 2).sum()


def test_fake_tensors_refuse_two_devices_in_one_operation() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    start_device(DEVICE)
    with no_collection(), FakeTensorMode(), pytest.raises(Exception, match=r"lazy.* and cpu|cpu.* and lazy"):
        torch.ones(3, device=DEVICE) + torch.ones(3)


# -- with numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=EXHAUSTIVE) for n in METHODS])
def test_the_second_device_trains_the_cpus_model(name: str) -> None:
    work = world(name)
    here = run_rounds(local_engine(work), rounds=2)
    there = run_rounds(local_engine(replace(work, device=DEVICE)), rounds=2)
    assert float((here.vector - there.vector).abs().max()) <= 1e-5
    assert [r.total_bytes for r in there.records] == [r.total_bytes for r in here.records]


@pytest.mark.parametrize("executor", ["loop", "auto"])
def test_a_run_is_forced_to_it_by_its_configuration(executor: str, tmp_path: Path) -> None:
    """Server and clients; with ``auto`` its lanes prove themselves, and that it records nothing is said."""
    tree = {
        "name": "second",
        "scenario": {"clients": 3},
        "model": {"name": "mlp"},
        "training": {"rounds": 1, "cohort_size": 2, "local_steps": 2},
        "tracking": {"uri": "none"},
    }
    results = {}
    for device in ("cpu", DEVICE):
        runtime = {"backend": "local", "device": device, "executor": executor}
        run_plan(plan_run(load_config({**tree, "runtime": runtime})), tmp_path / device)
        results[device] = json.loads((tmp_path / device / "result.json").read_text(encoding="utf-8"))
    values = {device: _model(tmp_path / device) for device in results}
    assert all(np.abs(values["cpu"][k] - values[DEVICE][k]).max() <= 1e-5 for k in values["cpu"])
    told = results[DEVICE]["executor"]
    if executor == "loop":
        assert told == {"name": "loop", "notes": []}
        return
    assert told["name"] == "lanes" and told["lanes"] == 2 and told["recorded"] is False and told["off"] <= 1e-4
    assert [note.split(" (")[0] for note in told["notes"]] == [
        "lanes: the device's memory can't be probed",
        "lanes: a step can't be recorded",
    ]


def _model(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


def test_a_number_counts_there_as_it_does_elsewhere() -> None:
    """A loss times a number stays a float32, and so do the gradients that its product with weights gives."""
    start_device(DEVICE)
    weights = torch.ones(2, 2, device=DEVICE, requires_grad=True)
    loss = ((weights @ weights).sum() * 0.3 + 2 - 1.5) / 7
    loss.backward()
    assert loss.dtype == torch.float32
    assert torch.allclose((weights.grad @ weights).cpu(), torch.full((2, 2), 8 * 0.3 / 7))
    assert (torch.tensor(3, device=DEVICE) * 2).dtype == torch.int64


def test_a_tensor_of_the_cpu_is_refused_there() -> None:
    start_device(DEVICE)
    with pytest.raises(RuntimeError, match="not a lazy tensor"):
        torch.ones(2, device=DEVICE) + torch.ones(2)
