"""Networks, the unit groups that sub-models cut along, and what a forward pass costs."""

from fedsweep.models.network import Network
from fedsweep.models.registry import MODELS, build_model, model_names
from fedsweep.models.unit_groups import UnitGroup

__all__ = ["MODELS", "Network", "UnitGroup", "build_model", "model_names"]
