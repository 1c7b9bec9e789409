"""FedDHE's estimate of a client's label shares, from how its trained model's gradients differ between classes.

A class that the client has seen often is fitted already, so its gradient on a balanced set is small.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from fedsweep.trees import ParamTree

from .degree_gradients import loss_gradient

EstimateFrom = Literal["reciprocal", "norm"]


def class_gradient_norms(
    module: nn.Module, params: ParamTree, inputs: Tensor, *, targets: Tensor, num_classes: int
) -> Tensor:
    """G [C], float64: for each class the norm of the gradient of the mean loss on its samples.

    Args:
        module: The network; used in evaluation mode, and left as it is.
        params: Parameters and float buffers to use.
        inputs: Samples [S, ...], at least one of each class.
        targets: Their labels [S].
        num_classes: C.
    """
    names = {name for name, _ in module.named_parameters()}
    trained = {name: value for name, value in params.items() if name in names}
    fixed = {name: value for name, value in params.items() if name not in names}

    def forward(own: ParamTree, x: Tensor) -> Tensor:
        logits: Tensor = torch.func.functional_call(module, {**fixed, **own}, (x,), strict=False)
        return logits

    was_training = module.training
    module.eval()
    norms = []
    for label in range(num_classes):
        of_class = targets == label
        gradient = loss_gradient(forward, trained, inputs[of_class], targets=targets[of_class])
        norms.append(gradient.double().norm())
    module.train(was_training)
    return torch.stack(norms)


def estimated_shares(norms_C: Tensor, *, sharpness: float, estimate_from: EstimateFrom) -> Tensor:
    """Label shares [C] that sum to 1: ``softmax(sharpness * x)`` with ``x = 1/G`` or ``G``, divided by its mean.

    Args:
        norms_C: G, at least 0.
        sharpness: At least 0; 0: all classes alike.
        estimate_from: ``"reciprocal"``: 1/G; ``"norm"``: G.

    Source: FedDHAD, FedDHE's estimate. Reading: the paper prints softmax(G) and announces a factor that is missing in
    the formula; the reciprocal fits its reason, that a class well represented has a small gradient, and was closer to
    the truth in a trial. The division by the mean keeps the exponent in range.
    """
    largest = norms_C.max()
    if not float(largest) > 0:
        return torch.full_like(norms_C, 1.0 / len(norms_C))
    values = norms_C.clamp_min(1e-12 * float(largest))
    values = 1.0 / values if estimate_from == "reciprocal" else values
    return torch.softmax(sharpness * values / values.mean(), dim=0)
