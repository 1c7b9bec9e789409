"""D-PSGD: no server; each client trains a model of its own and mixes it with its neighbours' models.

Source: Lian, Zhang, Zhang, Hsieh, Zhang, Liu (2017): Can decentralized algorithms outperform centralized algorithms? A
case study for decentralized parallel stochastic gradient descent. NeurIPS. Algorithm 1.
"""

from __future__ import annotations

from fedsweep import Card, FederatedMethod, with_card
from fedsweep.components import Count

from .parts.gossip import Gossip, MeanModel, NeighbourWeights


@with_card(
    Card(title="D-PSGD", source="Lian et al., NeurIPS 2017", needs=("graph", "classes"), live=("personal_accuracy",))
)
def dpsgd(*, interval: Count | None = None) -> FederatedMethod:
    """Clients train models of their own and mix them with their neighbours', along ``scenario.topology``.

    There is no server. ``test_accuracy`` is that of the mean of all clients' models, which nobody has;
    ``personal_accuracy`` has the clients' own models, each on its share of the test set. With a complete graph, and all
    clients in each round, it is FedAvg with equal weights.

    Reading: a client mixes after its local steps; in the paper, where it takes one, it mixes the models from before
    that step. Neighbours that take no part in a round send nothing, and their weight is the client's own.

    Args:
        interval: Local steps between two exchanges, which are also at the round's end; null: once a round.
    """
    return FederatedMethod(
        name="dpsgd",
        pacing=Gossip(method="dpsgd", interval=interval),
        weighting=NeighbourWeights(),
        evaluation=MeanModel(),
    )
