"""Does the method fit its world? Asked before anything is written."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import nn

from fedsweep.client.coding import travelling
from fedsweep.components.metrics import METRICS
from fedsweep.errors import ConfigError, first_line
from fedsweep.experiment.clients import ClientColumns
from fedsweep.experiment.experiment import Experiment
from fedsweep.experiment.schedules import MOST_RATES
from fedsweep.models.network import Network
from fedsweep.models.slicing import build_submodel_module
from fedsweep.submodel import FULL_MODEL
from fedsweep.trees import copied
from fedsweep.world.stragglers import PartialWork, StragglerPolicy


def check_world(experiment: Experiment) -> None:
    """Check method and world together, as far as that needs no model.

    Raises:
        ConfigError: The task is not one for the method, or for what is asked of the test; a client has no samples,
            or parts of the scenario can't do without each round's updates although
            clients carry work from round to round; or moves are to be divided by effective steps that the clients'
            optimiser does not have, or not exactly; or steps are to be scaled that it normalises again.
    """
    for option in experiment.options:
        check_world(option.experiment)
    _check_task(experiment)
    # A drawn population has neither empty clients nor devices.
    clients = ClientColumns.of(() if experiment.world.is_drawn else experiment.world.profiles)
    empty = np.flatnonzero(clients.num_samples == 0).tolist()
    if empty:
        raise ConfigError(
            f"every client needs at least one sample, but clients {empty[:5]} have none; use fewer clients or"
            " another scenario.partition"
        )
    devices = clients.devices or ()
    method, may_drop_out = experiment.method, [d.drop_probability for d in devices]
    if devices and method.pacing.carries_work() and not nobody_drops_out(experiment.world.stragglers, may_drop_out):
        raise ConfigError(
            f"method {method.name}: its clients keep what they trained over several rounds, so it is not defined what a"
            " client that drops out of one takes with it; leave out scenario.devices.stragglers and"
            " scenario.devices.drop_probability, or choose another method"
        )
    if method.pacing.has_hubs and not nobody_drops_out(experiment.world.stragglers, may_drop_out):
        raise ConfigError(
            f"method {method.name}: its models meet at other hubs than the server, and it is not defined what these do"
            " without a client that drops out; leave out scenario.devices.stragglers and"
            " scenario.devices.drop_probability, or choose another method"
        )
    if method.needs_effective_steps and experiment.training.optimizer.name != "sgd":
        raise ConfigError(
            f"method {method.name} divides clients' moves by their effective steps, which training.optimizer"
            f" {experiment.training.optimizer.name} has not; set training.optimizer to {{name: sgd, lr: 0.05}}, say"
        )
    if method.submodels.scales_steps and experiment.training.optimizer.name != "sgd":
        raise ConfigError(
            f"method {method.name} scales the steps of some weights by their gradients, which"
            f" training.optimizer {experiment.training.optimizer.name} divides by their size again; set"
            " training.optimizer to {name: sgd, lr: 0.05}, say, or method.multiplier=activation"
        )
    _check_exactness(experiment)
    _check_links(experiment)
    _check_sums(experiment)
    _check_codecs(experiment)


def _check_task(experiment: Experiment) -> None:
    task = experiment.world.data.learned
    if task.has_classes:
        return
    name = type(task).__name__
    if lacking := [card.title for card, _ in experiment.cards if "classes" in card.needs]:
        raise ConfigError(
            f"method {lacking[0]} needs classes, but the task is {name}: a sample has none; choose another method"
            " (fedsweep show NAME says what each needs)"
        )
    if experiment.evaluate_per_client and experiment.test_owners(1) is None:
        raise ConfigError(
            f"evaluation.per_client goes by classes, which task {name} has not, or by clients' own test samples; these"
            " take data with groups, of the test too, scenario.partition {kind: writer} and no drift; set it to false"
        )
    if experiment.targets:
        raise ConfigError(
            f"evaluation.targets are accuracies, but task {name} classifies nothing; leave them out, or set"
            " training.stop.target: {metric: FIGURE, value: NUMBER}, of the task's figures or evaluation.metrics"
        )
    if experiment.training.stop.target_accuracy is not None:
        raise ConfigError(
            f"training.stop.target_accuracy is never reached, since task {name} classifies nothing; leave it out, or"
            " set training.stop.target: {metric: FIGURE, value: NUMBER}, of the task's figures or evaluation.metrics"
        )
    if by_class := [metric.name for metric in experiment.metrics if metric.function in METRICS.values()]:
        raise ConfigError(
            f"evaluation.metrics: {by_class[0]} goes by classes, but the task is {name}, which has figures of its own"
            f" ({', '.join(task.measures)}); leave it out, or name a function of yours"
        )
    if experiment.world.availability is not None:
        raise ConfigError(
            f"scenario.availability goes by clients' accuracies, but the task is {name}, which has none; set it to null"
        )


def _check_exactness(experiment: Experiment) -> None:
    optimizer = experiment.training.optimizer
    method = experiment.method
    if method.needs_one_rate and any(group.rate != 1 for group in optimizer.groups):
        raise ConfigError(
            f"method {method.name} divides clients' moves by their steps and one learning rate, but"
            " training.optimizer.groups has others; leave out their rate, or choose another method"
        )
    if method.needs_one_rate and method.pacing.carries_work() and _rate_changes(experiment):
        raise ConfigError(
            f"method {method.name} divides clients' moves by their steps and one learning rate, but its clients go on"
            " with their work over rounds, and training.schedule changes the rate between these; set"
            " training.schedule=constant, or choose a pacing that ends all work with its round"
        )
    asking = [term.name for term in method.terms if term.needs_exact_moves]
    codecs = [c for c in (experiment.up_codec, experiment.communication.down) if c.encodes]
    if asking and codecs:
        raise ConfigError(
            f"method {method.name}: the server repeats what the term {asking[0]} makes of a client's move, but the"
            f" codec {type(codecs[0]).__name__} changes the move on its way; leave one of them out"
        )
    dividing = [f"the term {term.name}" for term in method.terms if term.needs_effective_steps]
    weighting = method.weighting
    # Where all clients take as many steps, moves that weights compare are divided by the same number, whatever that is.
    if weighting.needs_one_rate and not (weighting.needs_effective_steps and _all_take_as_many(experiment)):
        dividing.append(type(weighting).__name__)
    if dividing and optimizer.momentum and optimizer.keep != "reset":
        raise ConfigError(
            f"method {method.name}: {dividing[0]} divides moves by steps whose momentum begins at"
            f" zero in each round, but training.optimizer_state is {optimizer.keep}; set"
            " training.optimizer_state=reset, or leave out the momentum"
        )


def _check_sums(experiment: Experiment) -> None:
    """Refuse codecs that leave something out for good where all is counted on, or for later what is thrown away."""
    method, codec = experiment.method, experiment.up_codec
    # A codec of the method's own encodes models alone, so what a term sends comes as it is.
    adding = [term.name for term in method.terms if term.adds_up and not (term.sends and method.codec.encodes)]
    # The server would add up other moves than the clients do, and their sums drift apart from round to round.
    if adding and codec.encodes and not codec.error_feedback:
        raise ConfigError(
            f"method {method.name}: the server adds up what the term {adding[0]} notes of clients' moves, and what the"
            f" codec {type(codec).__name__} leaves out of them never comes; choose another, or error_feedback: true"
        )
    if method.pacing.discards_work() and codec.error_feedback:
        raise ConfigError(
            f"method {method.name}: what its server throws away would come back with the next message by the error"
            f" feedback of the codec {type(codec).__name__}; leave one of them out"
        )


def _rate_changes(experiment: Experiment) -> bool:
    training = experiment.training
    return len({training.schedule(round) for round in range(1, min(training.rounds, MOST_RATES) + 1)}) > 1


def _all_take_as_many(experiment: Experiment) -> bool:
    """Return whether all clients take the same number of steps from one model to the next, by the configuration."""
    training, method = experiment.training, experiment.method
    if (
        method.pacing.syncs_inside
        or method.pacing.carries_work()
        or isinstance(experiment.world.stragglers, PartialWork)
    ):
        return False
    if method.settings.local_steps is not None or training.local_steps is not None:
        return method.settings.local_steps is not None or isinstance(training.local_steps, int)
    return bool(method.settings.equal_steps if training.equal_steps is None else training.equal_steps)


def _check_links(experiment: Experiment) -> None:
    topology, profiles = experiment.world.topology, experiment.world.profiles
    if topology.link is not None and profiles[0].device is None:
        raise ConfigError(
            "scenario.topology.bits_per_s is a rate on the virtual clock, which there is none of, since"
            " scenario.devices is null; set that to {profile: phone-wifi}, say, or leave bits_per_s out"
        )


def _check_codecs(experiment: Experiment) -> None:
    """Refuse codecs where what they would be given is not defined."""
    method, up, down = experiment.method, experiment.communication.up, experiment.communication.down
    if method.codec.encodes and up.encodes:
        raise ConfigError(
            f"communication.up: method {method.name} has a codec of its own ({type(method.codec).__name__}), so there"
            " would be two; set communication.up=null, or choose a method without"
        )
    if method.pacing.has_hubs and (up.encodes or down.encodes):
        raise ConfigError(
            f"communication: the models of method {method.name} meet at other hubs than the server, which do not have"
            " the model that a codec's moves are counted from; set communication.up and communication.down to null"
        )
    if up.encodes and method.server_update.has_several:
        raise ConfigError(
            f"communication.up: clients of method {method.name} start from one of several models, and a codec's moves"
            " are counted from the server's; set communication.up=null (communication.down goes with it)"
        )
    if up.encodes and method.pacing.carries_work():
        raise ConfigError(
            f"communication.up: clients of method {method.name} keep what they trained over several rounds, and a codec"
            " encodes moves of one; set communication.up=null (communication.down goes with it)"
        )
    if up.decodes_sums and (method.submodels.cuts or not method.averages_alone):
        raise ConfigError(
            f"communication.up: {type(up).__name__} decodes the mean of clients' messages alone, but method"
            f" {method.name} makes something else of their models than this mean; choose another codec"
        )
    if down.encodes and method.submodels.cuts:
        raise ConfigError(
            f"communication.down: the server's message is one for all clients, but method {method.name} gives them"
            " parts of the model; set communication.down=null (communication.up goes with it)"
        )
    if down.decodes_sums:
        raise ConfigError(
            f"communication.down: {type(down).__name__} decodes the sum of clients' messages, and the server's is one;"
            " choose another codec for this way, fp16, topk or powersgd, say"
        )


def check_experiment(experiment: Experiment) -> None:
    """Let a method refuse the world, before anything is written.

    Raises:
        ConfigError: See :func:`check_world`; or a component can't work in this world.
    """
    check_world(experiment)
    # Made for what they refuse; the run then begins with the same ones.
    _ = experiment.initial_states


def check_units(experiment: Experiment) -> None:
    """Leave out a unit of each group where the method will: what can't be cut fails now, and not in a later round.

    Raises:
        ConfigError: The network can't be cut where it says, or what is left of it takes no inputs.
    """
    network = experiment.template
    if not isinstance(network, Network) or not any("units" in card.needs for card, _ in experiment.cards):
        return
    try:
        smaller = build_submodel_module(network, {g.name: range(max(1, g.size - 1)) for g in network.unit_groups()})
        with torch.no_grad():
            smaller.eval()(smaller.example(2))
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the network's unit_groups can't be cut, as method {experiment.method.name} does: {first_line(error)};"
            " name other groups or layers there"
        ) from error


def check_batches(experiment: Experiment) -> None:
    """Refuse clients whose pass ends with a batch of one sample where the network can't be trained on one.

    A batch norm has no statistics of one value; it would fail in the first round that has such a client. Under drift
    each round has other samples, and of a drawn population nobody knows them.

    Raises:
        ConfigError: There are such clients.
    """
    network, world = experiment.template, experiment.world
    has_norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules())
    if not (isinstance(network, Network) and has_norms) or world.is_drawn or world.drift is not None:
        return
    reason = _untrainable(network, 1)
    if not reason or _untrainable(network, 2):
        return
    settings = experiment.method.settings
    whole = "set training.local_steps or training.equal_steps, whose batches are whole, "
    if settings.local_steps is not None or settings.equal_steps:
        whole = ""  # the method says how many steps there are
    for client, samples in enumerate(ClientColumns.of(world.profiles).num_samples.tolist()):
        if _smallest_batch(experiment, client, samples) == 1:
            raise ConfigError(
                f"model: this network can't be trained on a batch of one sample ({reason}), but client {client}, which"
                f" has {samples}, comes to one (training.batch_size: {experiment.local_steps(client, samples)[1]});"
                f" {whole}normalise without a batch (GroupNorm, LayerNorm), or choose another training.batch_size"
            )


def _smallest_batch(experiment: Experiment, client: int, samples: int) -> int:
    steps, batch, is_whole = experiment.local_steps(client, samples)
    if is_whole:
        return batch
    return samples % batch or batch if steps >= math.ceil(samples / batch) else min(samples, batch)


def _untrainable(network: Network, samples: int) -> str:
    """Return why a network can't be trained on so many samples; empty where it can."""
    try:
        with torch.no_grad():
            copied(network).train()(network.example(samples))
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return first_line(error)
    return ""


def check_lengths(experiment: Experiment) -> None:
    """Refuse a codec downwards whose messages are of other lengths for other values.

    Raises:
        ConfigError: It is such a one: a client downloads all that it missed, counted in messages of one length.
    """
    layout = experiment.layout
    for each in (experiment, *(option.experiment for option in experiment.options)):
        if (down := each.communication.down).varies(travelling(FULL_MODEL, layout).shapes, layout.dtype):
            raise ConfigError(
                f"communication.down: messages of {type(down).__name__} are of other lengths for other values, but a"
                " client downloads all that it missed, which is counted in messages of one length; have it make them"
                " as long as the longest, or set communication.down=null (communication.up goes with it)"
            )


def nobody_drops_out(policy: StragglerPolicy, drop_probabilities: Iterable[float]) -> bool:
    """Return whether every client of every cohort is always waited for."""
    return not policy.judges_rounds and not any(drop_probabilities)
