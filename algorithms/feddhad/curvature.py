"""FedAD's base rate: the share of a loss's curvatures that lie below the first wide gap between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsweep.components import PASSES_OF_A_STEP, LocalClient, ParamTree, Payload, Probe, each, taken

Loss = Callable[[Tensor], Tensor]  # parameters [P] as one vector -> scalar

# A gap must exceed rounding, too.
_ROUNDING = 1e-8


def gradient(loss: Loss, point: Tensor) -> Tensor:
    """Return the gradient [P] at a point."""
    own = point.detach().requires_grad_()
    (slope,) = torch.autograd.grad(loss(own), own)
    return slope


def curvature_along(loss: Loss, point: Tensor) -> Callable[[Tensor], Tensor]:
    """Return ``direction [P] -> H direction [P]`` with the Hessian at a point; one more backward pass each."""
    own = point.detach().requires_grad_()
    (slope,) = torch.autograd.grad(loss(own), own, create_graph=True)

    def product(direction: Tensor) -> Tensor:
        # A loss that is linear in the parameters: there is nothing to go back through a second time.
        if not slope.requires_grad:
            return torch.zeros_like(own)
        (image,) = torch.autograd.grad(slope, own, direction, retain_graph=True, allow_unused=True)
        return torch.zeros_like(own) if image is None else image

    return product


def exact_spectrum(product: Callable[[Tensor], Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return all eigenvalues [P], ascending, and the share 1/P of each."""
    identity = torch.eye(len(like), dtype=like.dtype, device=like.device)
    hessian = torch.stack([product(row) for row in identity])
    # Symmetric but for rounding, of which eigvalsh would take one triangle's.
    values = torch.linalg.eigvalsh((hessian + hessian.T) / 2)
    return values, torch.full_like(values, 1.0 / len(values))


def lanczos_spectrum(product: Callable[[Tensor], Tensor], start: Tensor, *, steps: int) -> tuple[Tensor, Tensor]:
    """Return Ritz values, ascending, and the share of the spectrum that each stands for; the shares sum to 1.

    Args:
        product: ``direction -> H direction``.
        start: Start vector [P], not zero.
        steps: Lanczos steps, at least 1; with full reorthogonalisation.

    Source: Golub and Meurant (2010), Gauss quadrature: shares are the squared first entries of the eigenvectors.
    """
    basis = [start / start.norm()]
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    for number in range(min(steps, len(start))):
        image = product(basis[number])
        diagonal.append(image @ basis[number])
        basis_matrix = torch.stack(basis)
        for _ in range(2):  # once is not enough in floating point
            image = image - basis_matrix.T @ (basis_matrix @ image)
        length = image.norm()
        # What is left of an image that lies within the basis is rounding, and no direction to go on in.
        if len(diagonal) == min(steps, len(start)) or float(length) <= 1e-10 * max(map(abs, map(float, diagonal))):
            break
        beside.append(length)
        basis.append(image / length)
    size = len(diagonal)
    matrix = torch.diag(torch.stack(diagonal))
    for number in range(size - 1):
        matrix[number, number + 1] = matrix[number + 1, number] = beside[number]
    values, vectors = torch.linalg.eigh(matrix)
    return values, vectors[0] ** 2


def gap_share(values: Tensor, shares: Tensor, *, lipschitz: float) -> float:
    """Return the share of the spectrum below the first gap wider than 4 L; 0 where there is none.

    Args:
        values: Eigenvalues, ascending.
        shares: What each stands for; they sum to 1.
        lipschitz: L, at least 0.

    Source: FedDHAD, base rate: ``d = m / h`` with m the first index with ``e_{m+1} - e_m > 4 L``. Reading: h is the
    length of the list.
    """
    wide = torch.diff(values) > 4 * lipschitz + _ROUNDING * float(values.abs().max())
    gaps = torch.nonzero(wide)
    return float(shares[: int(gaps[0]) + 1].sum()) if len(gaps) else 0.0


def raw_base_rate(
    loss: Loss, before: Tensor, after: Tensor, *, exact_up_to: int, lanczos_steps: int, start: Tensor
) -> float:
    """Return d_k of one device, before it is capped, in 0..1.

    With ``move = before - after`` and H the Hessian at ``after``, the Lipschitz constant of
    ``B(move) = H move - grad(after + move)`` is estimated along the move:
    ``L = ||H move - (grad(before) - grad(after))|| / ||move||``.

    Args:
        loss: The local loss.
        before: Parameters at the round's start [P].
        after: Parameters after local training [P].
        exact_up_to: Up to this many parameters the whole spectrum is computed, beyond it Lanczos estimates it.
        lanczos_steps: Of that estimate.
        start: Random start vector of that estimate [P].

    Source: FedDHAD, base rate. Reading: the printed B mixes a matrix and a vector; this is its consistent form.
    """
    product = curvature_along(loss, after)
    move = before - after
    lipschitz = 0.0
    if float(move.norm()) > 0:
        rest = product(move) - (gradient(loss, before) - gradient(loss, after))
        lipschitz = float(rest.norm() / move.norm())
    if len(after) <= exact_up_to:
        values, shares = exact_spectrum(product, after)
    else:
        values, shares = lanczos_spectrum(product, start, steps=lanczos_steps)
    return gap_share(values, shares, lipschitz=lipschitz)


@dataclass(frozen=True, kw_only=True)
class CurvatureGap(Probe):
    """The device's raw base rate, on a sample of its data, at its trained model and back to the one that it was sent.

    Sends ``rate``: one number. In evaluation mode; the exact spectrum in float64, Lanczos in the model's own type.

    Attributes:
        max_samples: Samples that the loss is taken over, at most.
        exact_up_to: See :func:`raw_base_rate`.
        lanczos_steps: See :func:`raw_base_rate`.
        num_params: P, for the cost.
    """

    when: ClassVar[Literal["round_end"]] = "round_end"

    max_samples: int = 64
    exact_up_to: int = 2000
    lanczos_steps: int = 60
    num_params: int
    name: str = "curvature_gap"

    def passes_over(self, num_samples: int) -> float:
        """Count three gradients, and a way there and back through one for each product with the Hessian."""
        products = 1 + (self.num_params if self.num_params <= self.exact_up_to else self.lanczos_steps)
        return PASSES_OF_A_STEP * (3 + 2 * products) * min(self.max_samples, num_samples)

    def measure(self, client: LocalClient) -> Payload:
        order = torch.randperm(len(client.targets), generator=client.stream.child("samples").torch())
        chosen = order[: self.max_samples].to(client.targets.device)
        names, shapes = list(client.params), [value.shape for value in client.params.values()]
        is_small = sum(shape.numel() for shape in shapes) <= self.exact_up_to
        dtype = torch.float64 if is_small else next(iter(client.params.values())).dtype

        def in_type(values: Tensor) -> Tensor:
            return values.to(dtype) if values.is_floating_point() else values  # of words, say

        inputs, targets = cast(Tensor, each(in_type, taken(client.inputs, chosen))), client.targets[chosen]
        # Frozen parameters, too: all that the network computes with is of one type.
        own = chain(client.model.named_parameters(), client.model.named_buffers())
        base = {name: in_type(value.detach()) for name, value in own}

        def loss(point: Tensor) -> Tensor:
            pieces = torch.split(point, [shape.numel() for shape in shapes])
            params: ParamTree = {n: p.view(s) for n, p, s in zip(names, pieces, shapes, strict=True)}
            return F.cross_entropy(client.forward_with(base | params, inputs), targets)

        before, after = (_flat(tree).to(dtype) for tree in (client.anchor, client.params))
        start = torch.randn(len(after), generator=client.stream.child("start").torch(), dtype=dtype)
        rate = raw_base_rate(
            loss,
            before,
            after,
            exact_up_to=self.exact_up_to,
            lanczos_steps=self.lanczos_steps,
            start=start.to(after.device),
        )
        return {"rate": torch.tensor([rate])}


def _flat(tree: ParamTree) -> Tensor:
    return torch.cat([value.detach().reshape(-1) for value in tree.values()])
