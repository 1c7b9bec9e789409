import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsweep.catalog import bind_spec
from fedsweep.errors import ConfigError, DataError, InvariantError
from fedsweep.streams import stream
from fedsweep.world.label_stats import label_counts
from fedsweep.world.partitions.base import Partition, check_parts
from fedsweep.world.partitions.draws import doubly_stochastic, log_dirichlet, repaired
from fedsweep.world.partitions.kinds import Classes
from fedsweep.world.partitions.registry import PARTITIONS

SPECS: list[dict[str, Any]] = [
    {"kind": "iid"},
    {"kind": "classes", "classes_per_client": 2},
    {"kind": "dirichlet", "dirichlet_alpha": 0.3, "min_samples": 5},
    {"kind": "dirichlet_balanced", "dirichlet_alpha": 0.3},
    {"kind": "quantity", "dirichlet_alpha": 0.5},
    {"kind": "mixture", "of": [{"share": 1, "kind": "iid"}, {"share": 3, "kind": "classes", "classes_per_client": 1}]},
    {"kind": "writer"},
]
# Its partitioners are drawn and tested by their authors; what is ours is tested below.
FLOWER = {"kind": "flwr", "partitioner": "DirichletPartitioner", "parameters": {"alpha": 0.3}}
IID, SKEW = {"share": 1, "kind": "iid"}, {"share": 2, "kind": "dirichlet", "dirichlet_alpha": 0.3}
LABELS = np.random.default_rng(0).permutation(np.arange(2000) % 10)
WRITERS = np.arange(2000) // 50


def build_partition(spec: dict[str, Any]) -> Partition:
    partition: Partition = bind_spec("scenario.partition", spec).build()
    return partition


def split(spec: dict[str, Any], labels: np.ndarray = LABELS, clients: int = 20, seed: int = 0, **more: Any) -> Any:
    more = {"num_classes": 10, "writers": WRITERS, **more}
    return build_partition(spec).split(labels, clients, stream(seed, "partition"), **more)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["kind"])
def test_every_kind_uses_each_sample_exactly_once_in_ascending_order(spec: dict[str, Any]) -> None:
    parts = split(spec)
    assert len(parts) == 20 and all(len(part) for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(2000))
    assert all((np.diff(part) > 0).all() and part.dtype == np.int64 for part in parts)
    check_parts(parts, num_samples=2000, num_clients=20)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["kind"])
def test_every_kind_repeats_itself_and_leaves_its_input_alone(spec: dict[str, Any]) -> None:
    labels = LABELS.copy()
    first, second, other = split(spec, labels), split(spec, labels), split(spec, labels, seed=1)
    assert all(np.array_equal(one, two) for one, two in zip(first, second, strict=True))
    assert any(not np.array_equal(one, two) for one, two in zip(first, other, strict=True))
    assert np.array_equal(labels, LABELS)


def test_the_tested_kinds_are_all_kinds() -> None:
    assert {spec["kind"] for spec in [*SPECS, FLOWER]} == set(PARTITIONS) - {"drawn"}  # see test_population
    assert all(kind.source and kind.__doc__ for kind in PARTITIONS.values())


@given(st.integers(1, 40), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_iid_sizes_differ_by_at_most_one(clients: int, seed: int) -> None:
    sizes = [len(part) for part in split({"kind": "iid"}, LABELS[:97], clients, seed)]
    assert sum(sizes) == 97 and max(sizes) - min(sizes) <= 1


@given(st.sampled_from([1, 2, 4, 5]), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_classes_gives_at_most_k_classes_and_equal_sizes(classes_per_client: int, seed: int) -> None:
    parts = split({"kind": "classes", "classes_per_client": classes_per_client}, clients=10, seed=seed)
    counts = label_counts(LABELS, parts, 10)
    assert ((counts > 0).sum(axis=1) <= classes_per_client).all()
    assert (counts.sum(axis=1) == 200).all()


def test_classes_cuts_each_class_into_contiguous_shards() -> None:
    """4 clients with 1 of 2 classes: 2 shards a class; 7 samples of class 0 give shards of 4 and 3."""
    labels = np.array([0, 1, 0, 1, 0, 0, 1, 0, 0, 1, 0])
    parts = split({"kind": "classes", "classes_per_client": 1}, labels, 4, num_classes=2)
    assert sorted(part.tolist() for part in parts) == [[0, 2, 4, 5], [1, 3], [6, 9], [7, 8, 10]]


def test_classes_gives_random_classes_another_shard_where_the_deal_does_not_come_out_even() -> None:
    """3 clients x 2 = 6 shards of 4 classes: two classes have 2 shards of 10, two have one of 20."""
    labels = np.repeat(np.arange(4), 20)
    counts = label_counts(labels, split({"kind": "classes"}, labels, 3, num_classes=4), 4)
    assert (counts.sum(axis=0) == 20).all()
    assert ((counts > 0).sum(axis=1) <= 2).all()


def test_classes_skips_a_class_without_samples() -> None:
    labels = np.repeat([0, 2], 10)
    parts = split({"kind": "classes", "classes_per_client": 1}, labels, 2, num_classes=3)
    assert sorted(part.tolist() for part in parts) == [list(range(10)), list(range(10, 20))]


@pytest.mark.parametrize("concentration", [0.05, 0.1, 1.0])
def test_dirichlet_gives_each_client_min_samples(concentration: float) -> None:
    parts = split({"kind": "dirichlet", "dirichlet_alpha": concentration, "min_samples": 10}, clients=10)
    assert min(len(part) for part in parts) >= 10


def test_dirichlet_gives_nothing_of_later_classes_to_a_client_with_its_even_share() -> None:
    """Whoever holds S / N or more after class c gets none of the classes after c."""
    parts = split({"kind": "dirichlet", "dirichlet_alpha": 0.1, "min_samples": 1}, clients=10)
    counts = label_counts(LABELS, parts, 10)
    held_before = np.cumsum(counts, axis=1) - counts
    assert (held_before >= 200).any()
    assert (counts[held_before >= 200] == 0).all()


def test_dirichlet_with_a_large_concentration_is_nearly_even() -> None:
    counts = label_counts(LABELS, split({"kind": "dirichlet", "dirichlet_alpha": 1e6}, clients=10), 10)
    assert (np.abs(counts - 20) <= 2).all()


def test_dirichlet_draws_have_the_distribution_s_moments() -> None:
    """Var of a symmetric Dirichlet share: (1/n)(1 - 1/n) / (n a + 1); n = 4, a = 0.3: 0.1875 / 2.2."""
    weights = np.exp(log_dirichlet(0.3, (40000, 4), np.random.default_rng(0)))
    shares = weights / weights.sum(axis=1, keepdims=True)
    assert shares.mean(axis=0) == pytest.approx(0.25, abs=0.01)
    assert shares.var(axis=0) == pytest.approx(0.1875 / 2.2, rel=0.03)


@pytest.mark.parametrize("concentration", [1e-250, 1e-320, 5e-324])
def test_a_draw_at_the_smallest_concentrations_is_its_limit(concentration: float) -> None:
    """One client has all of a class; a client that is drawn has one class, as often as the class is frequent."""
    spec = {"dirichlet_alpha": concentration, "repair": True, "min_samples": 1}
    sizes = [len(part) for part in split({"kind": "quantity", **spec}, clients=5)]
    assert sorted(sizes) == [1, 1, 1, 1, 1996]
    labels = np.repeat([0, 1], [900, 100])
    parts = split({"kind": "drawn", "dirichlet_alpha": concentration}, labels, 200)
    classes = [set(labels[part]) for part in parts]
    assert {*map(len, classes)} == {1} and sum(own == {0} for own in classes) == pytest.approx(180, abs=15)


def test_dirichlet_gives_up_after_max_draws_and_says_what_to_change() -> None:
    with pytest.raises(DataError, match=r"none of 7 draws .* min_samples=40 .*dirichlet_alpha.*repair=true"):
        split({"kind": "dirichlet", "dirichlet_alpha": 0.01, "min_samples": 40, "max_draws": 7}, clients=40)


def test_dirichlet_repair_fills_up_the_small_clients_instead() -> None:
    spec = {"kind": "dirichlet", "dirichlet_alpha": 0.01, "min_samples": 40, "max_draws": 7, "repair": True}
    parts = split(spec, clients=40)
    assert min(len(part) for part in parts) >= 40
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(2000))


def test_repaired_moves_the_largest_client_s_commonest_class() -> None:
    assert repaired(np.array([[5, 0], [1, 1]]), 3).tolist() == [[3, 2], [1, 1]]


@pytest.mark.parametrize("concentration", [0.01, 0.16])
def test_dirichlet_balanced_sizes_are_within_two_percent(concentration: float) -> None:
    """DynaFed's figures: 80 clients on 50,000 samples hold 625 within 2 percent."""
    labels = np.random.default_rng(1).permutation(np.arange(50000) % 10)
    parts = split({"kind": "dirichlet_balanced", "dirichlet_alpha": concentration}, labels, 80)
    assert np.abs(np.array([len(part) for part in parts]) - 625).max() <= 12.5


def test_dirichlet_balanced_skew_falls_with_the_concentration() -> None:
    """On average 1.3 to 2 classes per client at 0.01, about 3.3 at 0.04, about 6.6 at 0.16."""
    labels = np.random.default_rng(1).permutation(np.arange(50000) % 10)
    for concentration, low, high in [(0.01, 1.3, 2.0), (0.04, 3.0, 3.7), (0.16, 6.1, 7.1)]:
        parts = split({"kind": "dirichlet_balanced", "dirichlet_alpha": concentration}, labels, 80)
        assert low <= (label_counts(labels, parts, 10) > 0).sum(axis=1).mean() <= high


@given(st.integers(0, 2**32), st.sampled_from([0.01, 0.04, 0.16]))
@settings(max_examples=20, deadline=None)
def test_doubly_stochastic_rows_sum_to_one(seed: int, concentration: float) -> None:
    matrix = doubly_stochastic(log_dirichlet(concentration, (10, 80), np.random.default_rng(seed)))
    assert matrix is not None
    assert matrix.sum(axis=1) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize(("concentration", "tolerance"), [(0.01, 1e-3), (0.04, 1e-6), (0.16, 1e-6)])
def test_doubly_stochastic_columns_share_alike(concentration: float, tolerance: float) -> None:
    # At 0.01 some draws converge so slowly that the authors' 1000 alternations leave a fraction of a percent.
    for seed in range(5):
        matrix = doubly_stochastic(log_dirichlet(concentration, (10, 80), np.random.default_rng(seed)))
        assert matrix is not None
        assert matrix.sum(axis=0) == pytest.approx(10 / 80, abs=tolerance)


def test_doubly_stochastic_reports_a_row_that_vanishes() -> None:
    assert doubly_stochastic(np.array([[0.0, 0.0], [-1e6, -1e6]])) is None


def test_writer_keeps_writers_whole_and_even() -> None:
    parts = split({"kind": "writer"}, clients=7)
    owners = [set(WRITERS[part]) for part in parts]
    assert sum(len(names) for names in owners) == 40
    assert sorted(len(names) for names in owners) == [5, 5, 6, 6, 6, 6, 6]


@pytest.mark.parametrize("spec", [*SPECS[:2], {"kind": "dirichlet", "dirichlet_alpha": 10.0, "min_samples": 1}])
def test_ten_thousand_clients_are_split(spec: dict[str, Any]) -> None:
    labels = np.random.default_rng(0).integers(0, 10, 50000)
    parts = split(spec, labels, 10000)
    assert len(parts) == 10000 and min(len(part) for part in parts) >= 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"kind": "dirchlet"}, "did you mean 'dirichlet'"),
        ({"kind": "dirichlet"}, "dirichlet_alpha is missing"),
        ({"kind": "dirichlet", "dirichlet_alfa": 1.0}, "did you mean 'dirichlet_alpha'"),
        ({"kind": "iid", "min_samples": 1}, "has no parameter"),
        ({"kind": "dirichlet", "dirichlet_alpha": 0}, "> 0, but got 0"),
        ({"kind": "dirichlet", "dirichlet_alpha": float("nan")}, "finite"),
        ({"kind": "dirichlet", "dirichlet_alpha": "0.1"}, "'0.1'"),
        ({"kind": "dirichlet_balanced", "dirichlet_alpha": -1.0}, "> 0"),
        ({"kind": "dirichlet", "dirichlet_alpha": 1.0, "min_samples": 0}, "min_samples must be an integer >= 1"),
        ({"kind": "dirichlet", "dirichlet_alpha": 1.0, "repair": 1}, "true or false"),
        ({"kind": "classes", "classes_per_client": 1.5}, "an integer"),
        ({"kind": "no_such_module_here:Thing"}, "cannot be imported"),
    ],
)
def test_a_wrong_description_is_refused_with_its_reason(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_partition(spec)


@pytest.mark.parametrize(
    ("spec", "clients", "error", "message"),
    [
        ({"kind": "iid"}, 2001, DataError, "2001 training samples, but there are 2000"),
        ({"kind": "iid"}, 0, ConfigError, "at least 1"),
        ({"kind": "dirichlet", "dirichlet_alpha": 1.0, "min_samples": 101}, 20, DataError, "need 2020"),
        ({"kind": "classes", "classes_per_client": 11}, 20, ConfigError, "is 11, and the data set has 10"),
        ({"kind": "classes", "classes_per_client": 2}, 4, DataError, r"4 \* 2 < 10"),
        ({"kind": "writer"}, 41, DataError, "has 40 writers"),
    ],
)
def test_what_the_data_do_not_allow_is_refused_with_a_way_out(
    spec: dict[str, Any], clients: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        split(spec, clients=clients)


def test_writer_needs_writers() -> None:
    with pytest.raises(DataError, match="femnist"):
        split({"kind": "writer"}, writers=None)


def test_a_class_with_fewer_samples_than_shards_leaves_no_client_empty_in_silence() -> None:
    labels = np.array([0] * 30 + [1])
    with pytest.raises(DataError, match="would hold no sample"):
        split({"kind": "classes", "classes_per_client": 1}, labels, 10, num_classes=2)


def test_a_partition_of_one_s_own_is_built_by_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_partition_module.py").write_text(
        "from dataclasses import dataclass\n"
        "import numpy as np\n"
        "from fedsweep import Partition\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Stripes(Partition):\n"
        "    width: int = 1\n"
        "    def split(self, labels, num_clients, stream, *, num_classes, writers=None):\n"
        "        return [np.arange(i, len(labels), num_clients) for i in range(num_clients)]\n"
        "def wrong():\n"
        "    return 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    partition = build_partition({"kind": "own_partition_module:Stripes", "width": 2})
    assert isinstance(partition, Partition)
    assert partition.split(LABELS, 2, stream(0, "partition"), num_classes=10)[1][:3].tolist() == [1, 3, 5]
    with pytest.raises(ConfigError, match="gives a int"):
        build_partition({"kind": "own_partition_module:wrong"})
    with pytest.raises(ConfigError, match="did you mean 'width'"):
        build_partition({"kind": "own_partition_module:Stripes", "wdth": 2})


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([[0, 1]], "one index array per client"),
        ([[0, 1], [1]], "sample 1 is"),
        ([[0, 1], [5]], r"0\.\.4"),
        ([[0, -1], [1]], r"0\.\.4"),
        ([[0.5], [1.0]], "integer arrays"),
    ],
)
def test_check_parts_refuses(parts: list[list[float]], message: str) -> None:
    with pytest.raises(InvariantError, match=message):
        check_parts([np.array(part) for part in parts], num_samples=5, num_clients=2)


def test_check_parts_names_what_is_no_array() -> None:
    with pytest.raises(InvariantError, match="one-dimensional integer arrays, not set"):
        check_parts([{0, 1}, {2}], num_samples=5, num_clients=2)  # type: ignore[list-item]
    with pytest.raises(InvariantError, match=r"not int64 \(1, 2\)"):
        check_parts([np.array([[0, 1]]), np.array([2])], num_samples=5, num_clients=2)
    check_parts([[], np.array([0, 1], np.uint64)], num_samples=5, num_clients=2)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("parts", "named"), [(None, "NoneType"), ((part for part in ()), "generator"), ({0: [0], 1: [1]}, "dict")]
)
def test_check_parts_refuses_what_is_no_list_of_parts(parts: Any, named: str) -> None:
    with pytest.raises(InvariantError, match=f"one index array per client .*, not {named}"):
        check_parts(parts, num_samples=5, num_clients=2)


def test_quantity_skew_is_one_draw_of_sizes_with_classes_at_random() -> None:
    spec = {"kind": "quantity", "dirichlet_alpha": 2.0, "min_samples": 1}
    sizes = np.array([[len(part) for part in split(spec, clients=10, seed=seed)] for seed in range(200)])
    assert sizes.sum(axis=1).tolist() == [2000] * 200
    # A symmetric Dirichlet of 10 parts with concentration 2: variance of a share 0.1 * 0.9 / (20 + 1).
    assert (sizes / 2000).var() == pytest.approx(0.09 / 21, rel=0.1)
    counts = label_counts(LABELS, split(spec, clients=4), 10)
    large = counts[counts.sum(axis=1) > 300]
    assert len(large) >= 2 and np.abs(large / large.sum(axis=1, keepdims=True) - 0.1).max() < 0.04


def test_a_mixture_of_a_quarter_is_a_quarter_iid() -> None:
    """20 clients, 10 classes: by classes, one class each; of the 2000 samples 500 are dealt evenly."""
    counts = label_counts(LABELS, split(SPECS[5]), 10)
    main = counts.max(axis=1)
    assert counts.sum() == 2000 and np.abs(main - (75 + 2.5)).max() <= 12
    assert abs(int((counts.sum(axis=1) - main).sum()) - 450) <= 30


def test_a_mixture_of_one_kind_has_its_sizes() -> None:
    parts = split({"kind": "mixture", "of": [{"share": 0.5, "kind": "iid"}]})
    assert {len(part) for part in parts} == {100}


@pytest.mark.parametrize(
    ("of", "said"),
    [
        ([], "must name at least one kind"),
        ([{"share": 1}], r"of\[0\] must have share and kind, but kind is missing"),
        ([{"kind": "iid"}], "share is missing"),
        ([{"share": 0, "kind": "iid"}], r"^scenario\.partition\.of\[0\].share must be a number > 0, but got 0"),
        ([{"share": 1, "kind": 3}], r"^scenario\.partition\.of\[0\]\.kind must be text, but got 3"),
        (
            [IID, {"share": 1, "kind": "ii"}],
            r"^scenario\.partition\.of\[1\]\.kind: unknown partition 'ii'; did you mean",
        ),
        ([IID, {**IID, "alpha": 1}], r"^scenario\.partition\.of\[1\]\.alpha: there is no such parameter"),
        ([IID, {**SKEW, "alpha": 1}], r"^scenario\.partition\.of\[1\]\.alpha: unknown parameter 'alpha'; did you mean"),
        ([IID, {**SKEW, "dirichlet_alpha": "x"}], r"of\[1\]\.dirichlet_alpha must be a number > 0, but got 'x'"),
        ([IID, {**SKEW, "min_samples": 2.5}], r"of\[1\]\.min_samples must be an integer >= 1, but got 2\.5"),
        ([IID, {**SKEW, "dirichlet_alpha": -1}], r"^scenario\.partition\.of\[1\]\.dirichlet_alpha must be .* -1"),
        (
            [IID, {"share": 1, "kind": "mixture", "of": [SKEW, {**SKEW, "dirichlet_alpha": -1}]}],
            r"^scenario\.partition\.of\[1\]\.of\[1\]\.dirichlet_alpha must be",
        ),
        ([IID, {"share": 1, "kind": "drawn"}], r"of\[1\]: this kind lets clients share samples"),
        (
            [IID, {"share": 1, "kind": "mixture", "of": [{**SKEW, "alpha": 1}]}],
            r"^scenario\.partition\.of\[1\]\.of\[0\]\.alpha: unknown parameter",
        ),
        ([IID, {"share": 1, "kind": "dirichlet"}], r"of\[1\]\.dirichlet_alpha is missing; it must be a number"),
    ],
)
def test_a_wrong_mixture_says_what_is_wrong(of: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_partition({"kind": "mixture", "of": of})


def test_a_split_that_a_part_of_a_mixture_can_not_make_names_the_part() -> None:
    of = [{"share": 0.01, "kind": "iid"}, {**SKEW, "share": 0.99}]
    with pytest.raises(DataError, match=r"^scenario\.partition\.of\[0\] \(share 0\.01: 20 samples\): 50 clients"):
        split({"kind": "mixture", "of": of}, clients=50)
    of = [{"share": 0.5, "kind": "iid"}, {"share": 0.5, "kind": "dirichlet", "dirichlet_alpha": 0.001}]
    with pytest.raises(DataError, match=r"of\[1\].*scenario\.partition\.of\[1\]\.min_samples"):
        split({"kind": "mixture", "of": of}, clients=50)


def test_a_mixture_binds_its_kinds_with_their_defaults_and_splits_alike_with_and_without_them() -> None:
    short = {"kind": "mixture", "of": [IID, {"share": 1, "kind": "mixture", "of": [SKEW]}]}
    spec = bind_spec("scenario.partition", short).spec()
    skew = {**SKEW, "min_samples": 5, "max_draws": 1000, "repair": False}
    assert spec == {"kind": "mixture", "of": (IID, {"share": 1, "kind": "mixture", "of": (skew,)})}
    assert bind_spec("scenario.partition", spec).spec() == spec
    assert all(np.array_equal(one, two) for one, two in zip(split(short), split(spec), strict=True))


def test_a_mixture_takes_a_kind_of_ones_own() -> None:
    """Its parameters are bound as those of a built-in one."""
    module: Any = ModuleType("users_partitions")
    module.Own = Classes
    sys.modules["users_partitions"] = module
    try:
        own, built_in = (
            {"kind": "mixture", "of": [IID, {"share": 3, "kind": kind, "classes_per_client": 1}]}
            for kind in ("users_partitions:Own", "classes")
        )
        assert all(np.array_equal(one, two) for one, two in zip(split(own), split(built_in), strict=True))
    finally:
        del sys.modules["users_partitions"]


def test_flowers_partitioners_split_as_they_do_by_themselves(capfd: pytest.CaptureFixture[str]) -> None:
    partitioners = pytest.importorskip("flwr_datasets.partitioner", reason="comes with the extra flwr")
    import datasets

    parts = split(FLOWER)
    check_parts(parts, num_samples=2000, num_clients=20)
    own = partitioners.DirichletPartitioner(
        num_partitions=20, partition_by="label", alpha=0.3, seed=stream(0, "partition").seed(32)
    )
    order = stream(0, "partition").child("order").numpy().permutation(2000)
    own.dataset = datasets.Dataset.from_dict({"index": order, "label": LABELS[order]})
    capfd.readouterr()
    assert [part.tolist() for part in parts] == [sorted(own.load_partition(k)["index"]) for k in range(20)]
    capfd.readouterr()
    by_writer = split({"kind": "flwr", "partitioner": "NaturalIdPartitioner"})
    assert capfd.readouterr().err == "" and sorted(set(WRITERS[by_writer[3]])) == [WRITERS[by_writer[3][0]]]


@pytest.mark.parametrize("partitioner", ["IidPartitioner", "LinearPartitioner"])
def test_flowers_partitioners_that_cut_what_lies_side_by_side_get_it_shuffled(partitioner: str) -> None:
    pytest.importorskip("flwr_datasets", reason="comes with the extra flwr")
    build = build_partition({"kind": "flwr", "partitioner": partitioner})
    labels = np.repeat(np.arange(10), 200)
    one, other = (build.split(labels, 10, stream(seed, "partition"), num_classes=10) for seed in (0, 1))
    assert label_counts(labels, one, 10).astype(bool).sum(axis=1).min() >= 8
    assert [part.tolist() for part in one] != [part.tolist() for part in other]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"partitioner": "Dirichlet"}, "unknown class 'Dirichlet'; did you mean 'DirichletPartitioner'"),
        ({"partitioner": "DirichletPartitioner"}, "can't split 2000 samples among 20 clients.*'alpha'"),
    ],
)
def test_a_partitioner_that_flower_has_not_is_said(spec: dict[str, Any], said: str) -> None:
    pytest.importorskip("flwr_datasets", reason="comes with the extra flwr")
    with pytest.raises((ConfigError, DataError), match=said):
        split({"kind": "flwr", **spec})
