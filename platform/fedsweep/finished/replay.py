"""A finished run on other devices: its time, money and energy there, where it would have learned the same.

The run is planned again, once as it was and once on the other devices. Where the first plan is what was played, nothing
that was trained had a say in it; where the second is the first, the devices have none either. So the clients would have
done and sent the same, and only the clock is another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, islice, repeat
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
from fedsweep.experiment.build_world import dataset_of
from fedsweep.experiment.experiment import Experiment
from fedsweep.models.cost import FLOPS_PER_MAC
from fedsweep.parameters.ranges import Checked, NotNegative
from fedsweep.records import RoundRecord
from fedsweep.runs.run_folder import CONFIG, ROUNDS, TRAFFIC, RunFolder
from fedsweep.world.devices import client_time, jittered
from fedsweep.world.topology import SERVER, Graph, Tree, edge_hub

if TYPE_CHECKING:
    import pyarrow as pa

_DEVICES, _PRICES = "scenario.devices", "prices"
_OF_MODELS = ("params", "buffers", "optimizer", "mask")
_TRAFFIC_TYPES = dict.fromkeys(("round", "client", "bytes", "steps", "syncs", "macs", "peer"), "int64")
_TRAFFIC_TYPES |= dict.fromkeys(("direction", "kind"), "string")


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
        bytes_before: Before round 1, both ways; money has them, time and energy have not.
        bytes_up: All rounds'.
        bytes_down: Likewise.
        clocks: The virtual clock at each round's end; None without devices.
        device_s: Seconds in which clients computed, sent or received, all of them together; None without devices.
        energy: Kilowatt-hours of the clients up to each round's end, for the given powers; None without devices.
        money_before: Money before round 1.
        money: Up to each round's end, for the given prices; what needs devices only with them.
    """

    rounds: int
    bytes_before: int
    bytes_up: int
    bytes_down: int
    clocks: tuple[float | None, ...]
    device_s: float | None
    energy: tuple[float | None, ...]
    money_before: float
    money: tuple[float, ...]

    @property
    def sim_time_s(self) -> float | None:
        """Virtual seconds of the whole run."""
        return self.clocks[-1] if self.clocks else None

    @property
    def energy_kwh(self) -> float | None:
        """Kilowatt-hours of the whole run."""
        return self.energy[-1] if self.energy else None

    @property
    def money_spent(self) -> float:
        """Money for the whole run."""
        return self.money[-1] if self.money else self.money_before

    def tree(self) -> dict[str, Any]:
        """Return plain mappings, lists and numbers."""
        whole = {"sim_time_s": self.sim_time_s, "energy_kwh": self.energy_kwh, "money": self.money_spent}
        rounds = {"clocks": self.clocks, "energy_kwh_by_round": self.energy, "money_by_round": self.money}
        sums = {name: getattr(self, name) for name in ("rounds", "bytes_before", "bytes_up", "bytes_down", "device_s")}
        return {**sums, **whole, **{name: list(cells) for name, cells in rounds.items()}}


def replay(folder: str | Path, overrides: Sequence[str] = ()) -> Replayed:
    """Return what a finished run would have taken under other devices and prices.

    Args:
        folder: A finished run's.
        overrides: ``scenario.devices...=...`` and ``prices...=...``.

    Raises:
        ConfigError: Another key is set; or the run would have been another, which the message says from which round on.
        OutputError: The folder holds no finished run, or a table of it is damaged.
    """
    run = RunFolder(Path(folder).expanduser().absolute())
    run.check_is_run()
    run.read_config()
    run.check_finished("can be replayed")
    prices, devices = split_settings(overrides)
    records, traffic = run.read_rounds(), run.client_table(TRAFFIC)
    if traffic is None:
        raise OutputError(f"{run.path}: has no {TRAFFIC}, which a replay reads; run it again")
    config = resolve(load_config(run.path / CONFIG))
    dataset = dataset_of(config.scenario)
    before = after = plan_run(config, dataset).experiment
    _check_traffic(traffic, run.path / TRAFFIC, records, before)
    is_there = True
    if devices:
        other = resolve(load_config(run.path / CONFIG, devices))
        after, is_there = plan_run(other, dataset).experiment, other.scenario.devices == config.scenario.devices
    return replayed(before, after, records, traffic, prices, is_there=is_there)


def _check_traffic(traffic: pa.Table, source: Path, records: Sequence[RoundRecord], experiment: Experiment) -> None:
    """Refuse a table that is not one of these rounds' traffic: the file may be anybody's."""
    columns = dict(zip(traffic.column_names, traffic.columns, strict=True))
    columns.setdefault("peer", columns.get("client"))  # it is there where models meet at other hubs
    for name, kind in _TRAFFIC_TYPES.items():
        if columns.get(name) is None:
            raise OutputError(f"{source}: the column {name!r} is missing, so this is not a table of traffic")
        if str(columns[name].type) != kind or columns[name].null_count:
            raise OutputError(f"{source}: the column {name!r} must hold {kind} without empty cells")
    if others := {*traffic.column("direction").to_pylist()} - {"up", "down"}:
        raise OutputError(f"{source}: a direction is 'up' or 'down', but one is {min(others)!r}")
    num_clients, topology = len(experiment.world.profiles), experiment.world.topology
    lowest = edge_hub(topology.edges - 1) if isinstance(topology, Tree) else 0
    hubs = {*columns["client"].to_pylist()} | {*columns["peer"].to_pylist()} - {SERVER}
    if odd := {hub for hub in hubs if not lowest <= hub < num_clients}:
        raise OutputError(f"{source}: names client {max(odd)}, but there are {num_clients} clients")
    sent: Counter[tuple[int, str]] = Counter()
    for round, way, size in zip(*(columns[name].to_pylist() for name in ("round", "direction", "bytes")), strict=True):
        sent[round, way] += size
    for record in records:
        for way, size in (("up", record.bytes_up), ("down", record.bytes_down)):
            if (own := sent[record.round, way]) != size:
                what = f"has {own} bytes {way} in round {record.round}, but {ROUNDS} has {size}"
                raise OutputError(f"{source}: {what}, so it is not whole, or another run's; run it again")


def replayed(
    before: Experiment,
    after: Experiment,
    records: Sequence[RoundRecord],
    traffic: pa.Table,
    prices: Prices,
    *,
    is_there: bool,
) -> Replayed:
    """Return what rounds would have taken elsewhere.

    Args:
        before: The experiment as it was played; the same object as ``after``: nothing is planned again.
        after: On the other devices.
        records: The rounds.
        traffic: Who sent and did what.
        prices: What hours, bytes and energy cost.
        is_there: The devices are those on which it was played, so its clock holds whatever has a say in its plan.

    Raises:
        ConfigError: The rounds would have been others, prices are for hours that nobody knows, or it is beyond numbers.
    """
    clocks: tuple[float | None, ...] = tuple(record.sim_time_s for record in records)
    if after is not before:
        if not is_there and (limit := after.training.stop.sim_time_s) is not None:
            raise ConfigError(
                f"the run has a limit of {limit:g} virtual seconds, so on other devices it would have had other rounds;"
                " begin a new run with them"
            )
        clocks = tuple(_replanned(before, after, records, _model_bytes(traffic), is_there=is_there))
    busy = _busy(after, traffic)
    if busy is None and any((prices.device_hour, prices.kwh, prices.compute_watts, prices.radio_watts)):
        raise ConfigError(
            f"{_PRICES}: hours and energy of clients need devices; give up_gb and down_gb alone, or set"
            " scenario.devices={profile: phone-wifi}, say"
        )
    whole = _summed(records, clocks, busy, prices, traffic)
    figures = (*whole.clocks, whole.device_s, whole.energy_kwh, whole.money_spent)
    if not all(figure is None or math.isfinite(figure) for figure in figures):
        raise ConfigError(f"time, energy or money is beyond all numbers; set lower {_PRICES}, or faster {_DEVICES}")
    return whole


def split_settings(overrides: Sequence[str]) -> tuple[Prices, list[str]]:
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


def _model_bytes(traffic: pa.Table) -> Counter[int]:
    """Return bytes of models and masks that travelled, both ways, by round."""
    total: Counter[int] = Counter()
    for row in traffic.to_pylist():
        if row["kind"] in _OF_MODELS or row["kind"].startswith("update/"):
            total[row["round"]] += row["bytes"]
    return total


def _replanned(
    before: Experiment,
    after: Experiment,
    records: Sequence[RoundRecord],
    model_bytes: Mapping[int, int],
    *,
    is_there: bool,
) -> Iterator[float | None]:
    """Yield the clock on the other devices after each round; refused from where the plans part."""
    for record, was, would in zip(records, *(_plans(each, len(records)) for each in (before, after)), strict=True):
        if difference := _unlike(record, was, model_bytes[record.round]):
            if is_there:
                # It has the clock that was measured where it was; no other needs to be planned.
                yield from (each.sim_time_s for each in records if each.round >= record.round)
                return
            raise ConfigError(
                f"round {record.round}: {difference}, so what was trained has a say in this method's plan, and on other"
                " devices it would have to be trained again; begin a new run with them"
            )
        if was is None or would is None or _shape(was) != _shape(would):
            raise ConfigError(
                f"round {record.round}: on these devices other clients would have worked, or at other times, and the"
                " model would have been another; begin a new run with them"
            )
        yield would.clock


def _plans(experiment: Experiment, rounds: int) -> Iterator[RoundPlan | None]:
    """Yield so many rounds' plans; None where a budget would have ended the run."""
    plans = planned_rounds(experiment, Planner(experiment, CostModel(experiment)))
    return islice(chain(plans, repeat(None)), rounds)


def _unlike(record: RoundRecord, plan: RoundPlan | None, model_bytes: int) -> str | None:
    """Say in what a round was not as it is planned without training; None: in nothing."""
    if plan is None:
        return "by a plan there is none"
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


@dataclass(kw_only=True)
class _Busy:
    """Seconds in which clients computed, and in which they sent or received."""

    compute_s: float = 0.0
    radio_s: float = 0.0


def _busy(after: Experiment, traffic: pa.Table) -> dict[int, _Busy] | None:
    """Return all clients' seconds by round, by what each sent, got and computed.

    Latencies, in which nobody is busy, are left out, and edge servers, which have no devices. Over a graph's own links
    messages take the link's rate, at both ends. None without devices.
    """
    profiles, topology = after.world.profiles, after.world.topology
    if profiles[0].device is None:
        return None
    link = topology.link if isinstance(topology, Graph) else None
    size: Counter[tuple[int, int, str]] = Counter()
    work: dict[tuple[int, int], tuple[int, int]] = {}
    for row in traffic.to_pylist():
        round, client, peer = row["round"], row["client"], row.get("peer", SERVER)
        is_on_link = link is not None and peer >= 0
        if client >= 0:
            work[round, client] = row["steps"], row["macs"]
            size[round, client, "link" if is_on_link else row["direction"]] += row["bytes"]
        if peer >= 0:  # a message between clients has one row
            work.setdefault((round, peer), (0, 0))
            other = "down" if row["direction"] == "up" else "up"
            size[round, peer, "link" if is_on_link else other] += row["bytes"]
    busy: dict[int, _Busy] = {}
    for (round, client), (steps, macs) in sorted(work.items()):
        device = profiles[client].device
        if not round or device is None:
            continue
        device = jittered(device, seed=after.seed, round=round, client=client)
        time = client_time(
            replace(device, down_latency_s=0.0, up_latency_s=0.0),
            steps=steps,
            flops=FLOPS_PER_MAC * macs,
            bits_down=8 * size[round, client, "down"],
            bits_up=8 * size[round, client, "up"],
        )
        total = busy.setdefault(round, _Busy())
        total.compute_s += time.compute_s
        total.radio_s += time.download_s + time.upload_s
        total.radio_s += 0.0 if link is None else 8 * size[round, client, "link"] / link.bits_per_s
    return busy


def _summed(
    records: Sequence[RoundRecord],
    clocks: tuple[float | None, ...],
    busy: Mapping[int, _Busy] | None,
    prices: Prices,
    traffic: pa.Table,
) -> Replayed:
    per_gb = {"up": prices.up_gb, "down": prices.down_gb}
    first = [row for row in traffic.to_pylist() if not row["round"]]
    bytes_before = listed = sum(row["bytes"] for row in first)
    if records:
        # Of a drawn population only those who took part have rows; the others registered, too.
        bytes_before = records[0].total_bytes - records[0].bytes_up - records[0].bytes_down
    unlisted = (bytes_before - listed) * prices.up_gb
    before = (sum(row["bytes"] * per_gb[row["direction"]] for row in first) + unlisted) / 1e9
    money, kwh, device_s = before, 0.0, 0.0
    moneys, energies = [], list[float | None]()
    for record in records:
        money += (record.bytes_up * prices.up_gb + record.bytes_down * prices.down_gb) / 1e9
        if busy is not None:
            spent = busy.get(record.round, _Busy())
            energy = (spent.compute_s * prices.compute_watts + spent.radio_s * prices.radio_watts) / 3.6e6
            seconds = spent.compute_s + spent.radio_s
            kwh, device_s = kwh + energy, device_s + seconds
            money += seconds / 3600 * prices.device_hour + energy * prices.kwh
        moneys.append(money)
        energies.append(None if busy is None else kwh)
    return Replayed(
        rounds=len(records),
        bytes_before=bytes_before,
        bytes_up=sum(record.bytes_up for record in records),
        bytes_down=sum(record.bytes_down for record in records),
        clocks=clocks,
        device_s=None if busy is None else device_s,
        energy=tuple(energies),
        money_before=before,
        money=tuple(moneys),
    )
