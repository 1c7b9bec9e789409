"""One thread per process: the tests' arrays are tiny, and idle helper threads cost more than they bring.

Tests run in three processes, each file in one of them (``scripts/check``): what starts Ray mostly waits for processes
to come up, and all else runs meanwhile. A cluster and the processes on it take seconds to come up, so tests that ask
for ``pool`` or ``shared_ray`` share one, whatever file they are in, and run in one process; before any other test it is
ended. The pictures of a run take four fifths of a tiny run's time, so they are drawn for tests that ask for
``pictures`` alone.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fedsweep.processes import collect_seldom

if TYPE_CHECKING:
    from ray_pool import Pool

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
# A shell has these ignored in what it runs in the background, or by nohup; tests of signals have to hear them.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)
# At Ray's own 15 its workers hardly come forward beside other tests.
os.environ.setdefault("RAY_worker_niceness", "10")


# As in every process of ours; what tests import is some million objects, which are never garbage.
collect_seldom()


def pytest_collection_finish() -> None:
    gc.freeze()
    # Pytest listens at each logger that keeps its messages to itself, in each phase of each test: torch has some fifty.
    for name, logger in logging.Logger.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


class SharedRay:
    """Ray with three CPUs, which is started and ended more than once where other tests come between."""

    def __init__(self) -> None:
        self._cluster = contextlib.ExitStack()
        self._pool: Pool | None = None
        self._is_up = False

    def start(self) -> None:
        from fedsweep.fleet.ray_cluster import ClusterNeeds, ray_cluster

        if not self._is_up:
            self._cluster.enter_context(ray_cluster(None, ClusterNeeds(actors=3, store_bytes=2**28)))
            self._is_up = True

    def end(self) -> None:
        self._is_up, self._pool = False, None
        self._cluster.close()

    def pool(self) -> Pool:
        from ray_pool import Pool

        self._pool = self._pool or Pool()
        return self._pool


_SHARED = SharedRay()


@pytest.fixture(scope="session")
def shared_ray() -> Any:
    """Ray, connected to the cluster that is shared; commands and runs in this process use it, too."""
    import ray

    return ray


@pytest.fixture
def pool(shared_ray: Any) -> Pool:
    """Processes that are there, for client actors; see ``shared/ray_pool.py``."""
    return _SHARED.pool()


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow store without runs; making one takes seconds, so it is made once and copied."""
    from fedsweep.tracking.mlflow_store import open_store, sqlite_uri

    place = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = place.parent  # made by the first of the processes; the others wait for it, as runs do
    path = place / "empty-mlflow.db"
    open_store(sqlite_uri(path))
    return path


@pytest.fixture
def store(empty_store: Path, tmp_path: Path) -> Path:
    """The file of a store of the test's own."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return tmp_path / "mlflow.db"


@pytest.fixture
def short_first_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """PruneFL's first stage takes a tenth of its ten thousand steps, which take seconds and show no more."""
    from fedsweep.algorithms.prunefl import first_stage

    for name in ("_STEPS", "_EVERY"):
        monkeypatch.setattr(first_stage, name, getattr(first_stage, name) // 10)


_DRAWING = {"pictures": False}


@pytest.fixture(scope="module")
def pictures() -> Iterator[None]:
    """From here on the module's runs in this process have their pictures, as they have outside of tests."""
    _DRAWING["pictures"] = True
    yield
    _DRAWING["pictures"] = False


@pytest.fixture(scope="session", autouse=True)
def _no_pictures_unless_asked() -> None:
    from fedsweep.figures.of_run import PictureObserver

    finished = PictureObserver.finished

    def drawn_where_asked(observer: PictureObserver, status: str, result: Mapping[str, Any]) -> None:
        if _DRAWING["pictures"]:
            finished(observer, status, result)

    PictureObserver.finished = drawn_where_asked  # type: ignore[method-assign]


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> None:
    """What tests write in this process need not outlast a power cut; an fsync takes a millisecond and more."""
    os.fsync = os.fstat  # type: ignore[assignment]  # which refuses what fsync refuses


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The shared cluster is there for those who ask for it alone; first weights do not depend on the tests before."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    if _asks(item):
        _SHARED.start()
    else:
        _SHARED.end()


def pytest_sessionfinish() -> None:
    _SHARED.end()


def _asks(item: pytest.Item) -> bool:
    return "shared_ray" in getattr(item, "fixturenames", ())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First those who share the cluster, so that it is started once; then files with what may take longest."""
    limits = dict.fromkeys((item.path for item in items), 0.0)
    for item in items:
        limits[item.path] = max(limits[item.path], _limit_s(item))
    items.sort(key=lambda item: (not _asks(item), -limits[item.path]))


def _limit_s(item: pytest.Item) -> float:
    """Its time limit; without one of its own, what starts Ray or takes long comes before the rest."""
    if marker := item.get_closest_marker("timeout"):
        return float(marker.args[0])
    return sum(item.get_closest_marker(name) is not None for name in ("ray", "slow"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``: tests that share the cluster are played by one process, in the order above."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            test = nodeid.split("[")[0].rpartition("::")[2]
            return "shared Ray" if test in _sharing(config.rootpath / file) else file

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@functools.cache
def _sharing(file: Path) -> set[str]:
    """Names of a file's tests that ask for the cluster, by fixtures of the file, too; by its text alone."""
    functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    marked = {
        f.name: {word.value for mark in f.decorator_list for word in ast.walk(mark) if isinstance(word, ast.Constant)}
        for f in functions
    }
    asked = {f.name: {each.arg for each in f.args.args} | marked[f.name] for f in functions}
    names = {"pool", "shared_ray"}
    while more := {name for name, fixtures in asked.items() if fixtures & names} - names:
        names |= more
    return names
