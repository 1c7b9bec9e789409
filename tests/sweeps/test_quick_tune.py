"""What Ray Tune does not do in our sweeps, since it takes seconds."""

from __future__ import annotations

import sys

import pytest

from fedsweep.sweeps.tuner import _quick_tune


def environment_of_a_trial() -> object:
    """The runtime environment that Tune asks for; the class is made once, however often it is needed."""
    from ray.tune import Trainable
    from ray.tune.execution.class_cache import _ActorClassCache

    class Trial(Trainable):
        """Nothing."""

    cache = _ActorClassCache()
    made = cache.get(Trial)
    assert cache.get(Trial) is made
    return made._default_options.get("runtime_env")


def test_trials_ask_for_no_runtime_environment_and_nobody_counts_callbacks() -> None:
    from ray.air._internal import usage
    from ray.tune import Callback

    trackers = {"ray.air.integrations.mlflow", "ray.air.integrations.wandb", "ray.air.integrations.comet"}
    before = trackers & sys.modules.keys()
    for joined in (False, True):
        with _quick_tune(joined=joined):
            assert (environment_of_a_trial() is None) is not joined
            usage.tag_callbacks([Callback()])
    assert trackers & sys.modules.keys() == before
    assert environment_of_a_trial() is not None  # afterwards Tune is Ray's own


def test_another_ray_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.air._internal
    import ray.tune.execution

    for package, module in ((ray.air._internal, "usage"), (ray.tune.execution, "class_cache")):
        monkeypatch.delattr(package, module, raising=False)
        monkeypatch.setitem(sys.modules, f"{package.__name__}.{module}", None)
    with _quick_tune(joined=False):
        pass
