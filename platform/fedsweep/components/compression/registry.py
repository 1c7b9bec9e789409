"""The codecs that a configuration can name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fedsweep.components.codec import AsItIs, Codec
from fedsweep.components.compression.low_rank import PowerSgd
from fedsweep.components.compression.quantizers import Int8, Qsgd, bf16, fp16
from fedsweep.components.compression.sketches import CountSketch
from fedsweep.components.compression.sparsifiers import RandomK, Sign, Ternary, TopK

CODECS: Mapping[str, Callable[..., Codec]] = {
    "none": AsItIs,
    "fp16": fp16,
    "bf16": bf16,
    "int8": Int8,
    "qsgd": Qsgd,
    "topk": TopK,
    "randomk": RandomK,
    "sign": Sign,
    "ternary": Ternary,
    "count_sketch": CountSketch,
    "powersgd": PowerSgd,
}
