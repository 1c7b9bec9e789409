"""The batches of a tile's lanes: those of many steps are laid out at once, and gone on with after a sync point.

On a GPU each operation is a launch, however few images it has, so that laying out a step's batches by themselves takes
longer than the step.

Shape letters: K lanes, T steps, B batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedsweep.client.lanes.draws import LaneDraws, dropout_calls
from fedsweep.client.lanes.lane import Lane
from fedsweep.client.shards import steps_ahead
from fedsweep.components.local import ClientFacts
from fedsweep.trees import FlatLayout, Inputs, all_of, each, taken

# What F.cross_entropy leaves out of its mean.
_NO_TARGET = -100
# Batches of a tile that are laid out at once take up to this many bytes.
_STAGED_BYTES = 256 * 2**20


class StagedBatches:
    """Where the batches of K lanes lie: those of the step that is taken, and of T steps that are laid out.

    Args:
        batch: Inputs and targets of the step that is taken, [K, B, ...] each.
        draws: The network's own noise in it.
        position: The step's number within each client's round [K].
        active: Which lanes have the step to take [K].
        layout: How a client's vector lies.
    """

    def __init__(
        self, batch: Sequence[Tensor], draws: LaneDraws, position: Tensor, active: Tensor, layout: FlatLayout
    ) -> None:
        self._draws, self._layout = draws, layout
        self._places = [*batch, *draws.noise, position, active]
        step_bytes = sum(place.numel() * place.element_size() for place in self._places[:-2])
        self._num_staged = 1 if active.device.type == "cpu" else steps_ahead(step_bytes, within=_STAGED_BYTES)
        if self._num_staged > 1:
            self._staged = [place.new_zeros(self._num_staged, *place.shape) for place in self._places]
        else:
            self._staged = [place.unsqueeze(0) for place in self._places]
        # The clients of the last run, by their facts, and how many steps they have taken with no others in between.
        self._clients: list[ClientFacts] = []
        self._taken_in_a_row = 0
        # Of each of them the first step that is laid out, and how many are.
        self._laid_out: list[tuple[int, int]] = []
        # Where the first step that is due lies among those that are laid out.
        self._ahead = 0

    def begin(self, lanes: Sequence[Lane]) -> bool:
        """Begin a run of K lanes; says whether the run before was of the same clients in the same round."""
        # The very same facts: in tiles that runs share, another run's client may have equal ones.
        are_same = [id(lane.facts) for lane in lanes] == [id(facts) for facts in self._clients]
        self._ahead = self._laid_out_before(lanes) if are_same else 0
        if self._ahead:
            self._mark_active(0, lanes)
        if not are_same:
            self._clients, self._taken_in_a_row = [lane.facts for lane in lanes], 0
        return are_same

    def _laid_out_before(self, lanes: Sequence[Lane]) -> int:
        """Return where the first step due lies among those laid out; 0 where not all that are due there are."""
        pairs = list(zip(lanes, self._laid_out, strict=False))
        aheads = {lane.first - first for lane, (first, _) in pairs}
        if len(aheads) != 1:
            return 0
        ahead = aheads.pop()
        are_there = all(min(ahead + len(lane.sizes), self._num_staged) <= count for lane, (_, count) in pairs)
        return ahead if 0 < ahead < self._num_staged and are_there else 0

    def put(self, tick: int, lanes: Sequence[Lane], *, num_clients: int) -> bool:
        """Put the batches of the step ``tick`` in place, counted from the first due; says whether some have none.

        Args:
            tick: From 0, each step once.
            lanes: Those that the run began with.
            num_clients: So many of them have a client of their own; the others repeat the first.
        """
        at = (self._ahead + tick) % self._num_staged
        if not at:
            self._lay_out(tick, lanes, num_clients)
            self._mark_active(tick, lanes)
        if self._num_staged > 1:
            for place, staged in zip(self._places, self._staged, strict=True):
                place.copy_(staged[at])
        self._taken_in_a_row += 1
        return any(tick >= len(lane.sizes) for lane in lanes)

    def _lay_out(self, tick: int, lanes: Sequence[Lane], num_clients: int) -> None:
        """Lay out the batches of up to T steps from ``tick`` on, some behind the next sync point among them."""
        *staged, positions, _ = self._staged
        self._laid_out = []
        # As many ahead as were taken in a row, so that at most half is in vain where others come in between.
        ahead = self._taken_in_a_row if self._num_staged > 1 else 0
        for k, lane in enumerate(lanes[:num_clients]):
            left = len(lane.sizes) - tick
            sizes = lane.sizes_from(tick, min(self._num_staged, max(left, ahead))) if left > 0 else ()
            self._laid_out.append((lane.first + tick, len(sizes)))
            if not sizes:
                continue  # it goes on with its last batch, to no effect
            inputs, targets = lane.batches(lane.first + tick, len(sizes))
            if min(sizes) < lane.batch_size:
                inputs, targets = _filled_up(inputs, targets, sizes, lane.batch_size)
            for rows, values in zip(staged, (*all_of(inputs), targets), strict=False):
                rows[: len(sizes), k].copy_(values.view(len(sizes), *rows.shape[2:]))
            if self._draws.noise:
                self._draw(k, tick, lane, inputs, sizes)
        for rows in staged:
            rows[:, num_clients:] = rows[:, :1]
        steps = torch.arange(tick, tick + self._num_staged).unsqueeze(1)
        positions.copy_(steps + torch.tensor([lane.first for lane in lanes]))

    def _mark_active(self, tick: int, lanes: Sequence[Lane]) -> None:
        """Say of the steps that are laid out, of which ``tick`` is one, in which lanes they are due."""
        due = [len(lane.sizes) for lane in lanes]
        if len(set(due)) == 1:
            self._staged[-1].fill_(True)  # behind those that are due nobody reads it
            return
        steps = torch.arange(self._num_staged).unsqueeze(1) + tick - (self._ahead + tick) % self._num_staged
        self._staged[-1].copy_(steps < torch.tensor(due))

    def _draw(self, k: int, tick: int, lane: Lane, inputs: Inputs, sizes: Sequence[int]) -> None:
        """Draw the noise of a lane's steps from ``tick`` on, of so many samples each; their inputs are filled up."""
        noise = self._staged[-2 - len(self._draws.noise) : -2]
        places = list(zip(*(rows[:, k].unbind() for rows in noise), strict=True))
        drawn: list[tuple[Tensor, Tensor]] = []
        for step, size in enumerate(sizes):
            if not self._draws.knows(size):
                own = taken(inputs, slice(step * lane.batch_size, step * lane.batch_size + size))
                copied = self._layout.model(lane.vector.clone())
                self._draws.note(size, dropout_calls(lane.slot.module, copied, own))
            drawn += self._draws.drawn(places[step], lane.seed(lane.first + tick + step), size)
        torch._foreach_copy_([place for place, _ in drawn], [values for _, values in drawn])


def _filled_up(inputs: Inputs, targets: Tensor, sizes: Sequence[int], size: int) -> tuple[Inputs, Tensor]:
    """Fill batches [sum of sizes, ...] up with their first sample, and with no targets, to one size each."""
    starts = torch.tensor([0, *sizes]).cumsum(0)[:-1].unsqueeze(1)
    offsets = torch.arange(size).expand(len(sizes), -1)
    missing = offsets >= torch.tensor(sizes).unsqueeze(1)
    index = (starts + offsets.masked_fill(missing, 0)).flatten().to(targets.device)
    targets = targets.index_select(0, index)
    targets[missing.flatten().to(targets.device)] = _NO_TARGET
    return each(lambda values: values.index_select(0, index), inputs), targets
