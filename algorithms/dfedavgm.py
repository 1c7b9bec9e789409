"""DFedAvgM: D-PSGD whose clients take several local steps with momentum between two exchanges.

Source: Sun, Li, Wang (2022): Decentralized federated averaging. TPAMI (arXiv:2104.11375, 2021). Algorithm 1.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from fedsweep import Card, FederatedMethod, Limit, with_card
from fedsweep.components import BelowOne, LocalStep, LocalTerm, LocalWork, Memory, ParamTree, Payload

from .dpsgd import dpsgd
from .parts.gossip import Gossip

_NAME = "dfedavgm"


@dataclass(frozen=True, kw_only=True)
class HeavyBall(LocalTerm):
    """``y_{k+1} = y_k - rate g_k + momentum (y_k - y_{k-1})``, with ``y_{-1} = y_0`` at each job's start.

    Attributes:
        momentum: At least 0 and below 1.
    """

    stateful: ClassVar[bool] = True  # from a job's start to its end
    in_lanes: ClassVar[bool] = False
    sets_params: ClassVar[bool] = True

    name: str = _NAME
    momentum: float

    def prepare(self, memory: Memory, anchor: ParamTree) -> tuple[Memory, ParamTree | None]:
        return {"at": dict(anchor), "move": {}}, None

    def after_step(self, step: LocalStep, gradients: ParamTree) -> tuple[Memory, ParamTree | None]:
        if not self.momentum:
            return step.memory, None
        before, move = step.memory["at"], step.memory["move"]
        assert isinstance(before, dict) and isinstance(move, dict)
        now = {
            name: value + self.momentum * move[name] if move else value.clone() for name, value in step.params.items()
        }
        return {"at": now, "move": {name: value - before[name] for name, value in now.items()}}, now

    def finish(self, memory: Memory, work: LocalWork) -> tuple[Memory, Payload]:
        return {}, {}


@with_card(
    Card(
        title="DFedAvgM",
        source="Sun et al., TPAMI 2022",
        needs=("graph", "classes"),
        live=("personal_accuracy",),
        limits=(Limit(given={"momentum": 0.0}, of="dpsgd"),),
        differs=("its quantised messages are left out: whole models travel",),
    )
)
def dfedavgm(*, momentum: BelowOne = 0.9) -> FederatedMethod:
    """D-PSGD with momentum in the clients' steps, which begins anew after each exchange.

    One exchange a round, along ``scenario.topology``. It is D-PSGD with ``training.optimizer.momentum``; here the
    momentum is the method's, so that methods are compared under one optimiser.

    Args:
        momentum: At least 0 and below 1; 0: D-PSGD.
    """
    pacing = Gossip(method=_NAME, interval=None)
    return dataclasses.replace(dpsgd(), name=_NAME, pacing=pacing, terms=(HeavyBall(momentum=momentum),))
