"""Plays a set-up with Flower: ``python run_flower.py FOLDER``, in Flower's environment; see ``flower_app.py``."""

from __future__ import annotations

import os
import sys

os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0", FEDSWEEP_PEER_FOLDER=sys.argv[1])

import flower_app
import work
from flwr.simulation import run_simulation

if __name__ == "__main__":
    asked, images, _ = work.read(sys.argv[1])
    run_simulation(
        server_app=flower_app.server,
        client_app=flower_app.client,
        num_supernodes=len(images),
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": asked.processes, "include_dashboard": False},
        },
    )
