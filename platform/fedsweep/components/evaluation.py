"""Evaluation: which model answers when the run is tested."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fedsweep.components.base import ServerComponent
from fedsweep.components.probes import ClientTest
from fedsweep.guard import Call, returns
from fedsweep.records import ClientUpdate, State


def _logits(answer: Any, call: Call) -> None:
    if not isinstance(answer, Tensor) or answer.ndim < 2 or len(answer) != len(call.like):
        raise call.wrong(f"logits [{len(call.like)}, classes], or other outputs of as many samples", answer)


class Evaluation(ServerComponent):
    """Predicts for test inputs."""

    @abstractmethod
    @returns(_logits)
    def predict(self, state: State, model: nn.Module, updates: Sequence[ClientUpdate], inputs: Tensor) -> Tensor:
        """Return logits [B, C] for inputs [B, ...].

        Args:
            state: The component's state.
            model: Loaded with the server's model, in evaluation mode.
            updates: The round's last attendees; with vectors only where ``needs_updates``.
            inputs: Transformed, without augmentation.
        """

    def voters(self, state: State) -> Sequence[Tensor] | None:
        """Return the updates' models [V] that answers depend on, as the state keeps them, to test a finished run.

        Args:
            state: The component's state after the round.

        Returns:
            None where they are not kept.
        """
        return ()

    def client_test(self) -> ClientTest | None:
        """Give the test of clients' own models, where the method has some; each on its share of the test set."""
        return None


@dataclass(frozen=True, kw_only=True)
class GlobalModel(Evaluation):
    """The server's model answers."""

    def predict(self, state: State, model: nn.Module, updates: Sequence[ClientUpdate], inputs: Tensor) -> Tensor:
        logits: Tensor = model(inputs)
        return logits
