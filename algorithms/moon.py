"""MOON: a contrast of features pulls a client towards the model that it received and away from its own last one.

Source: Li, He, Song (2021): Model-contrastive federated learning. CVPR. Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsweep import Card, FederatedMethod, Limit, with_card
from fedsweep.components import (
    ClientUpdate,
    LinearHeadNetwork,
    LocalStep,
    LocalTerm,
    LocalWork,
    Memory,
    NotNegative,
    ParamTree,
    Passes,
    Payload,
    Positive,
    Refinement,
    ServerContext,
    State,
    SyncContext,
    takes,
)

from .parts.features import network_with_features


@dataclass(frozen=True, kw_only=True)
class Contrastive(LocalTerm):
    """``strength * mean(-log(exp(cos(z, z_g) / T) / (exp(cos(z, z_g) / T) + exp(cos(z, z_p) / T))))``.

    z are a batch's features under the live params, z_g under those that the client received, z_p under those with
    which its last job ended; in its first job there is no z_p, and no loss.

    Attributes:
        strength: Of the contrast, at least 0; 0 is FedAvg bit for bit. The paper has 5 on CIFAR-10 and 1 on CIFAR-100.
        temperature: Of the similarities, above 0.

    Source: Li et al. (2021), Eq. 3 and the authors' program. Reading: z is what the model's head reads; in the paper
    that is a projection of two layers, which networks have with the option ``projection``. Reading: the other two
    models are in evaluation mode, with the batch norm's statistics that they were sent or kept with. Reading: where its
    sub-model holds what none of its earlier ones did, z_p's params are the received ones.
    """

    stateful: ClassVar[bool] = True
    keeps_models: ClassVar[bool] = True
    strength: NotNegative = 5.0
    temperature: Positive = 0.5
    name: str = "moon"

    def passes(self, batch_size: int, num_classes: int) -> Passes:
        """Count the forward passes of two models; a client's first job, which has none, is charged alike."""
        return Passes(step=2)

    def loss(self, step: LocalStep) -> Tensor | None:
        previous = cast("ParamTree | None", step.memory.get("previous"))
        if previous is None:
            return None
        own = step.features
        previous_values = {name: value.to(own.device) for name, value in previous.items()}
        others = [step.frozen(values).features(step.inputs) for values in (step.anchor, previous_values)]
        contrast = torch.stack([F.cosine_similarity(own, other, dim=1) for other in others], dim=1)
        # Eq. 3 is a cross-entropy of two, and the right answer is always the first: the model that was received.
        nearest = torch.zeros(len(own), dtype=torch.int64, device=own.device)
        return self.strength * F.cross_entropy(contrast / self.temperature, nearest)

    def finish(self, memory: Memory, work: LocalWork) -> tuple[Memory, Payload]:
        # A copy: these are views of the vector that the next job writes over.
        return {"previous": {name: value.detach().cpu().clone() for name, value in work.values.items()}}, {}


@dataclass(frozen=True, kw_only=True)
class ContrastNeeds(Refinement):
    """Changes nothing; refuses networks whose features can't be contrasted before anything starts."""

    needs_server: ClassVar[bool] = False

    def init(self, context: ServerContext) -> State:
        """Return an empty state.

        Raises:
            ConfigError: The network does not say where its features are.
        """
        network_with_features(context.model, method="moon", use="contrasts")
        return {}

    def notes(self, context: ServerContext, state: State | None = None) -> tuple[str, ...]:
        """Warn of a network whose features are no projection: the paper contrasts a projection's outputs."""
        network = network_with_features(context.model, method="moon", use="contrasts")
        if not isinstance(network, LinearHeadNetwork) or network.projection is not None:
            return ()
        return (
            "the network has no projection, so what the classifier reads is contrasted; the paper's networks have one:"
            " set model.projection=256",
        )

    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        return vector, state


@with_card(
    Card(
        title="MOON",
        source="Li et al., CVPR 2021",
        needs=("features",),
        differs=(
            "In its first job a client has no model of its own and no contrast; in the authors' program with partial"
            " participation it is contrasted with a random network.",
        ),
        limits=(Limit(given={"strength": 0.0}),),
    )
)
@takes(Contrastive, but=("name",))
def moon(**parameters: Any) -> FederatedMethod:
    """FedAvg whose clients contrast features of the model that they received and of their own last one.

    The paper's networks have a projection before the classifier: ``model: {name: lenet5, projection: 256}``.
    """
    contrast = Contrastive(**parameters)
    if not contrast.strength:
        return FederatedMethod(name="moon")
    return FederatedMethod(name="moon", terms=(contrast,), refinements=(ContrastNeeds(),))
