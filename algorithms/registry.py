"""The methods by name; their modules are imported when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A method that can be named in a configuration.

    Attributes:
        title: What the paper calls it; in tables and pictures.
        builder: ``module:function``; the function's keyword parameters are the method's, its docstring explains them.
            Below, the module is one of this folder; where nothing is said, it and its function have the method's name.
        summary: One line on what it does.
        source: Authors, year, venue.
        merges: The methods that it is the merge of, if it is one.
    """

    title: str
    summary: str
    source: str
    builder: str = ""
    merges: tuple[str, ...] = ()


_ENTRIES: Mapping[str, Entry] = {
    "fedavg": Entry(
        title="FedAvg",
        summary="clients train for some steps, the server takes the mean weighted by samples",
        source="McMahan et al., AISTATS 2017",
    ),
    "fedsgd": Entry(
        title="FedSGD",
        builder="fedavg:fedsgd",
        summary="FedAvg with one step per round",
        source="McMahan et al., AISTATS 2017",
    ),
    "fedprox": Entry(
        title="FedProx",
        summary="FedAvg with a pull towards the global model",
        source="Li et al., MLSys 2020",
    ),
    "fedavgm": Entry(
        title="FedAvgM",
        builder="fedopt:fedavgm",
        summary="FedAvg with momentum on the server",
        source="Hsu et al. 2019",
    ),
    "fedadagrad": Entry(
        title="FedAdagrad",
        builder="fedopt:fedadagrad",
        summary="FedAvg with Adagrad on the server",
        source="Reddi et al., ICLR 2021",
    ),
    "fedadam": Entry(
        title="FedAdam",
        builder="fedopt:fedadam",
        summary="FedAvg with Adam on the server",
        source="Reddi et al., ICLR 2021",
    ),
    "fedyogi": Entry(
        title="FedYogi",
        builder="fedopt:fedyogi",
        summary="FedAvg with Yogi on the server",
        source="Reddi et al., ICLR 2021",
    ),
    "scaffold": Entry(
        title="SCAFFOLD",
        summary="control variates correct each local step; twice the traffic",
        source="Karimireddy et al., ICML 2020",
    ),
    "feddyn": Entry(
        title="FedDyn",
        summary="a penalty that moves with each client's past, and a server that adds it up",
        source="Acar et al., ICLR 2021",
    ),
    "fednova": Entry(
        title="FedNova",
        summary="clients' moves are normalised by the steps that they took",
        source="Wang et al., NeurIPS 2020",
    ),
    "fedensemble": Entry(
        title="FedEnsemble",
        summary="FedAvg, tested as the ensemble of the clients' models",
        source="Zhu et al., ICML 2021",
    ),
    "abavg": Entry(
        title="ABAvg",
        summary="weights by accuracy on the server's validation data",
        source="Xiao et al., ISPDC 2021",
    ),
    "feddf": Entry(
        title="FedDF",
        summary="FedAvg; the server distils the clients' ensemble on unlabelled data",
        source="Lin et al., NeurIPS 2020",
    ),
    "fedbe": Entry(
        title="FedBE",
        summary="FedAvg; the server distils a Bayesian ensemble on unlabelled data",
        source="Chen and Chao, ICLR 2021",
    ),
    "fedgen": Entry(
        title="FedGen",
        summary="a generator of features, learned from the clients' heads, helps them train",
        source="Zhu et al., ICML 2021",
    ),
    "fedmix": Entry(
        title="FedMix",
        summary="clients mix their samples with averages of all clients' samples",
        source="Yoon et al., ICLR 2021",
    ),
    "moon": Entry(
        title="MOON",
        summary="features are contrasted with the received model's and the client's last one's",
        source="Li et al., CVPR 2021",
    ),
    "dynamicsgd": Entry(
        title="DynamicSGD",
        builder="dynamicfl.two_speed:dynamicsgd",
        summary="all clients are averaged after every step",
        source="DynamicFL",
    ),
    "dynamicfl": Entry(
        title="DynamicFL",
        builder="dynamicfl.two_speed:dynamicfl",
        summary="a chosen group of clients is averaged often, the others seldom",
        source="DynamicFL",
    ),
    "fedstg": Entry(
        title="FedStg",
        summary="weights by samples, speed and class rarity; fewer aggregations while accuracy improves",
        source="FedStg",
    ),
    "dynafed": Entry(
        title="DynaFed",
        builder="dynafed.distillation:dynafed",
        summary="FedAvg; the server learns synthetic data from the first rounds' models and fine-tunes on it",
        source="Pi et al., CVPR 2023",
    ),
    "feddh": Entry(
        title="FedDH",
        builder="feddhad.feddh:feddh",
        summary="weights by samples over a learned degree of label skew",
        source="Liu et al. 2025, FedDHAD",
    ),
    "fedjs": Entry(
        title="FedJS",
        builder="feddhad.feddh:fedjs",
        summary="weights by samples over the divergence of the client's labels",
        source="Liu et al. 2025, FedDHAD",
    ),
    "fedad": Entry(
        title="FedAD",
        builder="feddhad.fedad:fedad",
        summary="clients train without some units, drawn by their scores and the devices' speed",
        source="Liu et al. 2025, FedDHAD",
    ),
    "feddhad": Entry(
        title="FedDHAD",
        builder="feddhad.feddhad:feddhad",
        summary="FedDH's weights on FedAD's sub-models: the merge of the two",
        source="Liu et al. 2025, FedDHAD",
        merges=("feddh", "fedad"),
    ),
    "federated_dropout": Entry(
        title="Federated Dropout",
        summary="clients train a fixed number of each layer's units, drawn at random in each round",
        source="Caldas et al. 2018",
    ),
    "feddrop": Entry(
        title="FedDrop",
        summary="clients train without some hidden neurons, drawn by one rate or by what the device can do",
        source="Wen, Jeon, Huang, IEEE WCL 2022",
    ),
    "afd": Entry(
        title="AFD",
        summary="clients keep the units with which their loss fell, others are drawn by scores",
        source="Bouacida et al., INFOCOM workshops 2021",
    ),
    "heterofl": Entry(
        title="HeteroFL",
        summary="clients train the first units of each layer, as many as they can bear",
        source="Diao, Ding, Tarokh, ICLR 2021",
    ),
    "fjord": Entry(
        title="FjORD",
        summary="each local step trains the first units of each layer, as many as a drawn width says",
        source="Horvath et al., NeurIPS 2021",
    ),
    "fedasync": Entry(
        title="FedAsync",
        summary="nobody waits; each model that arrives is mixed in, the less the staler it is",
        source="Xie, Koyejo, Gupta 2019",
    ),
    "fedbuff": Entry(
        title="FedBuff",
        summary="nobody waits; the server moves by the mean of a buffer of clients' moves",
        source="Nguyen et al., AISTATS 2022",
    ),
    "prunefl": Entry(
        title="PruneFL",
        builder="prunefl.method:prunefl",
        summary="a sparse network whose weights are chosen by gain per time, in one place first, then by all clients",
        source="Jiang et al., TNNLS 2022",
    ),
    "feddst": Entry(
        title="FedDST",
        summary="a sparse network whose clients move weights to where the gradient is large",
        source="Bibikar et al., AAAI 2022",
    ),
    "fedas": Entry(
        title="FedAS",
        summary="clients keep their heads, align the body that they receive, and count by Fisher information",
        source="Yang, Huang, Ye, CVPR 2024",
    ),
    "augfl": Entry(
        title="AugFL",
        summary="clients learn by ADMM a model that adapts in one step; the server pulls it to a teacher",
        source="Yue et al. 2025",
    ),
    "fedktl": Entry(
        title="FedKTL",
        summary="no model travels: clients send prototypes and get an image per class from a decoder on the server",
        source="Zhang et al., CVPR 2024",
    ),
    "local_only": Entry(
        title="Local",
        summary="clients train models of their own, and nothing travels",
        source="baseline",
    ),
}

METHODS: Mapping[str, Entry] = {
    name: replace(entry, builder=f"fedsweep.algorithms.{entry.builder or f'{name}:{name}'}")
    for name, entry in _ENTRIES.items()
}
