"""How a process computes on a GPU: torch's switches, of clients and server, and what is undone after a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fedsweep import prepare
from fedsweep.client.compute_device import start_device
from fedsweep.config.load import load_config
from fedsweep.driver.run import plain_torch
from fedsweep.engine.engine import Engine
from fedsweep.experiment.experiment import client_side
from fedsweep.fleet.fleet import LocalFleet
from fedsweep.streams import stream


@pytest.fixture(autouse=True)
def settings_of_before() -> Iterator[None]:
    with plain_torch():
        yield


def switches() -> tuple[bool, bool, bool, bool]:
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    return cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, cuda.matmul.allow_tf32


@pytest.mark.parametrize("tf32", [False, True])
def test_a_gpus_kernels_are_chosen_by_no_timing_and_round_only_where_asked(*, tf32: bool) -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = not tf32
    torch.backends.cudnn.benchmark = True
    start_device("cpu", tf32=tf32)
    assert switches()[1:] == (True, not tf32, not tf32)
    start_device("cuda", tf32=tf32)
    assert switches() == (True, False, tf32, tf32)


def test_a_program_has_its_precisions_again_after_a_run() -> None:
    def precisions() -> list[Any]:
        backends = torch.backends.cudnn, torch.backends.cuda, torch.backends.mkldnn
        operations = [getattr(backend, name, None) for backend in backends for name in ("conv", "rnn", "matmul")]
        return [getattr(operation, "fp32_precision", None) for operation in operations]

    before = precisions(), torch.get_float32_matmul_precision()
    with plain_torch():
        start_device("cuda", tf32=True)
    assert (precisions(), torch.get_float32_matmul_precision()) == before


def test_a_server_on_a_gpu_of_its_own_computes_as_the_clients_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process has no clients that would have set it: torch's default there is TF32 in convolutions."""
    config = {"scenario": {"dataset": "digits", "clients": 2}, "model": {"name": "mlp"}, "training": {"rounds": 1}}
    experiment = prepare(config, overrides=["runtime.tf32=true"])
    started = []
    monkeypatch.setattr("fedsweep.engine.engine.start_device", lambda *about, **more: started.append((*about, more)))
    Engine(experiment, LocalFleet(experiment))
    assert started == [("cpu", {"tf32": True})] and client_side(experiment).tf32


def test_tf32_is_part_of_what_a_run_is() -> None:
    plain, rounded = (load_config({}, overrides=[f"runtime.tf32={answer}"]).hash() for answer in ("false", "true"))
    assert plain == load_config({}).hash() != rounded


@pytest.mark.gpu
def test_tf32_rounds_factors_to_ten_bits() -> None:
    generator = stream(0, "factors").torch()
    images, kernel = torch.randn(8, 64, 16, 16, generator=generator), torch.randn(64, 64, 3, 3, generator=generator)
    exact = F.conv2d(images.double(), kernel.double())
    product = images.flatten(1).double() @ images.flatten(1).T.double()

    def off(tf32: bool) -> tuple[float, float]:
        start_device("cuda", tf32=tf32)
        on_gpu, flat = images.cuda(), images.cuda().flatten(1)
        convolved, multiplied = F.conv2d(on_gpu, kernel.cuda()).cpu(), (flat @ flat.T).cpu()
        return tuple(
            float((value - right).norm() / right.norm()) for value, right in ((convolved, exact), (multiplied, product))
        )  # type: ignore[return-value]

    # On an H200: 4e-7 and 2e-7, and with TF32 3e-4 and, of sums of squares for the most part, 8e-6.
    assert max(off(tf32=False)) < 1e-6
    assert all(5e-6 < error < 3e-3 for error in off(tf32=True))
