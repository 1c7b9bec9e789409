"""Pretrained models of Hugging Face's ``transformers`` from a local folder: ``model: {name: hf:./FOLDER}``.

The folder is one that ``save_pretrained`` wrote, or a copy of one of the hub's: ``config.json``, and
``model.safetensors`` with the values. Nothing is fetched, no code that lies there is run, nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_type_hints

import torch
from torch import Tensor, nn

from fedsweep.errors import ConfigError
from fedsweep.models.initial import weights_sha256
from fedsweep.world.data.torchvision_compat import import_transformers

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_KEY = "model.name"


def pretrained(place: str) -> Callable[..., nn.Module]:
    """Return the builder of a folder's model, whose parameters are a configuration's.

    Args:
        place: What follows ``hf:``: a local folder, which begins with ``.``, ``/`` or ``~``.

    Raises:
        ConfigError: There is no such folder, or no model in it.
        DataError: Its values can't be read.
    """
    if not place.startswith((".", "/", "~")):
        raise ConfigError(f"hf:{place} is no local folder; save the model with save_pretrained and name hf:./FOLDER")
    folder = Path(place).expanduser().absolute()
    if not (folder / CONFIG).is_file():
        what = f"has no {CONFIG}" if folder.is_dir() else "is not there"
        raise ConfigError(f"hf:{place}: the folder {folder} {what}; transformers' save_pretrained writes one")
    file = folder / WEIGHTS
    digest = weights_sha256(file, key=_KEY) if file.exists() else None

    def build(
        *,
        input_shape: Any,
        num_classes: int,
        outputs: tuple[int, ...],
        sha256: str | None = digest,
        dtype: Literal["float32", "bfloat16"] = "float32",
    ) -> nn.Module:
        """Build the model for a task: scores of a sample, or of the word at each position.

        Args:
            input_shape: Of one sample; ``input_ids`` and maybe ``attention_mask``, or the ids alone.
            num_classes: Outputs, or words.
            outputs: Of one sample: (C,), or (T, V).
            sha256: Of model.safetensors; a run's config.yaml has it. Null: there is none, the values are drawn.
            dtype: Type of the values; what is trained in bfloat16 has few digits, an adapter's own are float32.
        """
        if sha256 != digest:
            raise ConfigError(f"model.sha256 is {sha256}, but {file} has {digest}: it is another model")
        return PretrainedModel(_loaded(folder, outputs=outputs, has_values=digest is not None, dtype=dtype))

    # Types, not their names: an actor is sent the function without what this module knows.
    build.__annotations__ = get_type_hints(build)
    return build


class PretrainedModel(nn.Module):
    """A model of ``transformers`` that gives its scores alone.

    Args:
        model: Whose output has ``logits``.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return scores [B, C] or [B, T, V] of ids [B, T]; the mask [B, T] is 0 where a text has ended."""
        scores: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return scores


def _loaded(folder: Path, *, outputs: tuple[int, ...], has_values: bool, dtype: str) -> nn.Module:
    transformers = import_transformers()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # Local files alone, and none of their code.
    safe = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **safe)
        if len(outputs) == 1:
            config.num_labels = outputs[0]
            family = transformers.AutoModelForSequenceClassification
            if config.pad_token_id is None:
                config.pad_token_id = config.eos_token_id  # decoders score a text at its last token but padding
        elif len(outputs) == 2 and outputs[1] == config.vocab_size:
            family = transformers.AutoModelForCausalLM
            config.is_decoder, config.use_cache = True, False
        else:
            raise ConfigError(
                f"hf:{folder} has {config.vocab_size} words; it gives a score for each class of a sample or for each of"
                f" its words at a position, but the task asks for outputs {list(outputs)}"
            )
        # Eager attention is plain products, the same on every machine.
        wanted = {"attn_implementation": "eager", "dtype": getattr(torch, dtype)}
        if has_values:
            model = family.from_pretrained(folder, config=config, use_safetensors=True, **safe, **wanted)
        else:
            model = family.from_config(config, trust_remote_code=False, **wanted)
    except ConfigError:
        raise
    except Exception as error:  # its readers raise what they like, for what is damaged as for what is not known
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"hf:{folder} can't be loaded ({type(error).__name__}: {reason})") from error
    network: nn.Module = model
    _with_linear_layers(network, transformers.pytorch_utils.Conv1D)
    return network


def _with_linear_layers(model: nn.Module, transposed: type[nn.Module]) -> None:
    """Put linear layers, which adapters know, in the place of GPT-2's own: the same with their weights turned."""
    for path, layer in list(model.named_modules()):
        if isinstance(layer, transposed):
            weight, bias = (dict(layer.named_parameters())[name] for name in ("weight", "bias"))
            inputs, outputs = weight.shape
            linear = nn.Linear(inputs, outputs, device="meta")
            linear.weight, linear.bias = nn.Parameter(weight.detach().t().contiguous()), bias
            above, _, name = path.rpartition(".")
            setattr(model.get_submodule(above), name, linear)
