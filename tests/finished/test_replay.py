"""A finished run on other devices: the run made there, where it would have been the same; else a reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from each_method import each_method

import fedsweep
from fedsweep.algorithms.dpsgd import dpsgd
from fedsweep.commands.terminal.output import make_console
from fedsweep.engine.state import RunState
from fedsweep.errors import ConfigError, OutputError
from fedsweep.experiment.experiment import Experiment
from fedsweep.figures.study import plot_runs
from fedsweep.finished.elsewhere import views_elsewhere
from fedsweep.finished.replay import Prices, replay, replayed
from fedsweep.reports.client_maps import client_maps
from fedsweep.reports.compare import compared_runs, print_comparison
from fedsweep.reports.page import write_report
from fedsweep.reports.setting_table import TableStyle
from fedsweep.reports.sources import find_sources
from fedsweep.results.settings import report_runs
from fedsweep.results.view import load_runs
from fedsweep.runs.run_folder import RunFolder
from fedsweep.runs.tables.per_client import traffic_table
from fedsweep.testing import local_engine, run_rounds, subject_of, tiny_device, tiny_experiment, with_devices
from fedsweep.world.topology import ring

TINY: dict[str, Any] = {
    "scenario": {"dataset": "digits", "clients": 8},
    "training": {"rounds": 3, "cohort_size": 4, "local_epochs": 1, "batch_size": 32},
    "tracking": {"uri": "none"},
}
PHONES, SLOW = {"profile": "phone-wifi", "jitter": 0.3}, {"profile": "phone-slow", "compute_jitter": 0.1}
CODECS = {"up": {"name": "topk", "error_feedback": True}, "down": {"name": "fp16"}}


def played(method: dict[str, Any], devices: dict[str, Any] | None, out: Path, **more: Any) -> Path:
    config = {**TINY, "scenario": {**TINY["scenario"], "devices": devices}, "method": method, **more}
    return fedsweep.run(config, out=out).folder


def clocks(folder: Path) -> list[float | None]:
    return [record.sim_time_s for record in RunFolder(folder).read_rounds()]


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ({"name": "fedavg"}, {"communication": CODECS}),
        ({"name": "scaffold"}, {}),
        ({"name": "dynamicfl", "group_size": 2}, {"communication": CODECS}),
        ({"name": "heterofl"}, {}),
    ],
)
def test_other_devices_are_the_run_made_there(method: dict[str, Any], more: dict[str, Any], tmp_path: Path) -> None:
    here, there = played(method, PHONES, tmp_path / "a", **more), played(method, SLOW, tmp_path / "b", **more)
    found = replay(here, [f"scenario.devices={json.dumps(SLOW)}"])
    assert list(found.clocks) == clocks(there) != clocks(here)
    records = RunFolder(there).read_rounds()
    assert (found.bytes_up, found.bytes_down) == tuple(
        sum(getattr(r, f"bytes_{w}") for r in records) for w in ("up", "down")
    )
    same = replay(there)
    assert same.clocks == found.clocks and same.device_s == found.device_s


DRAWN = {"clients": 500, "partition": {"kind": "drawn", "samples": 8, "dirichlet_alpha": 0.3}}


def test_of_a_drawn_population_everybody_registers_and_those_who_took_part_are_shown(tmp_path: Path) -> None:
    groups = {"name": "dynamicfl", "group_size": 2}
    folder = played(groups, None, tmp_path / "run", scenario={**TINY["scenario"], **DRAWN})
    found, result = replay(folder, ["prices.up_gb=1e9"]), RunFolder(folder).read_result()
    assert found.bytes_before == result["registration_bytes"] == found.money_before > 0
    assert found.bytes_before + found.bytes_up + found.bytes_down == result["total_bytes"]
    maps = client_maps(load_runs([folder]), [0])
    seen = sorted({client for record in RunFolder(folder).read_rounds() for client in record.cohort})
    assert list(maps.charts[maps.views[0][0]].data[0]["x"]) == seen and not maps.notes


@pytest.mark.parametrize(
    ("column", "cell", "words"),
    [
        ("client", 10**6, "names client 1000000, but there are 8 clients"),
        ("client", -9, "names client -9, but there are 8 clients"),
        ("round", 2, r"has 0 bytes up in round 1, but rounds.parquet has \d+, so it is not whole"),
        ("direction", "sideways", "a direction is 'up' or 'down', but one is 'sideways'"),
        ("bytes", "much", "the column 'bytes' must hold int64"),
        ("client", None, "the column 'client' must hold int64 without empty cells"),
        ("kind", ..., "the column 'kind' is missing"),
    ],
)
def test_a_foreign_table_of_traffic_is_refused_in_a_line(column: str, cell: Any, words: str, tmp_path: Path) -> None:
    folder = played({"name": "fedavg"}, None, tmp_path / "run")
    columns = pq.read_table(folder / "traffic.parquet").to_pydict()
    if cell is ...:
        del columns[column]
    else:
        columns[column] = [cell] * len(columns[column])
        if cell is None:
            columns[column][0] = 0
    pq.write_table(pa.table(columns), folder / "traffic.parquet")
    with pytest.raises(OutputError, match=words):
        replay(folder)


SLOWER = tuple(tiny_device(speed, bits_per_s=2e4) for speed in (3e3, 1e4, 5e4))
WAYS = ("up", "down")
# What would have been learned elsewhere nobody knows: masks and rates follow training, arrivals the devices.
TRAINED, ELSEWHERE = "what was trained has a say in this method's plan", "on these devices other clients would have"
REFUSED = {
    **dict.fromkeys(("prunefl", "feddst", "fedad", "feddhad", "aedfl_feddhad"), TRAINED),
    **dict.fromkeys(("fedasync", "fedbuff", "aedfl"), ELSEWHERE),
}


@pytest.mark.parametrize("name", each_method())
def test_every_method_is_itself_on_its_devices_and_elsewhere_or_refused(name: str) -> None:
    here = subject_of(name).world(rounds=3, batch_size=4)
    there = with_devices(here, SLOWER)
    (state, traffic), (other, _) = ran(here), ran(there)
    own = replayed(here, replace(here), state.records, traffic, Prices(compute_watts=1), is_there=True)
    rows = traffic.to_pylist()
    for record in state.records:
        ways = {
            way: sum(r["bytes"] for r in rows if (r["round"], r["direction"]) == (record.round, way)) for way in WAYS
        }
        assert ways == {"up": record.bytes_up, "down": record.bytes_down}
    sent = own.bytes_before + own.bytes_up + own.bytes_down
    assert own.clocks == tuple(record.sim_time_s for record in state.records) and sent == state.total_bytes
    assert own.device_s is not None and (own.energy_kwh or 0) > 0
    if name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[name]):
            replayed(here, there, state.records, traffic, Prices(), is_there=False)
        return
    found = replayed(here, there, state.records, traffic, Prices(), is_there=False)
    assert found.clocks == tuple(record.sim_time_s for record in other.records) != own.clocks
    assert found.bytes_up + found.bytes_down == other.total_bytes - found.bytes_before
    assert torch.equal(state.vector, other.vector)


def test_messages_over_links_of_their_own_keep_both_ends_busy_at_the_links_rate() -> None:
    """Six clients send their model to two neighbours in each of two rounds: 4 x 28 bytes, at 10 bit/s."""
    topology = ring(num_clients=6, bits_per_s=10.0)
    fast = tiny_device(1e30, bits_per_s=1e30)
    work = with_devices(tiny_experiment(dpsgd(), cohort_size=6, rounds=2, topology=topology), [fast])
    state, traffic = ran(work)
    prices = Prices(radio_watts=1)
    over_links = replayed(work, replace(work), state.records, traffic, prices, is_there=True)
    seconds = 2 * 6 * 2 * 2 * 8 * 4 * 28 / 10
    assert over_links.device_s == pytest.approx(seconds)
    assert over_links.energy_kwh == pytest.approx(seconds / 3.6e6)


def ran(experiment: Experiment) -> tuple[RunState, Any]:
    state = run_rounds(local_engine(experiment))
    return state, traffic_table(experiment, state.setup_traffic, state.records)


@pytest.mark.parametrize("method", [{"name": "fedbuff"}, {"name": "feddst"}, {"name": "fedavg"}])
def test_on_its_own_devices_it_is_the_run(method: dict[str, Any], tmp_path: Path) -> None:
    folder = played(method, PHONES, tmp_path / "a")
    found, records = replay(folder), RunFolder(folder).read_rounds()
    assert list(found.clocks) == clocks(folder) and found.rounds == 3
    assert found.bytes_up == sum(r.bytes_up for r in records) and found.bytes_down == sum(r.bytes_down for r in records)


def test_a_run_without_devices_is_given_some(tmp_path: Path) -> None:
    here, there = played({"name": "fedavg"}, None, tmp_path / "a"), played({"name": "fedavg"}, SLOW, tmp_path / "b")
    assert list(replay(here, [f"scenario.devices={json.dumps(SLOW)}"]).clocks) == clocks(there)
    assert replay(here).sim_time_s is None


def test_arrivals_that_devices_decide_are_refused(tmp_path: Path) -> None:
    folder = played({"name": "fedbuff"}, PHONES, tmp_path / "a")
    with pytest.raises(ConfigError, match=r"round \d: on these devices other clients would have worked, or at other"):
        replay(folder, ["scenario.devices.profile=phone-slow"])


LEARNING = """
from dataclasses import dataclass
from fedsweep import FederatedMethod
from fedsweep.components import Selection

@dataclass(frozen=True, kw_only=True)
class ByLoss(Selection):
    def init(self, context):
        return 0

    def choose(self, state, context):
        return tuple(range(state, state + 4)), state

    def observe(self, state, record):
        return 1 + int(1000 * record.train_loss) % 3

def by_loss():
    return FederatedMethod(name="by_loss", source="", selection=ByLoss())
"""


def test_a_plan_that_training_has_a_say_in_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "replayed_method.py").write_text(LEARNING)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = played({"name": "replayed_method:by_loss"}, PHONES, tmp_path / "a")
    assert list(replay(folder).clocks) == clocks(folder)
    with pytest.raises(
        ConfigError, match=r"round 2: its cohort: .* by a plan, .* as played, so what was trained has a"
    ):
        replay(folder, ["scenario.devices.profile=phone-slow"])


def test_a_run_that_a_limit_ended_before_its_first_round_took_what_its_clients_registration_took(
    tmp_path: Path,
) -> None:
    folder = played({"name": "fedavg"}, None, tmp_path / "a", training={**TINY["training"], "stop": {"total_bytes": 1}})
    found = replay(folder, ["prices.up_gb=1e9", "prices.down_gb=1e9"])
    assert found.rounds == 0 and found.tree()["money"] == found.bytes_before > 0


def test_money_and_energy_are_products(tmp_path: Path) -> None:
    folder = played({"name": "fedavg"}, {"profile": "homogeneous"}, tmp_path / "a")
    found = replay(folder, ["prices.up_gb=2", "prices.down_gb=1"])
    before = RunFolder(folder).read_result()["registration_bytes"]
    assert found.bytes_before == before > 0 == found.energy_kwh
    assert found.money[-1] == pytest.approx((2 * (found.bytes_up + before) + found.bytes_down) / 1e9)
    watts = replay(
        folder, ["prices.compute_watts=3", "prices.radio_watts=3", "prices.kwh=0.5", "prices.device_hour=0.1"]
    )
    assert found.device_s is not None and watts.energy_kwh == pytest.approx(3 * found.device_s / 3.6e6)
    assert watts.money[-1] == pytest.approx(0.5 * (watts.energy_kwh or 0) + 0.1 * found.device_s / 3600)
    # One client after the other is busy longer than the slowest of each round, but for latencies.
    assert found.sim_time_s is not None and 1 < found.device_s / found.sim_time_s <= 4


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("training.rounds=9", r"--set training.rounds: a replay takes scenario.devices and prices alone"),
        ("prices.up=1", r"prices: unknown price 'up' \(known: up_gb"),
        ("prices.kwh=-1", r"prices.kwh must be a number >= 0"),
        ("prices.kwh=1", r"prices: hours and energy of clients need devices"),
        ("prices.up_gb=1e308", "money is beyond all numbers; set lower prices"),
    ],
)
def test_what_can_not_be_replayed_is_one_line(setting: str, message: str, tmp_path: Path) -> None:
    folder = played({"name": "fedavg"}, None, tmp_path / "a")
    with pytest.raises(ConfigError, match=message):
        replay(folder, [setting])


def test_runs_are_compared_as_they_would_have_been(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place, name in enumerate(("fedavg", "scaffold", "feddst")):
        fedsweep.run({**TINY, "name": name, "method": {"name": name}, "seed": place}, out=tmp_path / "runs" / name)
    elsewhere = [f"scenario.devices={json.dumps(SLOW)}", "prices.up_gb=2", "prices.compute_watts=4"]
    views = views_elsewhere(load_runs([tmp_path / "runs"]), elsewhere)
    runs, _ = report_runs(views)
    by_name = {run.label: run for run in runs}
    found = replay(tmp_path / "runs" / "scaffold", elsewhere)
    assert by_name["scaffold"].view.figure("money") == found.money[-1] > 0
    assert by_name["scaffold"].curve.spent == {"energy_kwh": found.energy, "money": found.money}
    assert by_name["scaffold"].curve.sim_time_s == found.clocks
    assert by_name["feddst"].view.figure("sim_time_s") is by_name["feddst"].view.figure("money") is None
    assert "what was trained has a say" in by_name["feddst"].view.notes[-1]

    print_comparison(runs, make_console(), style=TableStyle(sort="money"))
    lines = capsys.readouterr().out.splitlines()
    assert [word for word in lines[0].split() if word in ("energy", "money")] == ["energy", "money"]
    assert [line.split()[0] for line in lines[1:]] == ["fedavg", "scaffold", "feddst"]
    assert f"{found.money[-1]:.4g}" in lines[2] and lines[3].split()[-8:-5] == ["-", "-", "-"]
    plot_runs(runs, tmp_path / "money.svg", x="money")
    assert (tmp_path / "money.svg").stat().st_size > 5000
    sources = replace(find_sources([str(tmp_path / "runs")], uri=None), runs=tuple(views))
    page = write_report(sources, tmp_path / "page.html", script="beside").path.read_text()
    assert '"label":"money"' in page.replace(" ", "") and "what was trained has a say" in page

    plain = compared_runs([tmp_path / "runs"])
    with pytest.raises(ConfigError, match="--x money: only a replay knows it"):
        plot_runs(plain, tmp_path / "money.svg", x="money")
    with pytest.raises(ConfigError, match="a say in this method's plan"):
        views_elsewhere([run.view for run in plain if run.label == "feddst"], elsewhere)
