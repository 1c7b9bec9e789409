"""A federated method is a value: one component per seam. FedAvg is the value with every default."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fedsweep.components.aggregation import Aggregation, BySamples, Mean, Refinement, Replace, ServerUpdate, Weighting
from fedsweep.components.base import ServerComponent
from fedsweep.components.codec import AsItIs, Codec
from fedsweep.components.evaluation import Evaluation, GlobalModel
from fedsweep.components.local import LocalSolver, LocalTerm, Objective, OptimizerSteps, Passes, TaskLoss
from fedsweep.components.planning import OncePerRound, Pacing, Selection, SubModelPolicy, UniformSelection, WholeModel
from fedsweep.components.probes import Probe
from fedsweep.errors import ConfigError, InvariantError
from fedsweep.guard import ask
from fedsweep.records import State


@dataclass(frozen=True, kw_only=True)
class MethodSettings:
    """A method's wishes where the training section is silent.

    Attributes:
        local_steps: Steps per client and round, whatever the training section says; None: as configured.
        equal_steps: Whether all clients take the same number of steps where the configuration
            leaves it open; None: no.
    """

    local_steps: int | None = None
    equal_steps: bool | None = None


@dataclass(frozen=True, kw_only=True)
class FederatedMethod:
    """One component per seam; what is not given is FedAvg's.

    Attributes:
        name: The paper's name in lower case.
        source: Authors, year, title; where the module's docstring has no ``Source:``.
        objective: What clients minimise.
        terms: What is added to it.
        solver: How local steps are taken.
        selection: Who takes part.
        pacing: How a round is cut into sync points.
        submodels: Which part of the model each client gets.
        weighting: How much each attendee counts.
        aggregation: How one model comes of several.
        server_update: The server's next model from that.
        refinements: Work on the aggregate, in order.
        evaluation: Which model is tested.
        codec: What clients' messages go through, whatever the configuration's ``communication`` says.
        settings: What the method asks of the training section.
    """

    name: str
    source: str = ""
    objective: Objective = TaskLoss()
    terms: tuple[LocalTerm, ...] = ()
    solver: LocalSolver = OptimizerSteps()
    selection: Selection = UniformSelection()
    pacing: Pacing = OncePerRound()
    submodels: SubModelPolicy = WholeModel()
    weighting: Weighting = BySamples()
    aggregation: Aggregation = Mean()
    server_update: ServerUpdate = Replace()
    refinements: tuple[Refinement, ...] = ()
    evaluation: Evaluation = GlobalModel()
    codec: Codec = AsItIs()
    settings: MethodSettings = MethodSettings()

    def __post_init__(self) -> None:
        """Check what must be unique, and that the parts go together."""
        names = [term.name for term in self.terms]
        if len(set(names)) != len(names):
            raise ConfigError(f"the terms of a method need names of their own, but {self.name} has {names}")
        self._check_aggregation()
        self._check_submodels()
        self._check_hubs()
        self._check_several()
        adding = {term.name for term in self.terms if term.adds_up}
        if adding and self.pacing.discards_work():
            raise ConfigError(
                f"method {self.name}: its server throws models away ({type(self.pacing).__name__}), but adds up what"
                f" the term {min(adding)} notes of each; leave one of them out"
            )
        setting = [term.name for term in self.terms if term.sets_params]
        if len(setting) > 1:
            raise ConfigError(
                f"method {self.name}: the terms {setting[0]} and {setting[1]} both put other values in place of what a"
                " step led to, so that it would matter which comes first; leave one of them out"
            )
        self._check_moves()
        if not self.pacing.carries_work():
            return
        begins = {term.name for term in self.terms if term.needs_exact_moves} | adding
        verbs = {t.name: "sends" if t.sends else "begins" for t in self.terms if t.sends or t.name in begins}
        parts = [f"the term {name}, which {verb}" for name, verb in verbs.items()]
        parts += ["sub-models, which are drawn"] if self.submodels.cuts else []
        parts += [f"the codec {type(self.codec).__name__}, which encodes moves"] if self.codec.encodes else []
        if parts:
            raise ConfigError(
                f"method {self.name}: its clients keep what they trained over several rounds, which does not go"
                f" with {parts[0]} anew in each round; leave one of them out, or choose a pacing that ends all work"
                " with its round"
            )

    def _check_moves(self) -> None:
        """Refuse what reads off moves what steps did, where moves are made of something else, too."""
        of_every_step = [f"the term {term.name}" for term in self.terms if term.needs_effective_steps]
        # A weighting that needs the number of steps alone compares moves, however many of the steps trained a value.
        weighting = self.weighting
        of_every_step += [type(weighting).__name__] * (weighting.needs_one_rate and not weighting.needs_effective_steps)
        if of_every_step and self.submodels.draws_in_steps:
            raise ConfigError(
                f"method {self.name}: {of_every_step[0]} takes clients' moves for those of all their steps, but"
                f" {type(self.submodels).__name__} draws in each step what it trains; leave one of them out"
            )
        of_steps = [f"the term {t.name}" for t in self.terms if t.needs_effective_steps or t.adds_up]
        of_steps += [type(weighting).__name__] * weighting.needs_one_rate
        setting = [term.name for term in self.terms if term.sets_params]
        parts = [f"{t.name} may have clients begin with others (prepare)" for t in self.terms if t.has_own("prepare")]
        parts += [f"{name} puts other values in place of what a step led to" for name in setting]
        if of_steps and parts:
            raise ConfigError(
                f"method {self.name}: {of_steps[0]} takes the move from the model that was received for that of its"
                f" steps, but the term {parts[0]}; leave one of them out"
            )
        if setting and self.submodels.scales_steps:
            raise ConfigError(
                f"method {self.name}: the term {setting[0]} puts other values in place of what a step led to, but"
                f" {type(self.submodels).__name__} has steps of another scale; leave one of them out, or set"
                " method.multiplier=activation"
            )

    def _check_submodels(self) -> None:
        """Refuse what asks for more of clients' models than they train, or than they send."""
        policy, components = type(self.submodels).__name__, [part for _, part in self.server_components]
        whole = [type(part).__name__ for part in components if part.needs_whole_models]
        if whole and self.submodels.cuts:
            raise ConfigError(
                f"method {self.name}: its {whole[0]} needs clients that train the whole model, but"
                f" {policy} gives them parts of it; leave one of them out"
            )
        asking = [type(part).__name__ for part in components if part.asks_models]
        if asking and self.submodels.withholds:
            raise ConfigError(
                f"method {self.name}: its {asking[0]} asks the clients' models on the server, but {policy} keeps a part"
                " of them with the clients; leave one of them out"
            )

    def _check_aggregation(self) -> None:
        """Refuse what a rule other than the mean, and what models that are no shares of a mean, do not go with."""
        if self.moves_from is not None and not self.server_update.combines:
            raise ConfigError(
                f"method {self.name}: the weights of its {type(self.weighting).__name__} are steps and no shares, but"
                f" its {type(self.server_update).__name__} takes a mean of the models; leave one of them out"
            )
        if self.weighting.needs_mean and not self.server_update.combines:
            raise ConfigError(
                f"method {self.name}: its {type(self.weighting).__name__} learns from the mean of the models, but its"
                f" {type(self.server_update).__name__} makes something else of them; leave one of them out"
            )
        if self.weighting.needs_mean and not self.server_update.follows_mean:
            raise ConfigError(
                f"method {self.name}: its {type(self.weighting).__name__} learns by how the mean of the models moves"
                f" the server's, which {type(self.server_update).__name__} moves otherwise; leave one of them out"
            )
        if self.aggregation.plain_mean:
            return
        parts = [f"{type(self.submodels).__name__}, which gives clients parts of the model"] * self.submodels.cuts
        if self.moves_from is not None:
            parts.append(f"{type(self.weighting).__name__}, whose weights are steps and no shares")
        if self.weighting.needs_mean:
            parts.append(f"{type(self.weighting).__name__}, which learns from their mean")
        if not self.server_update.combines:
            parts.append(f"{type(self.server_update).__name__}, which makes something of the models itself")
        if parts:
            raise ConfigError(
                f"method {self.name}: its {type(self.aggregation).__name__} makes one model of whole ones that are"
                f" shares of a mean, which does not go with {parts[0]}; leave one of them out"
            )

    def _check_hubs(self) -> None:
        """Refuse what only the server could do, where models meet at other hubs."""
        if not self.pacing.has_hubs:
            return
        parts = [f"the term {term.name}, which sends something to the server" for term in self.terms if term.sends]
        others = [item for item in self.having["probes"] if not item[1].probes_stay] + [*self.having["publish"]]
        parts += [f"{type(part).__name__}, which asks clients something" for _, part in others]
        parts += [f"the term {t.name}, which notes moves that the server adds up" for t in self.terms if t.adds_up]
        parts += ["a weighting by what is known of clients"] if self.weighting.knows_clients else []
        parts += ["a weighting of steps from the server's model"] if self.moves_from is not None else []
        parts += ["the codec, whose moves are from the server's model"] if self.codec.encodes else []
        parts += ["work that clients keep over several rounds"] if self.pacing.carries_work() else []
        is_possible = self.server_update.combines if self.pacing.has_server else self.server_update.plain_mean
        parts += [] if is_possible else [f"{type(self.server_update).__name__}, which the server alone does"]
        if not self.pacing.has_server:
            parts += [
                f"{type(part).__name__}, which the server alone does" for part in self.refinements if part.needs_server
            ]
        if parts:
            raise ConfigError(
                f"method {self.name}: its models meet at other hubs than the server ({type(self.pacing).__name__}),"
                f" which does not go with {parts[0]}; leave one of them out"
            )

    def _check_several(self) -> None:
        """Refuse what counts from the model that was received, where clients start from one of several."""
        if not self.server_update.has_several:
            return
        parts = [f"the term {term.name}" for term in self.terms if term.needs_anchor]
        by_moves = self.moves_from is not None or self.weighting.needs_one_rate or self.weighting.needs_mean
        parts += [type(self.weighting).__name__] * by_moves
        parts += [type(part).__name__ for part in self.refinements if part.needs_updates or part.needs_server]
        parts += [f"the codec {type(self.codec).__name__}"] * self.codec.encodes
        parts += [type(self.submodels).__name__] * self.submodels.has_own("after_aggregate")
        if parts:
            raise ConfigError(
                f"method {self.name}: its clients start from one of several models"
                f" ({type(self.server_update).__name__}), but {parts[0]} knows the server's alone; leave one of them"
                " out"
            )

    # What follows from the method alone is found once; a round looks it up.

    @cached_property
    def server_components(self) -> tuple[tuple[str, ServerComponent], ...]:
        """The server-side components with the keys under which their states are kept, in a fixed order."""
        seams = ("selection", "submodels", "pacing", "weighting", "server_update")
        refinements = ((f"refinement{number}", part) for number, part in enumerate(self.refinements))
        return (*((seam, getattr(self, seam)) for seam in seams), *refinements, ("evaluation", self.evaluation))

    @cached_property
    def having(self) -> Mapping[str, tuple[tuple[str, ServerComponent], ...]]:
        """Of the server-side components those with an optional hook of their own, by hook: nobody else is asked."""
        hooks = ("publish", "probes", "learn", "observe", "report")
        return {hook: tuple(item for item in self.server_components if item[1].has_own(hook)) for hook in hooks}

    @cached_property
    def averages_alone(self) -> bool:
        """Tell whether the mean of the clients' models is all that anybody on the server makes of them."""
        return (
            self.server_update.plain_mean
            and self.aggregation.plain_mean
            and self.moves_from is None
            and not any(component.needs_updates for _, component in self.server_components)
        )

    @cached_property
    def folds(self) -> bool:
        """Tell whether workers may go through a round's sync points among themselves, as far as the method has a say.

        Then nobody on the server could tell the difference: their mean is all that is made of the models, no component
        reads or learns from them before the round ends, and no term has anything to add to them.
        """
        inner = [component for _, component in self.server_components if component not in self.refinements]
        return (
            self.server_update.plain_mean
            and self.aggregation.plain_mean
            and self.moves_from is None
            and not any(component.needs_updates for component in inner)
            and not self.having["learn"]
            and all(refinement.when == "round_end" for refinement in self.refinements)
            and not any(term.sends for term in self.terms)
        )

    @cached_property
    def exchanges(self) -> tuple[str, ...]:
        """List what may send more than models in a round, in words; a component with the hook may yet send nothing."""
        terms = [f"its term {term.name} sends" for term in self.terms if term.sends]
        senders = [item for item in self.server_components if item in self.having["probes"] + self.having["publish"]]
        return (*terms, *(f"its {type(component).__name__} exchanges" for _, component in senders))

    @cached_property
    def remembers(self) -> bool:
        """Tell whether clients keep something of the method's between their rounds."""
        return any(term.stateful for term in self.terms)

    @cached_property
    def moves_from(self) -> Literal["server", "anchor"] | None:
        """Origin of the weighting's steps; None: its weights are shares of a mean."""
        if self.weighting.from_anchor:
            return "anchor"
        return None if self.weighting.sums_to_one else "server"

    def passes(self, batch_size: int, num_classes: int) -> Passes:
        """Return the cost of clients' work: steps of ``batch_size`` samples, and the terms' work outside of steps."""
        extra = [term.passes(batch_size, num_classes) for term in self.terms]
        step = self.objective.passes + sum(passes.step for passes in extra)
        return Passes(step=step, job=sum(passes.job for passes in extra))

    @cached_property
    def needs_share(self) -> bool:
        """Tell whether clients are told the federation's mean number of samples."""
        return self.objective.needs_share or any(term.needs_share for term in self.terms)

    @property
    def needs_effective_steps(self) -> bool:
        """Tell whether moves are divided by how many plain steps they are worth, which Adam's are not."""
        return self.weighting.needs_effective_steps or any(term.needs_effective_steps for term in self.terms)

    @property
    def needs_one_rate(self) -> bool:
        """Tell whether moves are divided by the learning rate, so that all parameters must have the same."""
        return self.weighting.needs_one_rate or self.needs_effective_steps

    def probes(self, components: Mapping[str, State], round: int) -> tuple[Probe, ...]:
        """Return the measurements of a round, from 1, by name, with the components' states.

        Raises:
            InvariantError: Two different ones have one name.
        """
        probes: dict[str, Probe] = {}
        for seam, component in self.having["probes"]:
            for probe in ask(component, "probes", components[seam], round, when=f"in round {round}"):
                if probes.setdefault(probe.name, probe) != probe:
                    raise InvariantError(f"two different probes of a round are called {probe.name!r}")
        return tuple(probes[name] for name in sorted(probes))

    @cached_property
    def registration(self) -> tuple[str, ...]:
        """Names of what clients send once before round 1 beside their number of samples."""
        return tuple(sorted({name for _, c in self.server_components for name in c.registration()}))


SEAMS = (
    "objective",
    "solver",
    "selection",
    "pacing",
    "submodels",
    "weighting",
    "aggregation",
    "server_update",
    "evaluation",
    "codec",
)


def merge(*methods: FederatedMethod) -> FederatedMethod:
    """Return one method that has every non-default component of several; terms and refinements are joined in order.

    Args:
        methods: At least one.

    Raises:
        ConfigError: Two of them have different components on one seam, ask for different settings, or have parts that
            don't go together.
    """
    merged = methods[0]
    for other in methods[1:]:
        merged = _merge_two(merged, other)
    return merged


def _merge_two(first: FederatedMethod, second: FederatedMethod) -> FederatedMethod:
    plain = FederatedMethod(name="fedavg", source="")
    chosen: dict[str, object] = {}
    for seam in SEAMS:
        a, b, default = getattr(first, seam), getattr(second, seam), getattr(plain, seam)
        if a != b and default not in (a, b):
            raise ConfigError(
                f"{first.name} and {second.name} can't be merged: both have their own {seam.replace('_', ' ')}"
                f" ({type(a).__name__} and {type(b).__name__}); leave one of them out"
            )
        chosen[seam] = b if a == default else a
    return FederatedMethod(
        name=f"{first.name}+{second.name}",
        source="; ".join(s for s in (first.source, second.source) if s),
        terms=first.terms + second.terms,
        refinements=first.refinements + second.refinements,
        settings=_merge_settings(first, second),
        **chosen,  # type: ignore[arg-type]
    )


def _merge_settings(first: FederatedMethod, second: FederatedMethod) -> MethodSettings:
    values: dict[str, object] = {}
    for entry in dataclasses.fields(MethodSettings):
        a, b = getattr(first.settings, entry.name), getattr(second.settings, entry.name)
        if a is not None and b is not None and a != b:
            raise ConfigError(
                f"{first.name} and {second.name} can't be merged: they ask for {entry.name}={a} and {entry.name}={b}"
            )
        values[entry.name] = b if a is None else a
    return MethodSettings(**values)  # type: ignore[arg-type]
