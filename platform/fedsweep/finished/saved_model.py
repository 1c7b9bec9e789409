"""The model that a finished run left, without its data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fedsweep.catalog import bound
from fedsweep.config.load import load_config
from fedsweep.config.schema import Config
from fedsweep.driver.run import plain_torch
from fedsweep.errors import DataError, OutputError
from fedsweep.experiment.build import model_builder
from fedsweep.models.initial import weights_vector
from fedsweep.runs.remote_folder import read_from
from fedsweep.runs.run_folder import RunFolder
from fedsweep.tasks.base import Task
from fedsweep.tasks.kinds import Classification
from fedsweep.trees import constants_sha256, layout_of, load_vector

# Of an image's side, of features, and of classes, which may be a vocabulary's words: a network for more would fill the
# memory before its file is read.
_LARGEST_SIZE = 1_000_000


def load_model(folder: str | Path) -> nn.Module:
    """Load the final global model of a finished run, in evaluation mode.

    Args:
        folder: A run folder, or its address.

    Raises:
        InputError: The folder holds no finished run, or its model does not fit its configuration.
    """
    with read_from([folder]) as (place,), plain_torch():
        return _loaded(existing(place))


def _loaded(path: Path) -> nn.Module:
    run_folder = RunFolder(path)
    run_folder.check_is_run()
    run_folder.model_bytes()
    run_folder.read_config()
    config = load_config(path / "config.yaml")
    model = _model_of(config, run_folder.read_result(), path)
    layout = layout_of(model)
    weights = run_folder.read_model(num_values=layout.num_values, base=constants_sha256(model))
    source = str(path / "model.safetensors")
    load_vector(model, layout, weights_vector(weights, layout, source=source, model=config.model.name))
    return model.eval()


def existing(folder: str | Path) -> Path:
    """Return a folder that is there; otherwise an OutputError."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise OutputError(f"{path}: there is no such folder")
    return path


def _model_of(config: Config, result: Mapping[str, Any], path: Path) -> nn.Module:
    """Make the configured network, for data of the shape that the result names; needs no data and no device."""
    facts = {key: result.get(key) for key in ("input_shape", "input_types", "num_classes", "target_shape")}
    sizes = [facts["num_classes"], *_listed(facts["input_shape"]), *_listed(facts["target_shape"] or [])]
    if not all(type(size) is int and 0 <= size <= _LARGEST_SIZE for size in sizes):
        raise DataError(
            f"{path / 'result.json'}: it must give input_shape and num_classes, up to {_LARGEST_SIZE} each, but has"
            f" {str(facts['input_shape'])[:80]!r} and {str(facts['num_classes'])[:80]!r}"
        )
    try:
        types = np.dtype(_as_fields(facts["input_types"] or "u1"))
        inputs = np.zeros((1, *_listed(facts["input_shape"])), types)
    except (TypeError, ValueError) as error:
        raise DataError(f"{path / 'result.json'}: input_types says nothing of inputs: {error}") from error
    item, shape = bound(config, "scenario.task"), tuple(_listed(facts["target_shape"] or []))
    if item is None:
        task: Task = Classification(num_classes=int(facts["num_classes"] or 0))
    else:
        task = item.build(num_classes=facts["num_classes"], target_shape=shape)
    return model_builder(config, inputs=inputs, task=task)()


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [None]


def _as_fields(types: Any) -> Any:
    """Return what numpy makes a type of: JSON has lists where it wants pairs."""
    if not isinstance(types, list):
        return types
    return [(name, kind, tuple(shape[0])) if shape else (name, kind) for name, kind, *shape in types]
