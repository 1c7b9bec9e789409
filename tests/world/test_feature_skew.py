from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from fedsweep.catalog import bind_spec
from fedsweep.config import load_config
from fedsweep.errors import ConfigError, DataError
from fedsweep.experiment.build import build_experiment
from fedsweep.streams import stream
from fedsweep.world.feature_skew import FEATURE_SKEWS, FeatureSkew

GREY = np.full((40, 1, 16, 16), 128, np.uint8)


def built(**spec: Any) -> FeatureSkew:
    skew: FeatureSkew = bind_spec("scenario.feature_skew", spec).build()
    return skew


def of_client(skew: FeatureSkew, images: np.ndarray, client: int, num_clients: int = 4) -> np.ndarray:
    found: np.ndarray = skew.of_client(images, client, num_clients, scale=255.0, stream=stream(0, "skew", 0, client))
    assert found.shape == images.shape and found.dtype == images.dtype
    return found


def test_noise_grows_with_the_client_and_keeps_the_mean() -> None:
    skew = built(kind="noise", level=0.01)
    for client in range(4):
        pixels = of_client(skew, GREY, client) / 255
        assert pixels.std() == pytest.approx((0.01 * (client + 1) / 4) ** 0.5, rel=0.03)
        assert pixels.mean() == pytest.approx(128 / 255, abs=0.004)


def test_bytes_stay_in_their_range_and_no_noise_changes_nothing() -> None:
    loud = of_client(built(kind="noise", level=1.0), GREY, 3)
    assert loud.min() == 0 and loud.max() == 255
    digits = built(kind="noise", level=1.0).of_client(GREY // 8, 3, 4, scale=16.0, stream=stream(0, "x"))
    assert digits.max() == 16
    assert np.array_equal(of_client(built(kind="noise", level=0), GREY, 3), GREY)
    real = np.zeros((20, 1, 16, 16), np.float32)
    assert of_client(built(kind="noise", level=0.04), real, 3).std() == pytest.approx(255 * 0.2, rel=0.05)


def test_rotation_turns_groups_of_clients() -> None:
    images = np.arange(2 * 3 * 4 * 4, dtype=np.uint8).reshape(2, 3, 4, 4)
    skew = built(kind="rotation")
    for client in range(8):
        assert np.array_equal(of_client(skew, images, client, 8), np.rot90(images, client % 4, axes=(2, 3)))
    assert np.array_equal(of_client(built(kind="rotation", groups=2), images, 1), images[:, :, ::-1, ::-1])
    with pytest.raises(DataError, match="can't be turned by a quarter"):
        of_client(skew, images[:, :, :, :2], 1)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"kind": "noise", "level": -1}, "level"),
        ({"kind": "rotation", "groups": 3}, "groups must be one of 2, 4, but got 3"),
    ],
)
def test_wrong_values_are_refused(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        built(**spec)


def test_only_what_clients_hold_changes_each_by_its_own_client() -> None:
    scenario = {"clients": 4, "partition": {"kind": "iid"}, "server_data": {"validation": 0.1}}
    plain = build_experiment(load_config({"scenario": scenario})).world
    config = {"scenario": {**scenario, "feature_skew": {"kind": "rotation", "groups": 2}}}
    turned = build_experiment(load_config(config)).world
    assert plain.validation is not None and turned.validation is not None
    assert np.array_equal(plain.validation[0], turned.validation[0])
    assert np.array_equal(plain.test_images, turned.test_images)
    for client, held in enumerate(plain.indices):
        before, after = plain.data.images[held], turned.data.images[held]
        assert np.array_equal(after, before if client % 2 == 0 else before[:, :, ::-1, ::-1])


@dataclass(frozen=True, kw_only=True)
class Own(FeatureSkew):
    change: Callable[[np.ndarray], Any]

    def of_client(self, images: np.ndarray, client: int, num_clients: int, **_: Any) -> Any:
        return self.change(images)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda images: images / 255, r"float64 \(10, 1, 16, 16\)"),
        (lambda images: images[:1], r"uint8 \(1, 1, 16, 16\)"),
        (lambda images: images[:, :, 1:], r"uint8 \(10, 1, 15, 16\)"),
        (lambda images: None, r"object \(\)"),
    ],
)
def test_pictures_of_another_type_or_shape_are_refused(change: Callable[[np.ndarray], Any], said: str) -> None:
    indices = np.split(np.arange(40), 4)
    with pytest.raises(DataError, match=rf"Own\.of_client .*, uint8 \(10, 1, 16, 16\), but .* {said} for client 0"):
        Own(change=change).apply(GREY, indices, scale=255.0, stream=stream(0, "skew"))


def test_clients_that_share_their_samples_can_have_no_pictures_of_their_own() -> None:
    scenario = {"feature_skew": {"kind": "noise"}, "drift": {"kind": "cosine_rotation", "pool": "all"}}
    with pytest.raises(ConfigError, match=r"all clients draw from the same; set one of them to null"):
        build_experiment(load_config({"scenario": scenario}))


def test_every_kind_has_its_source() -> None:
    assert all(kind.source and kind.__doc__ for kind in FEATURE_SKEWS.values())
