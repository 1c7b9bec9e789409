"""Lanes: a worker's clients stepped together where their steps have the same shape.

Which clients share a tile changes no bit: a tile always has the same number of lanes, and lanes do not see each other.
So clients may be laid on workers in any way.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import nn

from fedsweep.client.lanes.gpu_memory import lanes_for_memory
from fedsweep.client.lanes.lane import Lane, LaneSteps
from fedsweep.client.lanes.recording import NotRecorded
from fedsweep.client.lanes.tile import Tile
from fedsweep.client.messages import ClientSide, LaneSettings
from fedsweep.components.local import Objective
from fedsweep.errors import first_line, lacks_memory
from fedsweep.submodel import SubModel
from fedsweep.tasks.base import Task

# Tiles of this many shapes are kept: each has matrices of its own.
_KEPT_TILES = 8
# What torch's vmap says of a step that branches.
_BRANCHES = "data-dependent control flow"


class Lanes:
    """Steps clients together; those that can't be are left to be stepped one by one.

    Args:
        side: The experiment's client side.
        settings: How many at once.
    """

    def __init__(self, side: ClientSide, settings: LaneSettings) -> None:
        self._side, self._width, self._records = side, settings.width, settings.records
        self._is_fitted = not settings.fits_memory
        self._tiles: dict[Hashable, Tile] = {}
        self._refused: dict[Hashable, str] = {}
        self._notes: dict[str, None] = {}

    @property
    def all_notes(self) -> tuple[str, ...]:
        """List all that could not be done in lanes."""
        return tuple(self._notes)

    def take(self, lanes: Sequence[Lane]) -> dict[Lane, LaneSteps]:
        """Take the steps that are due.

        Returns:
            What each client has taken; who is missing has not been changed.
        """
        groups: dict[Hashable, list[Lane]] = {}
        for lane in lanes:
            key = lane.key()
            reason = lane_refused(self._side, lane) or self._refused.get(key)
            if reason is None:
                groups.setdefault(key, []).append(lane)
            else:
                self._note(one_by_one_note(reason))
        taken: dict[Lane, LaneSteps] = {}
        for key, group in groups.items():
            # Those with equally many steps side by side, so that few lanes idle.
            waiting = sorted(group, key=lambda lane: (-len(lane.sizes), lane.facts.client))
            while waiting and key not in self._refused:
                done = self._together(key, waiting)
                taken |= done
                waiting = waiting[len(done) :]
        return taken

    def _together(self, key: Hashable, waiting: Sequence[Lane]) -> dict[Lane, LaneSteps]:
        """Return the steps of the first of some clients, as many as a tile has room for.

        Nothing where they have to be tried again, or can't be had.
        """
        try:
            tile = self._tile(key, waiting)
            lanes = waiting[: self._width]  # only now: the first tile says how many there are
            steps = tile.run(lanes)
        except NotRecorded as error:
            self._records = False
            self._tiles.clear()
            self._note(not_recorded_note(error))
            return {}
        except Exception as error:
            if lacks_memory(error) and self._width > 1:
                self._halve()
                return {}
            # Whatever it is, no client has been changed: one by one it comes out as a client's error, or does not.
            self._refused[key] = _why(error)
            self._tiles.pop(key, None)  # it holds its clients' memory
            self._note(one_by_one_note(self._refused[key]))
            return {}
        return dict(zip(lanes, steps, strict=True))

    def _halve(self) -> None:
        self._tiles.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        before, self._width = self._width, -(-self._width // 2)
        self._note(f"lanes: {before} do not fit into the device's memory: {self._width} at once from now on")

    def _tile(self, key: Hashable, waiting: Sequence[Lane]) -> Tile:
        if not self._is_fitted:
            self._width, notes = lanes_for_memory(self._side, waiting, self._width)
            self._is_fitted = True
            for text in notes:
                self._note(text)
        tile = self._tiles.pop(key, None)
        if tile is None:
            tile = Tile(self._side, waiting[0], self._width, records=self._records)
            for old in [*self._tiles][: len(self._tiles) + 1 - _KEPT_TILES]:
                del self._tiles[old]
        self._tiles[key] = tile  # the one that was used last comes last
        return tile

    def _note(self, text: str) -> None:
        self._notes.setdefault(text)


def _why(error: Exception) -> str:
    if _BRANCHES in str(error):
        return "the network, or the method, goes by the values of one client (an if over a tensor)"
    return f"the method's clients can't take a step together ({first_line(error)})"


def one_by_one_note(reason: str) -> str:
    """Return the sentence for the user that clients are stepped one by one, and why."""
    return f"lanes: {reason}: clients are stepped one by one"


def not_recorded_note(error: Exception) -> str:
    """Return the sentence for the user that a step is not recorded, and why."""
    return f"lanes: a step can't be recorded ({first_line(error)}): its kernels are launched one by one"


def lane_refused(side: ClientSide, lane: Lane) -> str | None:
    """Give the reason why a client that is there can't be stepped with others, as :func:`why_alone`."""
    if lane.slot.has_own_constants:
        # A tile has one module: what lies in no lane's vector must be the same in all, not of one shape alone.
        return f"a client's part of the network ({type(lane.facts.submodel).__name__}) has frozen weights of its own"
    return why_alone(side, lane.facts.submodel, lane.slot.module, is_padded=lane.is_padded)


def why_alone(side: ClientSide, submodel: SubModel, module: nn.Module, *, is_padded: bool) -> str | None:
    """Give the reason why a client's steps can't be taken with others', as far as it is known; None: they can.

    Padded: some batch has fewer samples than the others, and is filled up.
    """
    if not side.solver.plain:
        return f"the method's solver ({type(side.solver).__name__}) takes steps of a kind of its own"
    if submodel.step_parts is not None:
        return f"what a client trains ({type(submodel).__name__}) changes from step to step"
    if submodel.scales_steps:
        return f"what a client trains ({type(submodel).__name__}) scales its steps value by value"
    if side.optimizer.groups:
        return "training.optimizer.groups step parameters in ways of their own"
    apart = [f"term {term.name}" for term in side.terms if not term.in_lanes]
    if not side.objective.in_lanes:
        apart.append(f"objective {type(side.objective).__name__}")
    if apart:
        return f"the {apart[0]} draws random numbers, or looks at values, of one client at a time"
    after = [term.name for term in side.terms if term.has_own("after_step")]
    if after:
        return f"the term {after[0]} works after each step"
    if tables := [*filter(None, map(_why_not_joined, module.modules()))]:
        return tables[0]
    if not is_padded:
        return None
    whole = "training.local_steps, or equal_steps: true, makes all batches whole"
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in module.modules()):
        return f"batch norm would take in what fills up smaller batches ({whole})"
    if any(getattr(layer, "scale_grad_by_freq", False) for layer in module.modules()):
        return f"an embedding (scale_grad_by_freq) would count what fills up smaller batches ({whole})"
    reading = [term.name for term in side.terms if term.has_own("loss")]
    readers = [f"term {name}" for name in reading]
    readers += [] if _skips_padding(side.objective) else [f"objective {type(side.objective).__name__}"]
    readers += [] if _skips_padding(side.task) else [f"task {type(side.task).__name__}"]
    return f"the {readers[0]} would take in what fills up smaller batches ({whole})" if readers else None


def _skips_padding(component: Objective | Task) -> bool:
    """Tell whether its loss passes padding over: what a class says of its loss does not hold for a subclass's own."""
    classes = type(component).__mro__
    says = next(place for place, kind in enumerate(classes) if "skips_padding" in vars(kind))
    computes = next(place for place, kind in enumerate(classes) if "loss" in vars(kind))
    return component.skips_padding and says <= computes


def _why_not_joined(module: nn.Module) -> str | None:
    """Give the reason why a layer is no table whose lanes torch's vmap looks up as one; None: it is, or is no table."""
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return None
    if module.max_norm is not None:
        # Lane by lane, and in rows, too, that only what fills up smaller batches reads.
        return "an embedding changes its rows as it reads them (max_norm)"
    if isinstance(module, nn.Embedding) and module.padding_idx is not None and module.weight.requires_grad:
        return "an embedding has a row of padding (padding_idx), which torch would move in all lanes but the first"
    return None
