"""What travels to and from client actors comes out as it went in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsweep.trees import to_arrays, to_tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.bool])
def test_tensors_of_each_type_come_out_as_they_went_in(dtype: torch.dtype) -> None:
    payload = {"codec": {"values": torch.tensor([[0.0, 1.0, 3.0]]).to(dtype)}, "count": 3}
    sent = to_arrays(payload)
    assert isinstance(sent["codec"]["values"], np.ndarray) == (dtype != torch.bfloat16), "numpy has no bfloat16"
    arrived = to_tensors(sent)
    assert arrived["count"] == 3 and arrived["codec"]["values"].dtype == dtype
    assert torch.equal(arrived["codec"]["values"], payload["codec"]["values"])  # type: ignore[index]
