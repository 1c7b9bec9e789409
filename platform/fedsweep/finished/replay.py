"""A finished run on other devices: its time, money and energy there, where it would have learned the same.

The run is planned again, once as it was and once on the other devices. Where the first plan is what was played, nothing
that was trained had a say in it; where the second is the first, the devices have none either. So the clients would have
done and sent the same, and only the clock is another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fedsweep.catalog import resolve
from fedsweep.config.load import load_config
from fedsweep.config.overrides import apply_overrides
from fedsweep.driver.run import plan_run
from fedsweep.engine.cost import CostModel
from fedsweep.engine.forecast import planned_rounds, steps_by_client
from fedsweep.engine.plan import Planner, RoundPlan
from fedsweep.errors import ConfigError, OutputError
from fedsweep.experiment.experiment import Experiment
from fedsweep.parameters.ranges import Checked, NotNegative
from fedsweep.records import RoundRecord
from fedsweep.runs.run_folder import CONFIG, TRAFFIC, RunFolder
from fedsweep.world.data.datasets import load_dataset
from fedsweep.world.devices import client_time, jittered

if TYPE_CHECKING:
    import pyarrow as pa

_DEVICES, _PRICES = "scenario.devices", "prices"
_OF_MODELS = ("params", "buffers", "optimizer", "mask")


@dataclass(frozen=True, kw_only=True)
class Prices(Checked):
    """Prices and powers, in any currency.

    Attributes:
        up_gb: Money for 10^9 bytes to the server.
        down_gb: Money for 10^9 bytes to clients.
        device_hour: Money for an hour in which a client computes, sends or receives.
        kwh: Money for a kilowatt-hour.
        compute_watts: Of a client that computes.
        radio_watts: Of a client that sends or receives.
    """

    section: ClassVar[str] = _PRICES

    up_gb: NotNegative = 0.0
    down_gb: NotNegative = 0.0
    device_hour: NotNegative = 0.0
    kwh: NotNegative = 0.0
    compute_watts: NotNegative = 0.0
    radio_watts: NotNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """A finished run as it would have been.

    Attributes:
        rounds: Rounds played.
        bytes_up: All rounds', what goes before round 1 apart.
        bytes_down: Likewise.
        sim_time_s: Virtual seconds; None without devices.
        clocks: The virtual clock at each round's end.
        device_s: Seconds in which clients computed, sent or received, all of them together; None without devices.
        energy_kwh: Of the clients, for the given powers; None without devices.
        money: For the given prices; what needs devices only with them.
    """

    rounds: int
    bytes_up: int
    bytes_down: int
    sim_time_s: float | None
    clocks: tuple[float | None, ...]
    device_s: float | None
    energy_kwh: float | None
    money: float

    def tree(self) -> dict[str, Any]:
        """Return plain mappings, lists and numbers."""
        return {**asdict(self), "clocks": list(self.clocks)}


def replay(folder: str | Path, overrides: Sequence[str] = ()) -> Replayed:
    """Return what a finished run would have taken under other devices and prices.

    Args:
        folder: A finished run's.
        overrides: ``scenario.devices...=...`` and ``prices...=...``.

    Raises:
        ConfigError: Another key is set; or the run would have been another, which the message says from which round on.
        OutputError: The folder holds no finished run.
    """
    run = RunFolder(Path(folder).expanduser().absolute())
    run.check_is_run()
    if not run.has_result() or run.read_result()["status"] != "finished":
        raise OutputError(f"{run.path}: only a finished run can be replayed; finish it with fedsweep run --resume")
    prices, devices = _split(overrides)
    records, traffic = run.read_rounds(), run.client_table(TRAFFIC)
    if traffic is None:
        raise OutputError(f"{run.path}: has no {TRAFFIC}, which a replay reads; run it again")
    config = resolve(load_config(run.path / CONFIG))
    scenario = config.scenario
    dataset = load_dataset(
        scenario.dataset, root=scenario.root, download=scenario.download, image_size=scenario.image_size
    )
    before = plan_run(config, dataset).experiment
    after = before if not devices else plan_run(load_config(run.path / CONFIG, devices), dataset).experiment
    _check_limits(after, before)
    clocks: tuple[float | None, ...] = tuple(record.sim_time_s for record in records)
    if devices:
        clocks = tuple(_replanned(before, after, records, _model_bytes(traffic)))
    busy = _busy(before, after, records, traffic)
    if busy is None and any((prices.device_hour, prices.kwh, prices.compute_watts, prices.radio_watts)):
        raise ConfigError(
            f"{_PRICES}: hours and energy of clients need devices, and a plan that nothing trained has a say in, which"
            " this run has not; give up_gb and down_gb alone, or set scenario.devices={profile: phone-wifi}, say"
        )
    return _summed(records, clocks, busy, prices)


def _split(overrides: Sequence[str]) -> tuple[Prices, list[str]]:
    """Return the prices, and the overrides of devices."""
    devices, priced = [], []
    for item in overrides:
        key = item.partition("=")[0]
        if key == _PRICES or key.startswith(f"{_PRICES}."):
            priced.append(item)
        elif key == _DEVICES:
            devices += [f"{_DEVICES}=null", item]  # in place of the run's, not laid over them
        elif key.startswith(f"{_DEVICES}."):
            devices.append(item)
        else:
            raise ConfigError(
                f"--set {key}: a replay takes {_DEVICES} and {_PRICES} alone, since all else changes what is learned;"
                " begin a new run with it"
            )
    tree: Any = apply_overrides({}, priced).get(_PRICES, {})
    if not isinstance(tree, dict):
        raise ConfigError(f"{_PRICES} must be a mapping, but got {tree!r}; write {_PRICES}.kwh=0.3")
    names = [field.name for field in fields(Prices)]
    if unknown := [name for name in tree if name not in names]:
        raise ConfigError(f"{_PRICES}: unknown price {unknown[0]!r} (known: {', '.join(names)})")
    return Prices(**tree), devices


def _check_limits(after: Experiment, before: Experiment) -> None:
    limit = after.training.stop.sim_time_s
    if limit is not None and after is not before:
        raise ConfigError(
            f"the run has the limit training.stop.sim_time_s={limit:g}, so on other devices it would have had other"
            " rounds; begin a new run with them"
        )


def _model_bytes(traffic: pa.Table) -> Counter[int]:
    """Return bytes of models and masks that travelled, both ways, by round."""
    total: Counter[int] = Counter()
    for row in traffic.to_pylist():
        if row["kind"] in _OF_MODELS or row["kind"].startswith("update/"):
            total[row["round"]] += row["bytes"]
    return total


def _replanned(
    before: Experiment, after: Experiment, records: Sequence[RoundRecord], model_bytes: Mapping[int, int]
) -> Iterator[float | None]:
    """Yield the clock on the other devices after each round; refused from where the plans part."""
    for record, was, would in zip(records, *(_plans(each, len(records)) for each in (before, after)), strict=True):
        if difference := _unlike(record, was, model_bytes[record.round]):
            raise ConfigError(
                f"round {record.round}: {difference}, so what was trained has a say in this method's plan, and on other"
                " devices it would have to be trained again; begin a new run with them"
            )
        if _shape(was) != _shape(would):
            raise ConfigError(
                f"round {record.round}: on these devices other clients would have worked, or at other times, and the"
                " model would have been another; begin a new run with them"
            )
        yield would.clock


def _plans(experiment: Experiment, rounds: int) -> Iterator[RoundPlan]:
    return islice(planned_rounds(experiment, Planner(experiment, CostModel(experiment))), rounds)


def _unlike(record: RoundRecord, plan: RoundPlan, model_bytes: int) -> str | None:
    """Say in what a round was not as it is planned without training; None: in nothing."""
    steps = sum(steps_by_client(plan).values())
    points = sum(bool(point.attend) and not point.discard for point in plan.points)
    pairs = (
        ("cohort", plan.context.cohort, record.cohort),
        ("sync points", points, record.sync_points),
        ("local steps", steps, record.local_steps),
        ("bytes of models", plan.num_bytes, model_bytes),
        ("virtual time", plan.clock, record.sim_time_s),
    )
    differences = (f"its {name}: {now} by a plan, {was} as played" for name, now, was in pairs if now != was)
    return next(differences, None)


def _shape(plan: RoundPlan) -> Any:
    """Return what of a plan the model depends on."""
    points = tuple(
        replace(point, start=tuple(replace(job, not_before=0.0) for job in point.start)) for point in plan.points
    )
    parts = {client: part.key() for client, part in plan.context.submodels.items()}
    return plan.context.cohort, plan.context.drawn, plan.context.work, points, parts, plan.lost


@dataclass(frozen=True, kw_only=True)
class _Busy:
    """Seconds in which clients computed, and in which they sent or received."""

    compute_s: float
    radio_s: float


def _busy(before: Experiment, after: Experiment, records: Sequence[RoundRecord], traffic: pa.Table) -> _Busy | None:
    """Return all clients' seconds of all rounds, by what each sent and how many steps it took.

    Latencies, in which nobody is busy, are left out. None without devices, where the plan is not known, and where
    clients talk with others than the server.
    """
    profiles, costs = after.world.profiles, CostModel(after)
    plans = {plan.context.round: plan for plan in _plans(before, len(records))}
    model_bytes = _model_bytes(traffic)
    if (
        "peer" in traffic.column_names
        or profiles[0].device is None
        or any(_unlike(r, plans[r.round], model_bytes[r.round]) for r in records)
    ):
        return None
    size: Counter[tuple[int, int, str]] = Counter()
    steps: dict[tuple[int, int], int] = {}
    for row in traffic.to_pylist():
        if row["round"]:
            size[row["round"], row["client"], row["direction"]] += row["bytes"]
            steps[row["round"], row["client"]] = row["steps"]
    compute_s = radio_s = 0.0
    for (round, client), taken in sorted(steps.items()):
        context, device = plans[round].context, profiles[client].device
        assert device is not None
        device = jittered(device, seed=after.seed, round=round, client=client)
        work = context.work.get(client)
        flops = costs.flops(plans[round].submodel(client), work.samples_in(taken), work=work) if work else 0
        time = client_time(
            replace(device, down_latency_s=0.0, up_latency_s=0.0),
            steps=taken,
            flops=flops,
            bits_down=8 * size[round, client, "down"],
            bits_up=8 * size[round, client, "up"],
        )
        compute_s, radio_s = compute_s + time.compute_s, radio_s + time.download_s + time.upload_s
    return _Busy(compute_s=compute_s, radio_s=radio_s)


def _summed(
    records: Sequence[RoundRecord], clocks: tuple[float | None, ...], busy: _Busy | None, prices: Prices
) -> Replayed:
    up, down = sum(record.bytes_up for record in records), sum(record.bytes_down for record in records)
    money = (up * prices.up_gb + down * prices.down_gb) / 1e9
    seconds = energy = None
    if busy is not None:
        seconds = busy.compute_s + busy.radio_s
        energy = (busy.compute_s * prices.compute_watts + busy.radio_s * prices.radio_watts) / 3.6e6
        money += seconds / 3600 * prices.device_hour + energy * prices.kwh
    return Replayed(
        rounds=len(records),
        bytes_up=up,
        bytes_down=down,
        sim_time_s=clocks[-1] if clocks else None,
        clocks=clocks,
        device_s=seconds,
        energy_kwh=energy,
        money=money,
    )
