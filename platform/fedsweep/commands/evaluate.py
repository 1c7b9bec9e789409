"""``fedsweep evaluate``: a finished run's model on its own test set or on other data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsweep.commands.terminal.options import Overrides, Plot, examples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from fedsweep.finished.evaluated import Evaluated

EXAMPLES = examples(
    "fedsweep evaluate runs/first",
    "fedsweep evaluate runs/first --plot confusion.pdf",
    "fedsweep evaluate runs/first --data my_world:stripes --json",
    "fedsweep evaluate first.yaml --model model.safetensors --set scenario.root=/data",
)

_MOST_CLASSES, _MOST_CONFUSIONS = 20, 10
_TENTHS = ("", "_sd", "_worst10", "_best10")


def evaluate(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="The folder of a finished run, or its address; with --model also a CONFIG."),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="DATASET",
            help="Whose test samples to take, named as scenario.dataset is. [dim]the run's own[/dim]",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="FILE.safetensors", help="Test these values in place of the run's."),
    ] = None,
    overrides: Overrides = None,
    plot: Plot = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print everything on one line of JSON.")] = False,
) -> None:
    """Test a finished run's model: accuracy, loss, by class and by client, and what it takes for what.

    Where no classes are learned, the task's figures.

    On the run's own test set this is the run's last test, to the bit. A client's accuracy is the mean of its classes'
    accuracies by their shares in its training data; where a method gives clients models of their own, each is tested
    on the client's share of the test set, too. Other data are scaled and normalised as the run's own are. [b]--set[/b]
    takes keys of scenario, evaluation and runtime.
    """
    from fedsweep.commands.terminal.output import make_console, note
    from fedsweep.figures.style import checked_path
    from fedsweep.finished.evaluation import evaluate as evaluate_model

    if plot is not None:
        checked_path(plot)  # before the work
    evaluated = evaluate_model(run, data=data, model=model, overrides=overrides or [])
    if as_json:
        import json

        print(json.dumps(evaluated.tree(), allow_nan=False))
    else:
        _print(evaluated, make_console())
    for text in evaluated.notes:
        note(f"note: {text}")
    if plot is not None:
        from fedsweep.errors import ConfigError
        from fedsweep.figures.confusion import plot_confusion

        if not evaluated.confusion.size:
            raise ConfigError("--plot draws which classes are taken for which, but samples are not classified here")
        plot_confusion(evaluated.confusion, plot, class_names=evaluated.class_names)
        (note if as_json else print)(f"picture: {plot.absolute()}")


def _print(evaluated: Evaluated, console: Console) -> None:
    from fedsweep.runs.places import place_name

    has_classes = evaluated.confusion.size > 0
    accuracy = f"accuracy {evaluated.test_accuracy:.4f}, " if has_classes else ""
    print(
        f"{evaluated.data}, {evaluated.num_samples} samples: {accuracy}loss {evaluated.test_loss:.4f};"
        f" model {place_name(evaluated.model)}"
    )
    for name, value in evaluated.metrics.items():
        print(f"{name} {value:.4f}")
    if has_classes:
        show = _print_classes if len(evaluated.confusion) <= _MOST_CLASSES else _print_confusions
        show(evaluated, console)
    if has_classes or evaluated.figures:
        _print_spread(evaluated, console)


def _print_classes(evaluated: Evaluated, console: Console) -> None:
    """Print a row for each true class, with its row of the confusion matrix."""
    from fedsweep.commands.terminal.output import make_table

    labels = [f"c{label}" for label in range(len(evaluated.confusion))]
    names = ["name"] if evaluated.class_names else []
    table = make_table("class", *names, "accuracy", "samples", *labels, left=1 + len(names))
    for row in evaluated.classes():
        counts = [str(count) if count else "." for count in evaluated.confusion[row["class"]].tolist()]
        cells = [f"c{row['class']}", *([row["name"]] if names else [])]
        table.add_row(*cells, _share(row["accuracy"]), str(row["samples"]), *counts)
    console.print("\nconfusion: rows true, columns predicted", highlight=False)
    console.print(table, markup=False)


def _print_confusions(evaluated: Evaluated, console: Console) -> None:
    """Print the classes that are told worst, with those that they are taken for most often."""
    from fedsweep.commands.terminal.output import make_table

    rows = sorted((row for row in evaluated.classes() if row["samples"]), key=lambda row: row["accuracy"])
    table = make_table("class", "accuracy", "samples", "taken for", left=1)
    for row in rows[:_MOST_CONFUSIONS]:
        own = evaluated.confusion[row["class"]]
        others = [k for k in (-own).argsort(kind="stable")[:4].tolist() if own[k] and k != row["class"]][:3]
        taken = " ".join(f"{_named(evaluated.class_names, k)}:{own[k]}" for k in others)
        name = _named(evaluated.class_names, row["class"])
        table.add_row(name, _share(row["accuracy"]), str(row["samples"]), taken)
    console.print(f"\nthe {min(_MOST_CONFUSIONS, len(rows))} worst of {len(rows)} classes (--json has all)")
    console.print(table, markup=False)


def _print_spread(evaluated: Evaluated, console: Console) -> None:
    from fedsweep.commands.terminal.output import make_table

    table = make_table("over", "mean", "sd", "worst 10 %", "best 10 %")
    figures, own = evaluated.figures, "own tests" if evaluated.has_own_tests else "classes"
    titles = {"class": "classes", "client": f"clients, on their {own}", "personal": "clients' own models"}
    for name in (name for name in figures if not name.endswith(_TENTHS[1:])):
        table.add_row(titles[name.partition("_")[0]], *(_share(figures.get(f"{name}{end}")) for end in _TENTHS))
    console.print()
    console.print(table)


def _named(names: Sequence[str], label: int) -> str:
    return names[label] if names else f"c{label}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
