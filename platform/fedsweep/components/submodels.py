"""Sub-models: which part of the full model a client gets, and who decides.

The default is the whole model. A sub-model really is smaller: ``extract`` gives the vector that travels, ``embed``
puts a client's vector back to full shape together with which coordinates it covers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedsweep.components.base import ServerComponent
from fedsweep.records import ClientUpdate, RoundContext, State, SyncContext
from fedsweep.submodel import FULL_MODEL, SubModel


class SubModelPolicy(ServerComponent):
    """Decides each cohort member's sub-model.

    Class attributes:
        cuts: Clients may get less than the whole model.
    """

    cuts: ClassVar[bool] = True

    @property
    def scales_steps(self) -> bool:
        """Whether parts may have a :meth:`~fedsweep.submodel.SubModel.step_scale`."""
        return False

    @abstractmethod
    def assign(self, state: State, context: RoundContext) -> tuple[Mapping[int, SubModel], State]:
        """Each cohort member's sub-model, and the new state."""

    def settle(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        """The server's next model [V] as the policy leaves it, and the new state: after all refinements.

        Where the parts of later rounds leave something out for good, this is where it becomes zero.
        """
        return vector, state


@dataclass(frozen=True, kw_only=True)
class WholeModel(SubModelPolicy):
    """Everybody gets the whole model."""

    cuts: ClassVar[bool] = False

    def assign(self, state: State, context: RoundContext) -> tuple[Mapping[int, SubModel], State]:
        return dict.fromkeys(context.cohort, FULL_MODEL), state
