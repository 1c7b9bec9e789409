"""Clients' shares of the test set."""

from __future__ import annotations

import numpy as np

from fedsweep.streams import stream
from fedsweep.world.label_stats import test_owners as owners_of
from fedsweep.world.label_stats import test_shares as shares_of
from fedsweep.world.partitions.draws import parts_by_owner

LABELS = np.repeat(np.arange(4), (40, 20, 7, 5))
COUNTS_NC = np.array([[30, 0, 1, 0], [10, 10, 1, 0], [0, 30, 1, 0]])


def test_every_sample_of_a_held_class_is_dealt_once() -> None:
    dealt = np.concatenate(shares_of(LABELS, COUNTS_NC, stream(0, "test shares")))
    assert sorted(dealt) == list(range(67))  # nobody holds class 3


def test_a_share_has_the_class_shares_of_the_training_data_to_within_one() -> None:
    for seed in range(5):
        for own, counts_C in zip(shares_of(LABELS, COUNTS_NC, stream(seed, "test shares")), COUNTS_NC, strict=True):
            found = np.bincount(LABELS[own], minlength=4)
            due = np.array([40, 20, 7, 0]) * counts_C / COUNTS_NC.sum(axis=0).clip(1)
            assert (abs(found - due) < 1).all()
            assert not found[counts_C == 0].any()


def test_whose_shares_are_rounded_up_is_drawn_class_by_class() -> None:
    labels, counts_NC = np.arange(30) % 10, np.ones((30, 10), int)  # 3 samples a class for 30 clients
    sizes = [len(own) for own in shares_of(labels, counts_NC, stream(0, "test shares"))]
    assert sum(sizes) == 30
    assert max(sizes) < 6


def test_a_client_has_the_samples_that_are_its_own() -> None:
    assert [own.tolist() for own in parts_by_owner(np.array([2, -1, 0, 2]), 4)] == [[2], [], [0, 3], []]


def test_the_seed_decides() -> None:
    one, other, again = (shares_of(LABELS, COUNTS_NC, stream(seed, "test shares")) for seed in (0, 1, 0))
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_test_sample_is_the_clients_that_has_its_group_whole() -> None:
    groups, parts = np.array([4, 4, 9, 2, 9]), [np.array([0, 1, 3]), np.array([2, 4])]
    owners = owners_of(parts, groups, np.array([9, 4, 2, 10**12, 4]))
    assert owners is not None and owners.tolist() == [1, 0, 0, -1, 0]
    assert owners_of([np.array([0, 3]), np.array([1, 2, 4])], groups, np.array([9])) is None  # group 4 is divided
    assert owners_of(parts, groups, np.array([5, 6])) is None  # nobody has one
    assert owners_of(parts, None, np.array([9])) is None and owners_of(parts, groups, None) is None
