"""Who pays, in the terminal and on the page."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from fedsweep.reports.compare import compared_runs
from fedsweep.reports.page import build_report, render
from fedsweep.reports.sources import find_sources
from fedsweep.reports.who_pays import print_shares, share_rows
from fedsweep.results.worlds import study_of
from fedsweep.runs.run_folder import RunFolder
from fedsweep.testing import tiny_record

PAID = {"": 0.75, "_sd": 0.125, "_worst10": 0.25, "_best10": 1.0}


def run(folder: Path, seed: int, extra: dict[str, float], *, method: str = "fedavg", clients: int = 2) -> None:
    run = RunFolder.create(folder, overwrite=False)
    run.write_config(f"name: a\nseed: {seed}\nscenario: {{clients: {clients}}}\nmethod: {{name: {method}}}\n")
    run.write_rounds([tiny_record(test_accuracy=0.5, test_loss=1.0, extra=extra)])
    run.write_result({"status": "finished", "rounds": 1})


def test_a_setting_has_a_row_for_each_of_whom_it_was_asked(tmp_path: Path) -> None:
    for seed, shift in ((0, 0.0), (1, 0.0625)):
        run(tmp_path / str(seed), seed, {f"client_accuracy{part}": value - shift for part, value in PAID.items()})
    study = study_of(compared_runs([tmp_path]))
    (row,) = share_rows(study)
    assert (row.mean, row.sd, row.worst, row.best) == (0.71875, 0.09375, 0.21875, 0.96875)
    shown = io.StringIO()
    print_shares(study, Console(file=shown, width=120))
    assert "clients, on their own classes  a" in shown.getvalue()
    assert "21.88%" in shown.getvalue()
    page = render(
        build_report(find_sources([str(tmp_path)], uri=None)), made=datetime(2026, 1, 1, tzinfo=UTC), script="beside"
    )
    assert "Who pays" in page
    assert "accuracy for the worst tenth of the clients" in page


def test_rows_of_a_world_stand_together_and_name_it(tmp_path: Path) -> None:
    for method in ("fedavg", "fedavgm"):
        for clients in (2, 3):
            run(tmp_path / f"{method}{clients}", 0, {"client_accuracy": clients / 4}, method=method, clients=clients)
    study = study_of(compared_runs([tmp_path]))
    rows = [(row.world, row.label, row.mean) for row in share_rows(study)]
    two, three = "clients=2", "clients=3"
    assert rows == [(two, "FedAvg", 0.5), (two, "FedAvgM", 0.5), (three, "FedAvg", 0.75), (three, "FedAvgM", 0.75)]
    shown = io.StringIO()
    print_shares(study, Console(file=shown, width=120))
    assert "clients=3  FedAvgM" in shown.getvalue()


def test_without_such_tests_nothing_is_said(tmp_path: Path) -> None:
    run(tmp_path / "0", 0, {})
    shown = io.StringIO()
    print_shares(study_of(compared_runs([tmp_path])), Console(file=shown))
    assert shown.getvalue() == ""
    assert "Who pays" not in render(
        build_report(find_sources([str(tmp_path)], uri=None)), made=datetime(2026, 1, 1, tzinfo=UTC)
    )


def test_the_page_has_the_picture_of_who_talked_with_whom(tmp_path: Path) -> None:
    run(tmp_path / "0", 0, {})
    (tmp_path / "0" / "pictures").mkdir(exist_ok=True)
    picture = tmp_path / "0" / "pictures" / "links.png"
    picture.write_bytes(b"PNG")
    report = build_report(find_sources([str(tmp_path)], uri=None))
    assert [address for _, address in report.links] == ["data:image/png;base64,UE5H"]
    assert "Who talked with whom" in render(report, made=datetime(2026, 1, 1, tzinfo=UTC), script="beside")
    picture.rename(tmp_path / "elsewhere.png")
    picture.symlink_to(tmp_path / "elsewhere.png")
    assert not build_report(find_sources([str(tmp_path)], uri=None)).links
