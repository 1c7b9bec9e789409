"""The seams of a method, and the records that travel through them: what a component imports, from one place.

Each seam is an abstract base with its FedAvg default. These names stay when modules move.
"""

from fedsweep.components.aggregation import (
    BySamples,
    Refinement,
    Replace,
    ServerUpdate,
    Uniform,
    Weighting,
    by_samples,
    mean_of_updates,
)
from fedsweep.components.base import ComponentReport, Published, ServerComponent
from fedsweep.components.codec import AsItIs, Codec
from fedsweep.components.evaluation import Evaluation, GlobalModel
from fedsweep.components.local import (
    NOBODY,
    ClientFacts,
    CrossEntropy,
    FrozenModel,
    LocalSolver,
    LocalStep,
    LocalTerm,
    LocalWork,
    Memory,
    Objective,
    OptimizerSteps,
    Passes,
)
from fedsweep.components.planning import (
    FixedInterval,
    OncePerRound,
    Pacing,
    Selection,
    SubModelPolicy,
    UniformSelection,
    WholeModel,
    check_sync_rule,
    cut_round,
    due_steps,
)
from fedsweep.components.probes import ClientTest, LocalClient, Probe
from fedsweep.models.cost import layer_costs, training_flops
from fedsweep.models.functional import features_with, head_names, head_with, logits_with
from fedsweep.models.unit_groups import UnitGroup
from fedsweep.models.unit_submodel import unit_submodel
from fedsweep.records import (
    ClientProfile,
    ClientUpdate,
    ClientWork,
    LocalJob,
    Payload,
    RoundContext,
    RoundRecord,
    ServerContext,
    State,
    SyncContext,
    SyncPoint,
)
from fedsweep.submodel import FULL_MODEL, Covered, ElementMask, FullModel, PartOfModel, SubModel
from fedsweep.trees import FlatLayout, ParamTree, coverage_mean, layout_of, load_vector, weighted_mean
from fedsweep.world.budgets import BudgetPlan
from fedsweep.world.devices import DeviceProfile, client_time
from fedsweep.world.label_stats import js_divergence, kl_divergence, population

__all__ = [
    "FULL_MODEL",
    "NOBODY",
    "AsItIs",
    "BudgetPlan",
    "BySamples",
    "ClientFacts",
    "ClientProfile",
    "ClientTest",
    "ClientUpdate",
    "ClientWork",
    "Codec",
    "ComponentReport",
    "Covered",
    "CrossEntropy",
    "DeviceProfile",
    "ElementMask",
    "Evaluation",
    "FixedInterval",
    "FlatLayout",
    "FrozenModel",
    "FullModel",
    "GlobalModel",
    "LocalClient",
    "LocalJob",
    "LocalSolver",
    "LocalStep",
    "LocalTerm",
    "LocalWork",
    "Memory",
    "Objective",
    "OncePerRound",
    "OptimizerSteps",
    "Pacing",
    "ParamTree",
    "PartOfModel",
    "Passes",
    "Payload",
    "Probe",
    "Published",
    "Refinement",
    "Replace",
    "RoundContext",
    "RoundRecord",
    "Selection",
    "ServerComponent",
    "ServerContext",
    "ServerUpdate",
    "State",
    "SubModel",
    "SubModelPolicy",
    "SyncContext",
    "SyncPoint",
    "Uniform",
    "UniformSelection",
    "UnitGroup",
    "Weighting",
    "WholeModel",
    "by_samples",
    "check_sync_rule",
    "client_time",
    "coverage_mean",
    "cut_round",
    "due_steps",
    "features_with",
    "head_names",
    "head_with",
    "js_divergence",
    "kl_divergence",
    "layer_costs",
    "layout_of",
    "load_vector",
    "logits_with",
    "mean_of_updates",
    "population",
    "training_flops",
    "unit_submodel",
    "weighted_mean",
]
