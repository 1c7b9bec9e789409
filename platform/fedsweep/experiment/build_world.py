"""From a configuration to its world: the scenario as objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedsweep.catalog import Bound, bound
from fedsweep.client.shards import TrainingData
from fedsweep.config.scenario import Scenario
from fedsweep.config.schema import Config
from fedsweep.errors import ConfigError, DataError, InvariantError
from fedsweep.experiment.clients import check_drawn, client_profiles
from fedsweep.experiment.experiment import World
from fedsweep.streams import stream
from fedsweep.tasks.base import Task
from fedsweep.tasks.kinds import Classification, Segmentation
from fedsweep.world.data.datasets import Dataset, load_dataset
from fedsweep.world.data.record import integers
from fedsweep.world.data.subset import subset
from fedsweep.world.drift import Drift
from fedsweep.world.label_stats import test_owners
from fedsweep.world.partitions.base import check_parts
from fedsweep.world.population import Drawn, Split
from fedsweep.world.stragglers import WaitForAll
from fedsweep.world.topology import Star
from fedsweep.world.transforms import Transform, check_transform

_MOST_STRATA = 100_000  # counts of each stratum are kept for every client


def build_world(config: Config, dataset: Dataset) -> World:
    """Build the scenario as objects.

    Raises:
        InputError: A part of the scenario is wrong or does not fit the data.
    """
    scenario, seed, rounds = config.scenario, config.seed, config.training.rounds
    dataset = part_of(config, dataset)
    task = build_task(config, dataset)
    strata = strata_of(dataset, task)
    num_strata = max(task.num_strata, int(strata.max()) + 1)
    split_by, num_parts = _split_by(dataset, task, strata, num_strata)
    check_kinds(config, dataset, has_strata=max(num_strata, num_parts) > 1)
    validation, proxy, rest = server_share(strata, num_strata, scenario, seed)
    sizes = {"num_classes": num_strata, "num_rounds": rounds, "num_clients": scenario.clients}
    drift = built(config, "scenario.drift", **sizes)
    indices = _split(config, dataset, rest, drift, strata=split_by, num_strata=num_parts)
    availability = built(config, "scenario.availability", **sizes)
    if is_drawn := isinstance(indices, Drawn):
        check_drawn(config, drift, availability)
    budget = built(config, "scenario.budgets")
    images, labels = _skewed(config, dataset, indices, drift), dataset.train_labels
    devices = built(config, "scenario.devices", num_clients=scenario.clients, run_seed=seed)
    return World(
        data=TrainingData(
            images=images,
            labels=labels,
            transform=_transform(config, dataset, task),
            num_classes=num_strata,
            strata=strata,
            task=task,
        ),
        test_images=dataset.test_images,
        test_labels=dataset.test_labels,
        test_owners=None if is_drawn else test_owners(indices, dataset.train.groups, dataset.test.groups),
        indices=indices,
        profiles=client_profiles(strata, num_strata, indices, devices),
        validation=None if validation is None else (images[validation], labels[validation]),
        proxy=_proxy(scenario, dataset, proxy, seed),
        drift=drift,
        availability=availability,
        budgets=None if budget is None else budget.assign(scenario.clients, stream(seed, "budgets")),
        stragglers=built(config, "scenario.devices.stragglers") or WaitForAll(),
        topology=built(config, "scenario.topology", num_clients=scenario.clients, run_seed=seed) or Star(),
        notes=_notes(scenario, dataset, task, indices, len(rest)),
    )


def _notes(
    scenario: Scenario, dataset: Dataset, task: Task, indices: Sequence[np.ndarray], num_samples: int
) -> tuple[str, ...]:
    """Say what a user may not have meant of the test, and of the samples that the clients have, of so many."""
    notes, proxy = [], scenario.server_data.proxy
    if proxy is not None and proxy.dataset == scenario.dataset:
        notes.append(
            f"scenario.server_data.proxy: its samples are of {scenario.dataset}, so clients hold them, too; per_class"
            " keeps some that no client has"
        )
    if isinstance(indices, Split) and (unused := num_samples - len(indices.flat)):
        notes.append(f"scenario.partition gives {unused} of {num_samples} training samples to nobody")
    tests = dataset.test_labels
    if isinstance(task, Classification) and len(unseen := np.setdiff1d(tests, dataset.train_labels)):
        names = [dataset.class_names[label] if dataset.class_names else str(label) for label in unseen[:3]]
        notes.append(
            f"{np.isin(tests, unseen).sum()} of {len(tests)} test samples are of classes that no training sample has"
            f" ({', '.join(names)}{', ...' if len(unseen) > 3 else ''}), so that they count as wrong"
        )
    return tuple(notes)


def dataset_of(scenario: Scenario) -> Dataset:
    """Load a scenario's data set; raises as :func:`~fedsweep.world.data.datasets.load_dataset`."""
    return load_dataset(
        scenario.dataset, root=scenario.root, download=scenario.download, image_size=scenario.image_size
    )


def part_of(config: Config, dataset: Dataset) -> Dataset:
    """Return the part of the data set that the scenario asks for, by default all of it.

    Raises:
        ConfigError: There is not as much.
    """
    part = config.scenario.subset
    if part is None:
        return dataset
    counts = {"train": part.train, "test": part.test}
    return subset(dataset, seed=config.seed, share=part.share, counts=counts, groups=part.groups, order=part.order)


def built(config: Config, key: str, **provided: Any) -> Any:
    """Build the object that a key names; None where it is null."""
    item = bound(config, key)
    return None if item is None else item.build(**provided)


def build_task(config: Config, dataset: Dataset) -> Task:
    """Build the task of a data set, and check the data set against it.

    Raises:
        DataError: The targets are not what the task learns.
    """
    shape = tuple(int(size) for size in dataset.train.targets.shape[1:])
    item, parts = bound(config, "scenario.task"), {"train": dataset.train, "test": dataset.test}
    if item is None:
        if not dataset.train.targets.size:
            raise DataError(
                f"data set {dataset.name!r} has no targets; name a task that needs none, e.g."
                " scenario.task: {kind: generative}"
            )
        if dataset.num_classes < 1 or shape or dataset.train.targets.dtype.kind not in "iu":
            is_whole = dataset.train.targets.dtype.kind in "biu"
            kinds = "multi_label} or {kind: next_token" if is_whole and shape else "regression"
            way = f"name the task, e.g. scenario.task: {{kind: {kinds}}}"
            if dataset.train.targets.dtype.kind == "b" and not shape:
                way = "give classes as integers"
            raise DataError(
                f"data set {dataset.name!r}: its targets are {dataset.train.targets.dtype} of shape {list(shape)} for"
                f" each sample and num_classes={dataset.num_classes}, so they are no classes; {way}"
            )
        task: Task = Classification(num_classes=dataset.num_classes)
        for part, samples in parts.items():
            task.check(samples.targets, f"data set {dataset.name!r}: {part} targets")
        return task
    of_inputs = getattr(item.builder, "of_inputs", False)
    num_classes = dataset.num_classes
    if of_inputs:
        # Labels may stand beside; then partitions go by them.
        num_classes = num_classes if not shape and dataset.train.targets.dtype.kind in "iu" else 0
        shape = tuple(int(size) for size in dataset.train.inputs.shape[1:])
    task = item.build(num_classes=num_classes, target_shape=shape)
    for part, samples in parts.items():
        if of_inputs:
            task.check(samples.inputs, f"data set {dataset.name!r}: {part} inputs")
        elif not samples.targets.size:
            raise DataError(
                f"data set {dataset.name!r} has no targets, which task {item.name} learns; name another one"
            )
        else:
            task.check(samples.targets, f"data set {dataset.name!r}: {part} targets")
    return task


def strata_of(dataset: Dataset, task: Task) -> np.ndarray:
    """Return what the training samples are counted by [S]: classes, the data set's strata, or the task's; else zeros.

    Raises:
        DataError: They are no such numbers, or one is 100,000 or more.
    """
    targets, own = dataset.train.targets, dataset.train.strata
    if task.has_classes:
        return _numbered(task.strata(targets), dataset, "classes")
    return _numbered(task.strata(targets) if own is None else own, dataset, "strata")


def _split_by(dataset: Dataset, task: Task, strata: np.ndarray, num_strata: int) -> tuple[np.ndarray, int]:
    """Return what the training samples are split by [S], and how many there are of it; of classes it may be others."""
    if not task.has_classes or dataset.train.strata is None:
        return strata, num_strata
    own = _numbered(dataset.train.strata, dataset, "strata")
    return own, int(own.max()) + 1


def _numbered(strata: np.ndarray | None, dataset: Dataset, what: str) -> np.ndarray:
    if strata is None:
        return np.zeros(len(dataset.train), np.int64)
    numbers = strata.astype(np.int64) if isinstance(strata, np.ndarray) and strata.dtype == bool else strata
    checked = integers(numbers, f"data set {dataset.name!r}: the task's {what}", length=len(dataset.train))
    if checked.max() >= _MOST_STRATA:
        raise DataError(
            f"data set {dataset.name!r}: {what} must be numbered from 0 on, below {_MOST_STRATA:,}, but one is"
            f" {checked.max():,}"
        )
    return checked


def check_kinds(config: Config, dataset: Dataset, *, has_strata: bool) -> None:
    """Refuse parts of a scenario that the data are not of the kind for.

    Args:
        config: A loaded configuration.
        dataset: The data.
        has_strata: Samples have classes, or what stands for them.

    Raises:
        ConfigError: A part goes by classes or by pixels, and there are none.
    """
    item, named = bound(config, "scenario.partition"), f"data set {dataset.name!r}"
    kind = config.scenario.task.kind if config.scenario.task else "classification"
    by_class = None if has_strata else _by_class(item)
    if by_class is not None:
        raise ConfigError(
            f"scenario.partition {by_class} goes by classes, but {named} has none for task {kind}; set"
            f" scenario.partition to {{kind: {'iid' if dataset.writers is None else 'writer'}}}, or give Samples strata"
        )
    if not has_strata and config.scenario.drift is not None:
        raise ConfigError(f"scenario.drift goes by classes, but {named} has none for task {kind}; set it to null")
    if config.scenario.feature_skew is not None and dataset.pixels is None:
        raise ConfigError(f"scenario.feature_skew changes pictures, but {named} has none; set it to null")


def _by_class(item: Bound) -> str | None:
    """Return the name of a partition that goes by classes, or of the first part of a mixture that does; None: none."""
    own = item.name if getattr(item.builder, "needs_strata", False) else None
    return own or next(filter(None, map(_by_class, item.listed)), None)


def _check_pixel_targets(config: Config, dataset: Dataset, task: Task, transform: Transform) -> None:
    """Refuse what moves a picture's pixels where each of them has a target, which would stay behind.

    Raises:
        ConfigError: Something does.
    """
    if dataset.pixels is None or task.of_inputs:
        return
    if task.target_shape[-2:] != dataset.image_shape[1:]:
        if isinstance(task, Segmentation) and config.scenario.image_size is not None:
            raise ConfigError(
                f"scenario.image_size resizes pictures to {list(dataset.image_shape[1:])}, but data set"
                f" {dataset.name!r} has targets {list(task.target_shape)}, one for each pixel as it was; leave it out"
            )
        return
    skew = bound(config, "scenario.feature_skew")
    moves = {
        "transform": transform.moves_pixels,
        "feature_skew": skew is not None and getattr(skew.builder, "moves_pixels", False),
    }
    ways_out = {"transform": "normalize", "feature_skew": "null, or take {kind: noise}"}
    for key in filter(moves.get, moves):
        raise ConfigError(
            f"scenario.{key} {bound(config, f'scenario.{key}').name} moves pictures' pixels, but data set"
            f" {dataset.name!r} has a target for each of them, which would stay; set it to {ways_out[key]}"
        )


def _transform(config: Config, dataset: Dataset, task: Task) -> Transform:
    item = bound(config, "scenario.transform")
    transform: Transform = item.build(dataset)
    if not type(transform).__module__.startswith("fedsweep."):
        check_transform(transform, dataset, item.name)
    if transform.pictures and dataset.pixels is None:
        raise ConfigError(
            f"scenario.transform {item.name} is for pictures, but data set {dataset.name!r} has none;"
            " set it to normalize"
        )
    _check_pixel_targets(config, dataset, task, transform)
    return transform


def server_share(
    strata: np.ndarray, num_strata: int, scenario: Scenario, seed: int
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray]:
    """Return indices that the server keeps for validation and as proxy data, and the rest; drawn class by class."""
    server_data = scenario.server_data
    generator = stream(seed, "server data").numpy()
    validation: list[np.ndarray] = []
    proxy: list[np.ndarray] = []
    rest: list[np.ndarray] = []
    for label in range(num_strata):
        members = generator.permutation(np.flatnonzero(strata == label))
        num_validation = round(server_data.validation * len(members))
        num_proxy = (server_data.proxy.per_class if server_data.proxy is not None else None) or 0
        if not len(members):
            num_proxy = 0  # a class may have no samples at all
        if num_validation + num_proxy > len(members):
            raise DataError(
                f"scenario.server_data keeps {num_validation} + {num_proxy} samples of class {label}, but the training"
                f" set has {len(members)}; lower validation or proxy.per_class"
            )
        validation.append(members[:num_validation])
        proxy.append(members[num_validation : num_validation + num_proxy])
        rest.append(members[num_validation + num_proxy :])
    joined = [np.sort(np.concatenate(part)) for part in (validation, proxy, rest)]
    if server_data.validation and not len(joined[0]):
        raise DataError(
            f"scenario.server_data.validation of {server_data.validation:g} keeps no sample of any class of a training"
            f" set of {len(strata)}; raise it, or set it to 0"
        )
    if not len(joined[2]):
        raise DataError(
            f"scenario.server_data keeps all {len(strata)} training samples, so that clients have none; lower"
            " validation or proxy.per_class"
        )
    return (
        joined[0] if server_data.validation else None,
        joined[1] if server_data.proxy is not None and server_data.proxy.per_class is not None else None,
        joined[2],
    )


def _split(
    config: Config, dataset: Dataset, rest: np.ndarray, drift: Drift | None, *, strata: np.ndarray, num_strata: int
) -> Sequence[np.ndarray]:
    """Return each client's samples, as indices into the training set."""
    scenario, item = config.scenario, bound(config, "scenario.partition")
    partition = item.build()
    if drift is not None and drift.pool == "all" and not partition.draws_clients:
        return (rest,) * scenario.clients
    try:
        parts = partition.split(
            strata[rest],
            scenario.clients,
            stream(config.seed, "partition"),
            num_classes=num_strata,
            writers=None if dataset.writers is None else dataset.writers[rest],
        )
        if partition.draws_clients:
            return Drawn(length=scenario.clients, build=lambda k: rest[parts[k]])
        check_parts(parts, num_samples=len(rest), num_clients=scenario.clients)
    except InvariantError as error:
        raise DataError(f"scenario.partition {item.name}: {error}") from error
    whole = Split.of(parts)
    return Split(flat=rest[whole.flat], ends=whole.ends)


def _skewed(config: Config, dataset: Dataset, indices: Sequence[np.ndarray], drift: Drift | None) -> np.ndarray:
    """Return the training images, those of each client as ``scenario.feature_skew`` has them."""
    skew = built(config, "scenario.feature_skew")
    if skew is None:
        return dataset.train_images
    if drift is not None and drift.pool == "all":
        raise ConfigError(
            f"scenario.feature_skew gives each client pictures of its own, but under scenario.drift kind"
            f" {config.scenario.drift.kind!r} all clients draw from the same; set one of them to null"  # type: ignore[union-attr]
        )
    draws = stream(config.seed, "feature skew")
    changed: np.ndarray = skew.apply(dataset.train_images, indices, scale=dataset.scale, stream=draws)
    return changed


def _proxy(
    scenario: Scenario, dataset: Dataset, chosen: np.ndarray | None, seed: int
) -> tuple[np.ndarray, np.ndarray | None] | None:
    proxy = scenario.server_data.proxy
    if proxy is None:
        return None
    if proxy.dataset is not None and proxy.samples is not None:
        return _foreign(scenario, dataset, name=proxy.dataset, samples=proxy.samples, seed=seed), None
    return dataset.train_images[chosen], dataset.train_labels[chosen] if proxy.labelled else None


def _foreign(scenario: Scenario, dataset: Dataset, *, name: str, samples: int, seed: int) -> np.ndarray:
    """Return images of another data set, in the shape of this one's; its classes mean nothing here."""
    sides = set() if dataset.pixels is None else {*dataset.image_shape[1:]}
    size = sides.pop() if len(sides) == 1 else None
    try:
        foreign = load_dataset(name, root=scenario.root, download=scenario.download, image_size=size)
    except ConfigError:  # what has no pictures, which have a size; what else is wrong is so without it, too
        foreign = load_dataset(name, root=scenario.root, download=scenario.download)
    same = foreign.train_images.shape[1:] == dataset.train_images.shape[1:] and foreign.scale == dataset.scale
    if not same or samples > len(foreign.train_images):
        raise DataError(
            f"scenario.server_data.proxy: {samples} samples of {name} can't stand beside {dataset.name}: it has"
            f" {len(foreign.train_images)} of shape {foreign.train_images.shape[1:]} and scale {foreign.scale:g}, but"
            f" {dataset.train_images.shape[1:]} and {dataset.scale:g} are needed; choose another set, or fewer samples"
        )
    chosen = stream(seed, "proxy data").numpy().choice(len(foreign.train_images), size=samples, replace=False)
    return foreign.train_images[np.sort(chosen)]
