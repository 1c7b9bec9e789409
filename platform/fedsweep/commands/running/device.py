"""Each network tried on a device, under somebody's eyes."""

from __future__ import annotations

from pathlib import Path

import torch

from fedsweep.bench import device_proof
from fedsweep.bench.machine import machine_facts
from fedsweep.commands.terminal.output import make_console, make_table, note, write_json
from fedsweep.errors import ResourceError

_STEPS = {"loop": "one by one", "lanes": "lanes", "graph": "lanes, recorded"}


def try_device(device: str, json: Path | None) -> int:
    """Try each network, and print what a run would do with it; 1 where one takes no step at all."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ResourceError("--gpu, but torch sees no GPU here")
    tried: list[device_proof.Proved] = []
    table = make_table("network", "clients' steps", "at once", "off the loop by", "seconds", left=2)
    for proved in device_proof.proofs(device):
        tried.append(proved)
        stepping = proved.stepping
        sentences = [proved.problem or ""] if stepping is None else stepping.notes
        note(f"{proved.network}: {_STEPS.get(stepping.kind, '') if stepping else 'FAILS'}")
        for sentence in sentences:
            note(f"  {sentence}")
        off = "-" if stepping is None or stepping.off is None else f"{stepping.off:.1e}"
        words = ("FAILS", "-") if stepping is None else (_STEPS[stepping.kind], str(stepping.width))
        table.add_row(proved.network, *words, off, f"{proved.seconds:.1f}")
    make_console().print(table, markup=False)
    if json is not None:
        write_json(json, {"machine": machine_facts(device), "networks": [proved.tree() for proved in tried]})
    return int(any(proved.stepping is None for proved in tried))
