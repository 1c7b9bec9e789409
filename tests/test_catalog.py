from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from fedsweep.catalog import bind_spec, bound, build_method, method_builder, method_names, resolve
from fedsweep.config.load import load_config
from fedsweep.config.schema import Config
from fedsweep.errors import ConfigError
from fedsweep.method import FederatedMethod, MethodSettings


def own(*, local_steps: int = 3, weight: float = 0.5) -> FederatedMethod:
    return FederatedMethod(name="own", source="here", settings=MethodSettings(local_steps=local_steps))


def equal(*, equal_steps: bool = True) -> FederatedMethod:
    return FederatedMethod(name="equal", source="there", settings=MethodSettings(equal_steps=equal_steps))


@pytest.fixture
def user_module() -> Iterator[None]:
    module: Any = ModuleType("users_methods")
    module.own, module.equal, module.wrong, module.number = own, equal, lambda: 3, 5
    sys.modules["users_methods"] = module
    yield
    del sys.modules["users_methods"]


def test_registered_methods_are_listed() -> None:
    names = method_names()
    assert {"fedavg", "fedsgd", "fedprox", "dynamicsgd", "dynamicfl"} <= set(names)
    assert list(names) == sorted(names)


@pytest.mark.parametrize("name", method_names())
def test_each_registered_method_has_a_builder_with_a_docstring(name: str) -> None:
    assert method_builder(name).__doc__


def test_unknown_method_is_an_error_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown method 'fedvag'; did you mean 'fedavg'"):
        method_builder("fedvag")


@pytest.mark.usefixtures("user_module")
def test_own_method_is_built_from_its_module() -> None:
    method = build_method({"name": "users_methods:own", "local_steps": 7})
    assert (method.name, method.settings.local_steps) == ("own", 7)


@pytest.mark.usefixtures("user_module")
def test_resolved_method_lists_every_parameter() -> None:
    assert bind_spec("method", {"name": "users_methods:own"}).spec() == {
        "name": "users_methods:own",
        "local_steps": 3,
        "weight": 0.5,
    }


@pytest.mark.usefixtures("user_module")
def test_methods_are_merged_with_their_own_parameters() -> None:
    spec = {"merge": [{"name": "users_methods:own", "local_steps": 2}, {"name": "users_methods:equal"}]}
    assert build_method(spec).settings == MethodSettings(local_steps=2, equal_steps=True)
    resolved = resolve(load_config({"method": spec}))
    assert resolved.method["merge"][1] == {"name": "users_methods:equal", "equal_steps": True}


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"name": "users_methods:owns"}, "did you mean 'own'"),
        ({"name": "users_methods:number"}, "must be callable"),
        ({"name": "users_methods:wrong"}, "must give a FederatedMethod, but gives a int"),
        ({"name": "no_such_module:x"}, "cannot be imported"),
        ({"name": "users_methods:own", "local_step": 2}, "did you mean 'local_steps'"),
        ({"name": "users_methods:own", "local_steps": "2"}, "local_steps must be an integer, but got '2'"),
        ({"name": "fedavg", "mu": 1}, "method fedavg: has no parameter 'mu'"),
    ],
)
def test_wrong_method_is_an_error_with_its_reason(spec: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build_method(spec)


def test_a_copy_of_a_configuration_binds_for_itself() -> None:
    config = Config(method={"name": "fedavg"}, model={"name": "mlp"})
    bound(config, "method"), bound(config, "model")
    copy = config.model_copy(update={"method": {"name": "fedprox"}})
    assert build_method(copy).name == "fedprox" and build_method(config).name == "fedavg"
    assert copy.bound["model"] is config.bound["model"]
    del config.bound["model"]
    assert "model" in copy.bound
