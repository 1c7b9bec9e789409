"""Runs in MLflow: one MLflow run per experiment, which a resumed experiment goes on with.

A run is known by ids kept in its folder, never by MLflow's global "active run". Nothing that happens to the store
once a run has started ends the run: rounds are kept and tried again, and what is missing in the end is said once.
"""

from __future__ import annotations

import getpass
import json
import logging
import math
import re
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from itertools import batched
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.errors import ResourceError
from fedsweep.tracking.observers import Observer, RunInfo
from fedsweep.tracking.store import (
    PATIENCE_S,
    check_store,
    experiment_id,
    open_store,
    probe_store,
    quiet_mlflow,
    redacted,
)

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from fedsweep.records import RoundRecord

