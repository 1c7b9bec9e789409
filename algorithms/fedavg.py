"""FedAvg and FedSGD.

Source: McMahan, Moore, Ramage, Hampson, Aguera y Arcas (2017): Communication-efficient learning of deep networks
from decentralized data. AISTATS. Algorithm 1.
"""

from __future__ import annotations

from fedsweep import Card, FederatedMethod, MethodSettings, with_card


@with_card(Card(title="FedAvg", source="McMahan et al., AISTATS 2017", golden=(4.945325, 6.263556716, 6.704010888)))
def fedavg() -> FederatedMethod:
    """Clients train for some steps, the server takes the mean weighted by samples."""
    return FederatedMethod(name="fedavg")


@with_card(Card(title="FedSGD", source="McMahan et al., AISTATS 2017", golden=(2.75, 4.0625)))
def fedsgd() -> FederatedMethod:
    """FedAvg with one step a round, whatever the training section says.

    Reading: the clients send models, not gradients. For plain SGD the two are the same; with momentum or Adam each
    client has its own state.
    """
    return FederatedMethod(name="fedsgd", settings=MethodSettings(local_steps=1))
