"""The networks by name, and how one is built so that the same stream gives the same initial values.

A constructor's signature is the schema of a model's options and their defaults: nothing is declared twice.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fedsweep.errors import ConfigError, lacks_memory
from fedsweep.models.adapters import Adapter
from fedsweep.models.network import ModelShape, Network, gains_by_pixels_last
from fedsweep.models.networks.autoencoders import MaskedAutoencoder, Vae
from fedsweep.models.networks.chains import Cnn, ConvNet3, FeddhadCnn, FedstgCnn, LeNet5, Mlp, Vgg11
from fedsweep.models.networks.fcn import Fcn
from fedsweep.models.networks.resnet import FeddhadResNet18, ResNet18
from fedsweep.models.networks.transformer import Transformer
from fedsweep.models.networks.vit import VitTiny
from fedsweep.models.user_network import adopt, try_out
from fedsweep.parameters.signature import signature_of
from fedsweep.plugins import call_builder
from fedsweep.streams import Stream


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """A network that can be named in a configuration.

    Attributes:
        builder: Takes ``input_shape``, ``num_classes`` and the model's options by keyword.
        summary: One line on what it is.
        source: Where it comes from.
        classifies: It takes pictures and gives logits.
    """

    builder: Callable[..., Network]
    summary: str
    source: str
    classifies: bool = True


# How torch says of a size that it is beyond any memory.
_TOO_LARGE = ("Overflow when unpacking", "Storage size calculation overflowed")

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
    "transformer": ModelEntry(
        builder=Transformer,
        summary="small causal transformer over tokens",
        source="Vaswani et al., NIPS 2017",
        classifies=False,
    ),
    "vae": ModelEntry(
        builder=Vae, summary="small variational autoencoder", source="Kingma and Welling, ICLR 2014", classifies=False
    ),
    "masked_autoencoder": ModelEntry(
        builder=MaskedAutoencoder,
        summary="small autoencoder that does not see a share of its inputs",
        source="Vincent et al., ICML 2008",
        classifies=False,
    ),
    "fcn": ModelEntry(
        builder=Fcn, summary="small fully convolutional network", source="Long et al., CVPR 2015", classifies=False
    ),
}


def make_network(
    builder: Callable[..., object],
    name: str,
    options: Mapping[str, object],
    *,
    shape: ModelShape,
    stream: Stream,
) -> Network:
    """Return a new network on the CPU, its initial values determined by the stream.

    Torch's global generator is seeded while the network is built, and put back afterwards. A callable of one's own
    must draw from it alone (torch's initialisers do): numpy's and Python's generators are not seeded.

    Args:
        builder: Is called with ``input_shape``, ``num_classes`` and the options, and with ``outputs``, a sample's,
            where it names them; returns a module that maps inputs to logits.
        name: What the configuration calls it; one's own module is adopted as a network.
        options: The model's own options, checked.
        shape: Of what it takes and gives.
        stream: Where the initial values come from.

    Raises:
        ConfigError: Where the input's size is wrong, or one's own module does not fit.
    """
    # The data may have classes beside what is learned; the package's own networks make what the task asks for.
    is_vector = name in MODELS and len(shape.wanted) == 1
    num_classes = shape.wanted[0] if is_vector else shape.num_classes

    def made() -> object:
        wanted = {"outputs": shape.wanted} if "outputs" in signature_of(builder) else {}
        with _within_memory(name, options):
            return builder(input_shape=shape.input_shape, num_classes=num_classes, **wanted, **options)

    with stream.drawn_globally(), torch.device("cpu"):
        if name not in MODELS:
            model = call_builder("model", name, made, gives=object)
            return adopt(model, name=name, shape=shape)
        if isinstance(shape.input_shape, dict):
            raise ConfigError(f"model {name!r} takes one input, but the data set has {', '.join(shape.input_shape)}")
        network = typing.cast(Network, made())
    network.sample = shape.sample
    if shape.sample is not None or shape.outputs or not MODELS[name].classifies:
        try_out(network, name=name, outputs=shape.wanted)
    network.pixels_last = gains_by_pixels_last(network)
    return network


def adapt(network: Network, adapter: Adapter, stream: Stream) -> None:
    """Attach an adapter to a network, its initial values determined by the stream."""
    with stream.drawn_globally(), torch.device("cpu"), _within_memory("with its adapter", vars(adapter)):
        adapter.attach(network)


@contextmanager
def _within_memory(name: str, options: Mapping[str, object]) -> Iterator[None]:
    """Refuse a network that no memory holds: it is no bug."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        text = str(error).strip().partition("\n")[0]
        if not lacks_memory(error) and not any(phrase in text for phrase in _TOO_LARGE):
            raise
        listing = ", ".join(f"{key}={value}" for key, value in options.items() if value is not None)
        raise ConfigError(f"the model {name} ({listing}) is too large to be made: {text}") from error
