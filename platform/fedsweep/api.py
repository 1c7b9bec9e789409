"""What ``import fedsweep`` offers to programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedsweep.catalog import bound
from fedsweep.config.load import load_config
from fedsweep.config.schema import Config
from fedsweep.driver.observers import Observer
from fedsweep.driver.phases import Phases
from fedsweep.driver.run import Launch, plan_run, run_plan
from fedsweep.errors import DataError, OutputError
from fedsweep.models.initial import weights_vector
from fedsweep.models.registry import build_model
from fedsweep.runs.default_folder import default_folder
from fedsweep.runs.run_folder import RunFolder
from fedsweep.streams import stream
from fedsweep.tracking.factory import make_observers
from fedsweep.trees import layout_of, load_vector

if TYPE_CHECKING:
    import pyarrow as pa

# Of an image's side, and of the classes: a network for more would fill the memory before its file is read.
_LARGEST_SIZE = 50_000


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run.

    Attributes:
        folder: Where its files are.
        config: The resolved configuration.
        summary: What ``result.json`` holds.
    """

    folder: Path
    config: Config
    summary: Mapping[str, Any]

    @property
    def rounds(self) -> pa.Table:
        """One row per round."""
        return RunFolder(self.folder).rounds_table()

    @property
    def model(self) -> nn.Module:
        """The final global model, in evaluation mode."""
        return load_model(self.folder)


def run(
    config: Mapping[str, Any] | str | Path | Config,
    *,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    observers: Sequence[Observer] = (),
) -> Result:
    """Run one experiment.

    Args:
        config: A configuration, a mapping of its keys, a YAML file, or a preset's name.
        overrides: ``KEY=VALUE`` with dotted keys, as for ``fedsweep run --set``.
        out: The run folder; by default ``runs/<name>-<timestamp>``.
        observers: Further observers beside those that the configuration asks for.

    Raises:
        InputError: Something in the configuration is wrong or not there; nothing was written.
        RunError: The run failed on its way.
    """
    loaded = config if isinstance(config, Config) else load_config(config, overrides)
    phases = Phases(first="plan")
    plan = plan_run(loaded, phases=phases)
    folder = Path(out) if out is not None else default_folder(plan.config)
    folder = folder.absolute()
    watching = [*make_observers(plan.config, folder), *observers]
    summary = run_plan(plan, folder, observers=watching, launch=Launch(phases=phases))
    return Result(folder=folder, config=plan.config, summary=summary)


def load(folder: str | Path) -> Result:
    """A run that was made before.

    Args:
        folder: A run folder.

    Raises:
        InputError: The folder holds no finished run, or files that are not a run's.
    """
    path = _existing(folder)
    return Result(folder=path, config=load_config(path / "config.yaml"), summary=RunFolder(path).read_result())


def load_model(folder: str | Path) -> nn.Module:
    """The final global model of a finished run, in evaluation mode.

    Args:
        folder: A run folder.

    Raises:
        InputError: The folder holds no finished run, or its model does not fit its configuration.
    """
    path = _existing(folder)
    run_folder = RunFolder(path)
    run_folder.model_bytes()
    run_folder.read_config()
    config = load_config(path / "config.yaml")
    model = _model_of(config, run_folder.read_result(), path)
    layout = layout_of(model)
    weights = run_folder.read_model(num_values=layout.num_values)
    source = str(path / "model.safetensors")
    load_vector(model, layout, weights_vector(weights, layout, source=source, model=config.model.name))
    return model.eval()


def _existing(folder: str | Path) -> Path:
    path = Path(folder)
    if not path.is_dir():
        raise OutputError(f"{path}: there is no such folder")
    return path


def _model_of(config: Config, result: Mapping[str, Any], path: Path) -> nn.Module:
    """The configured network, for data of the shape that the result names; needs neither the data nor their device."""
    shape, num_classes = result.get("input_shape"), result.get("num_classes")
    sizes = shape if isinstance(shape, list) else []
    given = [*sizes, num_classes]
    if len(sizes) != 3 or not all(type(size) is int and 0 < size <= _LARGEST_SIZE for size in given):
        raise DataError(
            f"{path / 'result.json'}: it must give input_shape and num_classes, up to {_LARGEST_SIZE} each, but has"
            f" {str(shape)[:80]!r} and {str(num_classes)[:80]!r}"
        )
    return build_model(
        config.model.name,
        input_shape=(sizes[0], sizes[1], sizes[2]),
        num_classes=int(num_classes or 0),
        stream=stream(config.seed, "model"),
        **bound(config, "model").parameters,
    )
