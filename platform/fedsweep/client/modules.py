"""A client's values as one vector, and the module that is bound to them."""

from __future__ import annotations

from functools import cache, cached_property, partial

import torch
from torch import Tensor, nn

from fedsweep.components.local import eval_copy
from fedsweep.submodel import SubModel
from fedsweep.trees import FlatLayout, ParamTree, constants, moving_buffers, trained_params


class BoundModule:
    """A module whose parameters and float buffers can be bound to any client's vector: a slot for clients.

    Args:
        module: It is moved to the device, and from now on its gradients are views of :attr:`gradient`.
        layout: How its values lie in a vector.
        device: Where it lives.
        whole: The full network, where it is a part of that.

    Attributes:
        gradient: Where backward passes leave the gradient [P].
        gradients: The same by name, as views.
        parameters: Those of the module that are trained, in the layout's order.
        eval_copy: Gives a copy that is only asked; made when it is first wanted.
    """

    def __init__(self, module: nn.Module, layout: FlatLayout, device: str, whole: nn.Module | None = None) -> None:
        self.module = module.to(device)
        self._whole = whole
        self.layout = layout
        self.gradient = torch.zeros(layout.num_params, dtype=layout.dtype, device=device)
        self.parameters = list(trained_params(self.module).values())
        self._tensors: list[Tensor] = list(self.parameters)
        self.gradients = layout.params(self.gradient)
        for parameter, view in zip(self._tensors, self.gradients.values(), strict=True):
            # A backward pass adds to the gradient that it finds, so from now on all gradients lie in the one vector.
            parameter.grad = view
        self._tensors += moving_buffers(self.module).values()
        self._bound: list[Tensor] | None = None
        self.eval_copy = cache(partial(eval_copy, self.module))

    @cached_property
    def has_own_constants(self) -> bool:
        """Tell whether values that are never trained were cut with the others.

        Then parts of one shape may have others; in no client's vector, so that a tile's one module can't have them.
        """
        whole = {} if self._whole is None else constants(self._whole)
        return any(whole[name].shape != value.shape for name, value in constants(self.module).items() if name in whole)

    def bind(self, views: list[Tensor]) -> nn.Module:
        """Return the module, with the given tensors as its parameters and buffers."""
        # By the list itself, of which each client has one: nothing is compared where the same client is stepped again.
        if self._bound is not views:
            # Not strict: riders come last in the layout, and no tensor of the module is theirs.
            for tensor, view in zip(self._tensors, views, strict=False):
                tensor.data = view
            self._bound = views
        return self.module

    def descend(self, loss: Tensor, values: list[Tensor], rate: float) -> Tensor:
        """Take a step of the loss's gradient alone, to the same bits as by way of :attr:`gradient`.

        A backward pass would read and write that vector twice before an optimiser reads it: with 1.6 million parameters
        an eighth of a step's time.

        Args:
            loss: A scalar.
            values: The bound tensors, as for :meth:`bind`.
            rate: The learning rate.

        Returns:
            The loss.
        """
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        pairs = [(value, gradient) for value, gradient in zip(values, gradients, strict=False) if gradient is not None]
        torch._foreach_add_([value for value, _ in pairs], [gradient for _, gradient in pairs], alpha=-rate)
        return loss.detach()


class ClientModel:
    """The model of one client in one round.

    Args:
        slot: The module of the sub-model's size, to which clients are bound in turn.
        submodel: The part that the client trains.
        full: The full model's layout.

    Attributes:
        vector: The values [V of the part].
        params: The trained ones by name, as views.
        values: These and the float buffers.
        views: All that lies in the vector, in its order.
        flat: The params as one vector [P of the part], whose gradient is the slot's.
        anchor: The model that the client last received [V of the part], where somebody looks at it; in what it is not
            sent, its own at the job's start.
        anchor_tree: The same by name, without riders; empty where nobody looks.
    """

    def __init__(self, slot: BoundModule, submodel: SubModel, full: FlatLayout) -> None:
        self.slot, self.submodel, self.full, self.layout = slot, submodel, full, slot.layout
        self.vector = slot.gradient.new_zeros(self.layout.num_values)
        self._named = self.layout.views(self.vector)
        self.params, self.values = self.layout.parts(self._named)
        self.views = list(self._named.values())
        self.flat = nn.Parameter(self.vector[: self.layout.num_params])
        self.flat.grad = slot.gradient
        self.anchor: Tensor | None = None
        self.anchor_tree: ParamTree = {}

    @property
    def riders(self) -> ParamTree:
        """Optimiser state that moves with the model, by name."""
        return {name: view for name, view in self._named.items() if name not in self.values}

    def receive(self, vector: Tensor) -> None:
        """Take the client's part of the server's model [V]."""
        self.vector.copy_(self.submodel.extract(vector, self.full))

    def set_anchor(self, anchor: Tensor) -> None:
        """Make an anchor the one that terms and probes see. Its views are made once: they hold as long as it does."""
        self.anchor, self.anchor_tree = anchor, self.layout.model(anchor)

    def complete_anchor(self) -> None:
        """Put the present values into the anchor where the client was sent none: they need not be the server's."""
        is_sent = self.submodel.embed(self.vector, self.full).cover
        if self.anchor is not None and is_sent is not None:
            self.set_anchor(torch.where(is_sent.to(self.vector.device), self.anchor, self.vector))

    def replace(self, values: ParamTree | None) -> None:
        """Put other values in the place of some; None: of none."""
        for name, value in (values or {}).items():
            self._named[name].copy_(value)

    def bound(self) -> nn.Module:
        """Return the module with these values, in the mode in which it was left."""
        return self.slot.bind(self.views)
