"""The methods by name, in the order of lists: each is named like its builder, whose module is imported when asked for.

What a method is called, where it comes from and what it does stand with its builder: on its card, in its docstring.
"""

from __future__ import annotations

from collections.abc import Mapping

_BUILDERS = (
    "fedavg:fedavg",
    "fedavg:fedsgd",
    "fedprox:fedprox",
    "fedopt:fedavgm",
    "fedopt:fedadagrad",
    "fedopt:fedadam",
    "fedopt:fedyogi",
    "robust:fedmedian",
    "robust:trimmed_mean",
    "robust:krum",
    "robust:norm_bound",
    "scaffold:scaffold",
    "feddyn:feddyn",
    "fednova:fednova",
    "fedensemble:fedensemble",
    "abavg:abavg",
    "feddf:feddf",
    "fedbe:fedbe",
    "fedgen:fedgen",
    "fedmix:fedmix",
    "moon:moon",
    "dynamicfl.two_speed:dynamicsgd",
    "dynamicfl.two_speed:dynamicfl",
    "fedstg:fedstg",
    "dynafed.distillation:dynafed",
    "feddhad.feddh:feddh",
    "feddhad.feddh:fedjs",
    "feddhad.fedad:fedad",
    "feddhad.feddhad:feddhad",
    "federated_dropout:federated_dropout",
    "feddrop:feddrop",
    "afd:afd",
    "heterofl:heterofl",
    "fjord:fjord",
    "fedasync:fedasync",
    "fedbuff:fedbuff",
    "ifca:ifca",
    "hierfavg:hierfavg",
    "dpsgd:dpsgd",
    "dfedavgm:dfedavgm",
    "aedfl:aedfl",
    "feddhad.decentralized:aedfl_feddhad",
    "prunefl.method:prunefl",
    "feddst:feddst",
    "fedas:fedas",
    "augfl:augfl",
    "fedktl:fedktl",
    "local_only:local_only",
)

METHODS: Mapping[str, str] = {each.partition(":")[2]: f"fedsweep.algorithms.{each}" for each in _BUILDERS}
"""``module:function`` of each method's builder; the function's keyword parameters are the method's."""
