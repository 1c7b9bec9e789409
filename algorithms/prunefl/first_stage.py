"""PruneFL's first stage: a mask by training in one place, on a client or on the server.

Source: Jiang et al. (2022), section 4.1.

Shape letters: P params.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsweep import ConfigError, Stream
from fedsweep.components import PASSES_OF_A_STEP, PASSES_TAKEN, LocalClient, Payload, Probe, taken, trained_params

from ..parts.element_masks import decided, weight_layers
from .choice import Choice

# Source: Jiang et al. (2022), section 6, and the authors' program: ten batches of twenty samples; the mask is chosen
# again every 50 passes over them once 1.5 / C of the samples are right; it ends when five choices in a row changed the
# number of alive weights by at most a tenth, or after 1000 passes. Here in steps, ten a pass.
_SAMPLES, _BATCH, _STEPS, _EVERY, _CALM, _CHANGE, _SHARE = 200, 20, 10_000, 500, 5, 0.1, 0.3


def mask_by_training(
    model: nn.Module, samples: tuple[Tensor, Tensor], *, num_classes: int, choice: Choice, rate: float, source: Stream
) -> tuple[Tensor, int]:
    """Run the first stage: train on a few samples in one place, and choose what stays alive on the way.

    Args:
        model: Where it begins; stays as it is.
        samples: Inputs and labels; at most 200 of them are taken.
        num_classes: C.
        choice: The rule.
        rate: SGD's learning rate.
        source: Random numbers.

    Returns:
        What is alive (bool [P]), and how many samples went through a step, repeats included.

    Raises:
        ConfigError: Training does not converge at this rate.
    """
    student = copy.deepcopy(model).train()
    params = list(trained_params(student).values())
    num_params, layers = sum(p.numel() for p in params), weight_layers(student)
    times = choice.weight_times(student, layers)
    order = torch.randperm(len(samples[1]), generator=source.torch())[:_SAMPLES]
    order = order.to(samples[1].device)
    inputs, targets = taken(samples[0], order), samples[1][order]
    mask = torch.ones(num_params, dtype=torch.bool)
    gains, right, calm, seen = torch.zeros(num_params), [0.0] * (_SAMPLES // _BATCH), 0, 0
    with source.drawn_globally(bits=56):  # for the network's own draws
        for step in range(1, _STEPS + 1):
            begin = (step - 1) * _BATCH % len(targets)
            batch = slice(begin, begin + _BATCH)
            logits = student(taken(inputs, batch))
            seen += len(logits)
            loss = F.cross_entropy(logits, targets[batch])
            gradients = torch.autograd.grad(loss, params, materialize_grads=True)
            gains += torch.cat([g.flatten() for g in gradients]).square().cpu()
            right = [*right[1:], float((logits.argmax(1) == targets[batch]).double().mean())]
            _descend(params, gradients, mask, rate)
            if step % _EVERY == 0 and sum(right) / len(right) >= 1.5 / num_classes:
                before = int(mask.sum())
                mask = choice.again(mask, gains, _sizes(params), layers=layers, times=times, share=_SHARE)
                calm = calm + 1 if abs(int(mask.sum()) - before) <= _CHANGE * before else 0
                gains.zero_()
                _descend(params, gradients, mask, 0.0)
                if calm == _CALM:
                    break
    sizes = _sizes(params)
    if not bool(torch.isfinite(sizes).all()):
        raise ConfigError(f"prunefl's first stage does not converge; lower method.first_learning_rate={rate}")
    return choice.trimmed(mask, sizes, layers), seen


def _sizes(params: Sequence[Tensor]) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in params]).abs().cpu()


def _descend(params: Sequence[Tensor], gradients: Sequence[Tensor], mask_P: Tensor, rate: float) -> None:
    masks = torch.split(mask_P, [parameter.numel() for parameter in params])
    with torch.no_grad():
        for parameter, gradient, alive in zip(params, gradients, masks, strict=True):
            parameter.sub_(gradient, alpha=rate).mul_(alive.view(parameter.shape).to(parameter.device))


@dataclass(frozen=True, kw_only=True)
class FirstMask(Probe):
    """The first stage on one client, which sends the mask, a bit for each weight.

    Attributes:
        place: The client; None: nobody, the server does it itself.
        samples: How many it has.
        choice: The rule.
        rate: Learning rate.
    """

    place: int | None
    samples: int
    choice: Choice
    rate: float
    name: str = "first_mask"

    @property
    def passes(self) -> float:
        return PASSES_OF_A_STEP * _STEPS * _BATCH / self.samples if self.samples else 0

    def asks(self, client: int) -> bool:
        return client == self.place

    def measure(self, client: LocalClient) -> Payload:
        mask, seen = mask_by_training(
            client.model,
            (client.inputs, client.targets),
            num_classes=client.num_classes,
            choice=self.choice,
            rate=self.rate,
            source=client.stream,
        )
        passes = torch.tensor(PASSES_OF_A_STEP * seen / self.samples, dtype=torch.float64)
        return {"mask": decided(mask, weight_layers(client.model)), PASSES_TAKEN: passes}
