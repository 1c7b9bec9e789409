"""What travels to and from client actors comes out as it went in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny import net, part_of

from fedsweep.client.memories import grown_memory
from fedsweep.fleet.ray_wire import sent_memory
from fedsweep.trees import are_equal, layout_of, to_arrays, to_tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.bool])
def test_tensors_of_each_type_come_out_as_they_went_in(dtype: torch.dtype) -> None:
    payload = {"codec": {"values": torch.tensor([[0.0, 1.0, 3.0]]).to(dtype)}, "count": 3}
    sent = to_arrays(payload)
    assert isinstance(sent["codec"]["values"], np.ndarray) == (dtype != torch.bfloat16), "numpy has no bfloat16"
    arrived = to_tensors(sent)
    assert arrived["count"] == 3 and arrived["codec"]["values"].dtype == dtype
    assert torch.equal(arrived["codec"]["values"], payload["codec"]["values"])  # type: ignore[index]


def test_of_a_memory_whose_tensors_are_views_each_value_travels_once() -> None:
    """As those are that a client keeps of a part, which lie in one vector of the full model's size."""
    full, part = layout_of(net()), part_of({"fc1": [0, 3]})
    own = part.layout(full).params(torch.arange(float(part.layout(full).num_values)))
    memory: Any = {"terms": {"moon": grown_memory(own, None, submodel=part, full=full), "seen": (torch.ones(3), [1])}}
    sent = sent_memory(memory)
    assert are_equal(sent, memory)
    views, travels = memory["terms"]["moon"].values(), sent["terms"]["moon"].values()
    assert sum(tensor.untyped_storage().nbytes() for tensor in travels) == 4 * full.num_values
    assert sum(tensor.untyped_storage().nbytes() for tensor in views) == 4 * full.num_values * len(views)
    assert sent["terms"]["seen"][0] is memory["terms"]["seen"][0], "what has memory of its own is not copied"
