"""A user's own module as a network: checked once when it is built, so that it fails there and not in round 37."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fedsweep.errors import ConfigError
from fedsweep.guard import placed_error
from fedsweep.models.network import ModelShape, Network, gains_by_pixels_last
from fedsweep.models.unit_groups import UnitGroup
from fedsweep.trees import Inputs, all_of, copied, each, moving_buffers, trained_params

_PREFIX = "module"
# How a module says that it does not take some inputs.
_REFUSES_INPUTS = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)


@final
class UserNetwork(Network):
    """Any module that maps inputs to logits; several inputs it gets by keyword.

    Where it has ``features`` and ``head`` of which its ``forward`` consists, or ``unit_groups``, they are used.
    Parameters have the prefix ``module.``, as in torch's own wrappers.

    Args:
        module: The user's module.
        shape: Of what it takes and gives.
    """

    module: Any

    def __init__(self, module: nn.Module, shape: ModelShape) -> None:
        input_shape = () if isinstance(shape.input_shape, dict) else shape.input_shape
        super().__init__(input_shape=input_shape, num_classes=shape.num_classes)
        self.module = module
        self._is_split = callable(getattr(module, "features", None)) and callable(getattr(module, "head", None))
        self.has_features = self._is_split
        self._feature_width = shape.num_classes

    @property
    def feature_width(self) -> int:
        """D of the full network; C where the module has no features of its own."""
        return self._feature_width

    def features(self, inputs: Any) -> Tensor:
        """Return the inputs of the module's head ``[B, D]``, or the logits where it does not tell them."""
        ask = self.module.features if self._is_split else self.module
        answer: Tensor = ask(**inputs) if isinstance(inputs, dict) else ask(self.arranged(inputs))
        return answer

    def head(self, features: Tensor) -> Tensor:
        logits: Tensor = self.module.head(features) if self._is_split else features
        return logits

    def unit_groups(self) -> tuple[UnitGroup, ...]:
        """Return the module's own groups, with the names that they have here; empty where it has none."""
        if not callable(getattr(self.module, "unit_groups", None)):
            return ()
        return tuple(
            dataclasses.replace(
                group,
                produced=tuple((f"{_PREFIX}.{name}", dim) for name, dim in group.produced),
                consumed=tuple((f"{_PREFIX}.{name}", dim, block) for name, dim, block in group.consumed),
                modules=tuple(f"{_PREFIX}.{name}" for name in group.modules),
            )
            for group in self.module.unit_groups()
        )


def adopt(
    module: object,
    *,
    name: str,
    shape: ModelShape,
) -> Network:
    """Return a user's module as a network, after trial runs on two samples.

    Args:
        module: What the user's callable returned.
        name: Its name in the configuration, for messages.
        shape: Of what it must take and give.

    Returns:
        The module itself where it is a :class:`Network`, else a :class:`UserNetwork` around it.

    Raises:
        ConfigError: Where it is no module, does not take such inputs, does not give logits ``[B, C]`` and features
            ``[B, D]``, ties, parametrizes or derives its parameters, has one activation behind two unit groups, or is
            compiled by TorchScript.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model {name!r} must return a torch.nn.Module, but returned a {type(module).__name__}")
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        # Its backward pass does not leave gradients where they are looked for.
        raise ConfigError(f"model {name!r} must not use TorchScript; leave out torch.jit.script and torch.jit.trace")
    network = module if isinstance(module, Network) else UserNetwork(module, shape)
    network.sample = shape.sample
    if isinstance(network, UserNetwork) and network._is_split:
        network._is_split = network.has_features = _is_its_parts(network)
    features = try_out(network, name=name, outputs=shape.wanted)
    network.pixels_last = gains_by_pixels_last(network) and _takes_pixels_last(network)
    if isinstance(network, UserNetwork):
        network._feature_width = features.shape[-1]
    _check_parameters(network, name=name)
    _check_activations(network, name=name)
    network.hold_still()
    _check_derived(network, name=name)
    return network


def _is_its_parts(network: UserNetwork) -> bool:
    """Return whether the module's forward is its head after its features, in training, too.

    Where something else is between them, if only a dropout, forward is what its author means to train. A module that
    has none of its own, or gives more than one tensor, is its parts.
    """
    for training in (False, True):
        whole, parts = (_answer(network, training=training, by_parts=by_parts) for by_parts in (False, True))
        if isinstance(whole, Tensor) and not (
            isinstance(parts, Tensor)
            and (parts.shape, parts.dtype) == (whole.shape, whole.dtype)
            and torch.allclose(parts, whole, equal_nan=True)
        ):
            return False
    return True


def _answer(network: UserNetwork, *, training: bool, by_parts: bool) -> Any:
    """Return what a copy says of two samples, the same numbers drawn each time; None where it refuses them."""
    with contextlib.suppress(AttributeError, *_REFUSES_INPUTS), torch.no_grad(), torch.random.fork_rng(devices=[]):
        tried: Any = copied(network).train(training)
        inputs: Any = each(_nonzero, network.example(2))
        torch.manual_seed(0)
        if by_parts:
            return tried(inputs)
        return tried.module(**inputs) if isinstance(inputs, dict) else tried.module(inputs)
    return None


def try_out(network: Network, *, name: str, outputs: tuple[int, ...]) -> Tensor:
    """Return a network's features of two samples of zeros.

    Args:
        network: Any, stays as it is.
        name: Its name in the configuration, for messages.
        outputs: What it must give for a sample; features of more or fewer dimensions than one are none.

    Raises:
        ConfigError: It does not take such inputs, changes them in place, or gives something else.
    """
    was_training = network.training
    inputs: Any = each(torch.clone, network.example(2))
    before = _changes(inputs)
    network.eval()
    try:
        with torch.no_grad():
            features = network.features(inputs)
            logits = network.head(features)
    except (AttributeError, *_REFUSES_INPUTS) as error:
        raise ConfigError(f"model {name!r} can't take inputs {_shapes(inputs)} ({placed_error(error)})") from error
    network.train(was_training)
    if _changes(inputs) != before:
        raise ConfigError(
            f"model {name!r} changes its inputs in place, and a test's inputs are kept for the next one; write"
            " x = x - 0.5, not x.sub_(0.5), and give a first layer no inplace=True"
        )
    for answer in (features, logits):
        if not isinstance(answer, Tensor):
            raise ConfigError(f"model {name!r} must give one tensor of outputs, but gave a {type(answer).__name__}")
    if tuple(logits.shape) != (2, *outputs):
        kind = "logits" if len(outputs) == 1 else "outputs"
        raise ConfigError(
            f"model {name!r} must give {kind} {[2, *outputs]} for two samples, but gave {list(logits.shape)}"
        )
    if len(outputs) > 1:
        network.has_features = False  # by position or by pixel, where methods expect a vector for each sample
    elif features.dim() != 2:
        raise ConfigError(f"model {name!r} must give features [B, D], but gave {list(features.shape)} for two samples")
    return features


def _changes(inputs: Inputs) -> list[int]:
    """Return how often each tensor was changed in place; zeros may stay zeros, as under a ReLU."""
    return [values._version for values in all_of(inputs)]


def _shapes(inputs: Inputs) -> str:
    """Return the shapes of inputs in words."""

    def shape(values: Tensor) -> str:
        kind = "" if values.is_floating_point() else f" of {values.dtype}".replace("torch.", "")
        return f"{list(values.shape)}{kind}"

    if not isinstance(inputs, dict):
        return shape(inputs)
    return ", ".join(f"{name} {shape(values)}" for name, values in inputs.items())


def _takes_pixels_last(network: Network) -> bool:
    """Return whether it goes through; ``maps.view(len(maps), -1)`` does not, where ``maps.flatten(1)`` would."""
    was_training, network.pixels_last = network.training, True
    try:
        with torch.no_grad():
            network.eval()(network.example(2))
    except RuntimeError:
        return False
    finally:
        network.train(was_training)
    return True


def _check_derived(network: Network, *, name: str) -> None:
    """Refuse buffers that change in training but do not travel: integers, and those that ``state_dict`` leaves out.

    Batch norms count batches, which matters to those alone that average over all of them.
    """
    norms = [path for path, module in network.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    moving = moving_buffers(network)
    averaging = [path for path in norms if f"{path}.running_mean" in moving]
    if cumulative := [path for path in averaging if network.get_submodule(path).momentum is None]:
        raise ConfigError(
            f"model {name!r}: the batch norm {cumulative[0]!r} averages over all batches (momentum=None), by a count"
            " that does not travel; give it a momentum"
        )
    travelling = {*moving, *(f"{path}.num_batches_tracked" for path in norms)}
    before = {path: value for path, value in network.named_buffers() if path not in travelling}
    if not before:
        return
    tried = copied(network).train()
    zeros = network.example(2)
    # First not of zeros, whose running averages stay zero; one id may be all that a table has.
    for inputs in (each(_nonzero, zeros), zeros):
        # What it does not take in training tells nothing of its buffers.
        with contextlib.suppress(*_REFUSES_INPUTS), torch.no_grad():
            tried(inputs)
    after = dict(tried.named_buffers())
    if changed := [path for path, value in before.items() if not torch.equal(after[path], value)]:
        reason, remedy = "state_dict leaves it out", "register it with persistent=True"
        if not before[changed[0]].is_floating_point():
            reason, remedy = "only floats travel", "make it one of floats, or leave it out where nothing reads it"
        raise ConfigError(f"model {name!r}: the buffer {changed[0]!r} changes in training, but {reason}; {remedy}")


def _nonzero(values: Tensor) -> Tensor:
    """Return other inputs of the same shape and type: floats rise from above 0 to 1, all else is 1."""
    if not values.is_floating_point():
        return torch.ones_like(values)
    return torch.linspace(0, 1, values.numel() + 1, dtype=values.dtype)[1:].view(values.shape)


def check_types(network: nn.Module, *, name: str) -> None:
    """Refuse parameters of several types, or of complex numbers, among those that are trained.

    Args:
        network: A network, with its adapter if it has one: what that freezes may be of any type.
        name: Its name in the configuration, for messages.

    Raises:
        ConfigError: There are such.
    """
    paths = {parameter.dtype: path for path, parameter in trained_params(network).items()}
    if len(paths) > 1 or not all(dtype.is_floating_point for dtype in paths):
        shown = ", ".join(f"{path!r} of {dtype}".replace("torch.", "") for dtype, path in paths.items())
        raise ConfigError(
            f"model {name!r} must train parameters of one floating type, but has {shown}; give all float32, say, by"
            " module.float(), and complex ones as two of real numbers"
        )


def _check_parameters(network: Network, *, name: str) -> None:
    groups = network.unit_groups()
    cut = {name for group in groups for name, *_ in (*group.produced, *group.consumed)}
    seen: dict[int, str] = {}
    for path, parameter in network.named_parameters(remove_duplicate=False):
        first = seen.setdefault(id(parameter), path)
        if first != path and {first, path} & cut:
            raise ConfigError(
                f"model {name!r} must not tie parameters of a unit group, but {first!r} and {path!r} are the same; "
                "give each its own, or leave them out of unit_groups"
            )
    if not trained_params(network):
        raise ConfigError(f"model {name!r} must train at least one parameter, but none has requires_grad")
    if any(parametrize.is_parametrized(module) for module in network.modules()):
        raise ConfigError(f"model {name!r} must not use torch's parametrizations; remove them (parametrize.remove_...)")
    if derived := [path for path, module in network.named_modules() if _derives_weights(module)]:
        raise ConfigError(
            f"model {name!r} must not make weights of other parameters, as {derived[0]!r} does; remove torch's"
            " weight_norm, spectral_norm or prune, or give the layer a weight of its own"
        )


def _check_activations(network: Network, *, name: str) -> None:
    """Refuse an activation that several groups name: where units are scaled, those of one would be by all factors."""
    layers = dict(network.named_modules(remove_duplicate=False))
    first: dict[nn.Module, str] = {}
    for group in network.unit_groups():
        for path in group.modules:
            if path in layers and first.setdefault(layers[path], group.name) != group.name:
                raise ConfigError(
                    f"model {name!r}: the unit groups {first[layers[path]]!r} and {group.name!r} have one module for"
                    f" their activations, {path!r}; give each a module of its own"
                )


def _derives_weights(module: nn.Module) -> bool:
    """Return whether its weights are made anew in each pass: those that methods prune, count and average are others."""
    is_layer = isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
    is_stored = module._parameters.get("weight") is not None or "weight" in module._buffers
    hooks = module._forward_pre_hooks.values()
    return (is_layer and not is_stored) or any(type(hook).__module__.startswith("torch.nn.utils.") for hook in hooks)
