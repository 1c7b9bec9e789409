from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from fedsweep import plugins as references
from fedsweep.errors import ConfigError
from fedsweep.plugins import find_plugin, resolve_reference


def test_a_reference_names_a_callable_of_a_module() -> None:
    assert resolve_reference("dataset", "pathlib:Path.home") == Path.home


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (":function", "must have the form"),
        ("module:", "must have the form"),
        ("no_such_module_here:function", "'no_such_module_here' cannot be imported.*PYTHONPATH"),
        ("pathlib:Pth", "did you mean 'Path'"),
        ("__main__:mine", "this program defines no 'mine'; take up the run from the script or notebook that does"),
        ("math:pi", "must be callable, but is a float"),
    ],
)
def test_a_wrong_reference_is_refused(reference: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_reference("dataset", reference)


def test_a_module_that_fails_on_import_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_failing_module.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    place = r"<module> \(own_failing_module.py, line 1\): ZeroDivisionError: division by zero\)$"
    with pytest.raises(ConfigError, match=place):
        resolve_reference("dataset", "own_failing_module:function")
    (tmp_path / "own_stopping_module.py").write_text("class Stop(BaseException): ...\nraise Stop\n")
    with pytest.raises(ConfigError, match=r"<module> \(own_stopping_module.py, line 2\): Stop\)$"):
        resolve_reference("dataset", "own_stopping_module:function")


def test_an_installed_entry_point_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {"fedsweep.datasets": [EntryPoint("home", "pathlib:Path.home", "fedsweep.datasets")]}
    monkeypatch.setattr(references, "entry_points", lambda group: groups.get(group, []))
    assert find_plugin("dataset", "home", ["digits"]) == Path.home
    with pytest.raises(ConfigError, match=r"did you mean 'home'.*known: digits, home"):
        find_plugin("dataset", "hom", ["digits"])
