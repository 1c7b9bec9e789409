"""The networks by name, and how one is built so that the same stream gives the same initial values.

A constructor's signature is the schema of a model's options and their defaults: nothing is declared twice.
"""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from fedsweep.errors import ConfigError, unknown_name
from fedsweep.models.convnet import ConvNet3
from fedsweep.models.feddhad_cnn import FeddhadCnn
from fedsweep.models.fedstg_cnn import FedstgCnn
from fedsweep.models.lenet import Cnn, LeNet5
from fedsweep.models.mlp import Mlp
from fedsweep.models.network import InputShape, Network
from fedsweep.models.resnet import FeddhadResNet18, ResNet18
from fedsweep.models.user_network import adopt
from fedsweep.models.vgg import Vgg11
from fedsweep.models.vit import VitTiny
from fedsweep.streams import Stream


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """A network that can be named in a configuration.

    Attributes:
        builder: Takes ``input_shape``, ``num_classes`` and the model's options by keyword.
        summary: One line on what it is.
        source: Where it comes from.
    """

    builder: Callable[..., Network]
    summary: str
    source: str


MODELS: Mapping[str, ModelEntry] = {
    "mlp": ModelEntry(builder=Mlp, summary="two hidden layers of 128, any input size", source="DynaFed"),
    "cnn": ModelEntry(builder=Cnn, summary="LeNet-5 with layer normalisation", source="DynamicFL"),
    "lenet5": ModelEntry(builder=LeNet5, summary="LeNet-5 with ReLU and max-pooling", source="FedDHAD"),
    "feddhad_cnn": ModelEntry(builder=FeddhadCnn, summary="three 3x3 convolutions, one hidden layer", source="FedDHAD"),
    "convnet3": ModelEntry(builder=ConvNet3, summary="three instance-normalised convolutions", source="DynaFed"),
    "fedstg_cnn": ModelEntry(builder=FedstgCnn, summary="three batch-normalised convolutions", source="FedStg"),
    "resnet18": ModelEntry(builder=ResNet18, summary="pre-activation ResNet-18 with group norm", source="DynamicFL"),
    "feddhad_resnet18": ModelEntry(
        builder=FeddhadResNet18, summary="ResNet-18 with batch norm and biases", source="FedDHAD"
    ),
    "vgg11": ModelEntry(builder=Vgg11, summary="VGG11 without batch norm", source="FedDHAD"),
    "vit_tiny": ModelEntry(
        builder=VitTiny, summary="vision transformer of four small blocks", source="Dosovitskiy et al., ICLR 2021"
    ),
}


def model_names() -> tuple[str, ...]:
    """The names of the built-in models, in the order of :data:`MODELS`."""
    return tuple(MODELS)


def model_options(name: str) -> dict[str, inspect.Parameter]:
    """The options of a built-in model with their annotations and defaults, by name.

    Raises:
        ConfigError: Where no built-in model has that name.
    """
    if name not in MODELS:
        raise ConfigError(f"model.name: {unknown_name('model', name, MODELS)}")
    parameters = inspect.signature(MODELS[name].builder, eval_str=True).parameters
    return {key: value for key, value in parameters.items() if key not in ("input_shape", "num_classes")}


def build_model(name: str, *, input_shape: InputShape, num_classes: int, stream: Stream, **options: object) -> Network:
    """A new network on the CPU, its initial values determined by the stream.

    Torch's global generator is seeded while the network is built, and put back afterwards. A callable of one's own
    must draw from it alone (torch's initialisers do): numpy's and Python's generators are not seeded.

    Args:
        name: A built-in model, or ``package.module:callable`` for one's own: it is called with ``input_shape``,
            ``num_classes`` and the options, and returns a module that maps inputs to logits.
        input_shape: Channels, height and width of one sample.
        num_classes: C, at least 2.
        stream: Where the initial values come from.
        options: The model's own options.

    Raises:
        ConfigError: Where the name, an option or the input's size is wrong, or one's own module does not fit.
    """
    if ":" in name:
        builder = _import_builder(name)
        _check_call(name, builder, options)
    else:
        _check_options(name, options)
        builder = MODELS[name].builder
    with _seeded(stream):
        model = builder(input_shape=input_shape, num_classes=num_classes, **options)
        if ":" in name:
            return adopt(model, name=name, input_shape=input_shape, num_classes=num_classes)
    return typing.cast(Network, model)


def _check_options(name: str, options: Mapping[str, object]) -> None:
    known = model_options(name)
    for key, value in options.items():
        if key not in known:
            message = unknown_name("option", key, known) if known else f"unknown option {key!r} (it takes none)"
            raise ConfigError(f"model {name!r}: {message}")
        wanted = known[key].annotation
        fits = isinstance(value, (int, float) if wanted is float else wanted) and not isinstance(value, bool)
        if not fits:
            raise ConfigError(f"model.{key} of model {name!r} must be of type {wanted.__name__}, but got {value!r}")


def _import_builder(name: str) -> Callable[..., nn.Module]:
    module_name, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise ConfigError(
            f"model.name: can't import {module_name!r} of {name!r} ({error}); install it or run where it can be found"
        ) from error
    except AttributeError as error:
        known = [key for key, value in vars(importlib.import_module(module_name)).items() if callable(value)]
        raise ConfigError(
            f"model.name: {unknown_name(f'callable of module {module_name!r}:', attribute, known)}"
        ) from error
    if not callable(found):
        raise ConfigError(f"model.name: {name!r} must be callable, but is a {type(found).__name__}")
    return typing.cast("Callable[..., nn.Module]", found)


def _check_call(name: str, builder: Callable[..., object], options: Mapping[str, object]) -> None:
    signature = inspect.signature(builder)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    for key in options:
        if key not in signature.parameters and not takes_any:
            raise ConfigError(f"model {name!r}: {unknown_name('option', key, signature.parameters)}")
    try:
        signature.bind(input_shape=(1, 1, 1), num_classes=2, **options)
    except TypeError as error:
        raise ConfigError(
            f"model {name!r} must be callable as f(input_shape=, num_classes=, **options): {error}"
        ) from error


@contextmanager
def _seeded(stream: Stream) -> Iterator[None]:
    """Seed torch's global CPU generator, which initialisers draw from, and put it back afterwards."""
    # devices=[] and the generator's own method leave GPUs alone; torch.manual_seed would reseed them too.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(stream.seed(64))
        yield
