"""What of the driver's disk needs no cluster."""

from __future__ import annotations

import gc

import pyarrow as pa
import pytest

from fedsweep.driver.ray_disk import _Upload


def test_a_file_that_can_not_be_sent_is_not_sent_again_when_it_goes() -> None:
    sent: list[bytes] = []

    def send(data: bytes) -> None:
        sent.append(data)
        raise TimeoutError("no answer")

    with pytest.raises(TimeoutError, match="no answer"), pa.PythonFile(_Upload(send), mode="w") as stream:
        stream.write(b"x")
    del stream
    gc.collect()
    assert sent == [b"x"]
