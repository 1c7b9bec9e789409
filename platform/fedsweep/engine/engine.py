"""Run an experiment round by round: each round maps one :class:`RunState` to the next.

The engine calls a method through its components alone (selection, pacing, weighting, ...), never by its name. A round
is a pure function of the state: when a worker or the process is lost, it is begun anew from there, to the same bits.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

from torch import Tensor

from fedsweep.client.compute_device import start_device
from fedsweep.client.lanes.grouping import one_by_one_note
from fedsweep.client.lanes.proof import PROVED_STEPS
from fedsweep.client.messages import Handle, Question, Stepping
from fedsweep.components.probes import Probe, passes_taken, sent_of
from fedsweep.engine.aggregation import Aggregator
from fedsweep.engine.ahead.spending import BudgetSpender
from fedsweep.engine.clock import probed_samples, setup_s
from fedsweep.engine.cost import CostModel, registration_bytes
from fedsweep.engine.evaluator import RoundTester
from fedsweep.engine.hubs.round import HubRound
from fedsweep.engine.ledger import Ledger, whole_values
from fedsweep.engine.per_client import untested
from fedsweep.engine.plan import Planner, RoundPlan
from fedsweep.engine.round import Round
from fedsweep.engine.round_tools import RoundTools
from fedsweep.engine.row import RowMaker
from fedsweep.engine.state import Decision, HubModel, RunState
from fedsweep.errors import RunError, WorkerLost
from fedsweep.experiment.experiment import Experiment, server_context
from fedsweep.fleet.fleet import Fleet
from fedsweep.guard import ask, guarded
from fedsweep.records import Payload, RoundRecord, State, best_of
from fedsweep.submodel import FULL_MODEL

# A round is begun at most this often; an actor that dies every time has a cause that repairing will not cure.
_MAX_ATTEMPTS = 5
_Done = TypeVar("_Done")


class Engine:
    """Runs an experiment on a fleet.

    Args:
        experiment: The experiment.
        fleet: Where the clients are.
        on_partial: Called with a state that holds a refinement's unfinished work, to be checkpointed.
        on_repair: Called with a sentence when lost workers are replaced, or have something to say.
        on_working: Called with lines on how far a component's long work is.

    Attributes:
        tools: What every round of the run needs; ``round_class`` is given it.
        round_class: Plays a round; one is made for each.
        notes: Sentences that workers reported, once each.
        costs: Sizes of messages and FLOPs of work.
        layout: The full model's layout in its vector.
        planner: Plans rounds, where no budget planner chooses their settings.
        tester: Tests the model after a round.
        spending: Chooses each round's settings within a budget; None without ``planner`` in the configuration.
    """

    def __init__(
        self,
        experiment: Experiment,
        fleet: Fleet,
        *,
        on_partial: Callable[[RunState], None] = lambda state: None,
        on_repair: Callable[[str], None] = lambda message: None,
        on_working: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.experiment, self.fleet = experiment, fleet
        self._on_repair = on_repair
        self.notes: list[str] = []
        start_device(experiment.server_device, tf32=experiment.tf32)
        self.costs = CostModel(experiment)
        self.layout = self.costs.layout
        self.planner = Planner(experiment, self.costs)
        self.tools = RoundTools(
            experiment=experiment,
            fleet=fleet,
            aggregator=Aggregator(experiment.method, experiment.seed),
            costs=self.costs,
            # Another than the one that is tested: components may change its mode, and its values.
            model=experiment.new_model(),
            keep=on_partial,
            message=on_repair,
            note=self._note,
            working=on_working,
        )
        self.round_class = HubRound if experiment.method.pacing.has_hubs else Round
        self._proves = experiment.lanes is not None and experiment.lanes.proves
        self._rows = RowMaker(experiment, self.costs)
        self.spending = BudgetSpender(experiment) if experiment.options else None
        self.tester = RoundTester(experiment)

    def _note(self, texts: Sequence[str]) -> None:
        """Tell what workers have to say, each thing once in a run."""
        for text in texts:
            if text not in self.notes:
                self.notes.append(text)
                self._on_repair(text)

    # -- the start -----------------------------------------------------------------------------------------------

    @guarded(when="before round 1")
    def start(self) -> RunState:
        """Return the run's state before round 1: initial model, components' states, and what the set-up cost."""
        vector = self.experiment.initial_vector.clone()
        components: dict[str, State] = {}
        ledger, probed, server_flops = Ledger(dtype=self.layout.dtype), Counter[int](), list[float]()
        for seam, component in self.experiment.method.server_components:
            context = server_context(self.experiment, seam)
            context = replace(context, count_flops=server_flops.append, forward_flops=self.costs.forward_flops)
            state = self.experiment.initial_states[seam]
            probes = ask(component, "setup", state, context, when="before round 1")
            if probes:
                answers = self._measured(probes, vector, ledger, probed)
                state = ask(component, "setup_done", state, answers, context, when="before round 1")
            components[seam] = state
        self._show_start(vector, components)
        pacing = self.experiment.method.pacing
        first = pacing.first_models(server_context(self.experiment, "pacing")) if pacing.has_hubs else ()
        return RunState(
            vector=vector,
            components=components,
            models={hub: HubModel(vector=vector) for hub in first},
            clock=None if self.experiment.world.profiles[0].device is None else 0.0,
            total_bytes=self.registration_bytes + ledger.total_bytes,
            setup_bytes=ledger.total_bytes,
            setup_s=setup_s(self.experiment, ledger, probed, self.costs),
            setup_traffic=ledger.traffic({}),
            setup_flops=sum(self.costs.flops(FULL_MODEL, 0, probed=number) for number in probed.values()),
            setup_server_flops=sum(server_flops),
        )

    def _show_start(self, vector: Tensor, components: dict[str, State]) -> None:
        """Let components that ask for it see how good the initial model is."""
        asking = {seam: c for seam, c in self.experiment.method.server_components if c.observes_start}
        if asking:
            start = RoundRecord(round=0, timestamp_ms=int(time.time() * 1000), lr=self.experiment.training.schedule(1))
            record = self.tester.tested(start, vector, components["evaluation"], ())
            for seam, component in asking.items():
                components[seam] = ask(component, "observe", components[seam], record, when="before round 1")

    def _measured(
        self, probes: tuple[Probe, ...], vector: Tensor, ledger: Ledger, probed: Counter[int]
    ) -> Mapping[int, Payload]:
        """Ask clients; what they send and compute, forward passes of one sample, is added up."""
        clients = tuple(k for k in range(len(self.experiment.world.profiles)) if any(probe.asks(k) for probe in probes))
        answers = self._answers(Question(clients=clients, probes=probes), vector, {})
        taken = {client: passes_taken(answer, probes) for client, answer in answers.items()}
        answers = {client: sent_of(answer, probes) for client, answer in answers.items()}
        probed.update(probed_samples(self.experiment, probes, taken))
        sent = whole_values({"params": self.layout.num_params, "buffers": self.layout.num_buffers})
        for client, tensors in answers.items():
            # One model, however many of the client's probes look at it.
            if any(probe.reads_model and probe.asks(client) for probe in probes):
                ledger.message(client, "down", sent)
            ledger.payload(client, "up", tensors)
        return answers

    def _answers(self, question: Question, vector: Tensor, memories: Mapping[int, Handle]) -> Mapping[int, Payload]:
        """Ask clients, who are given the server's model [V], until none of their workers is lost."""
        return self._repaired(question.round, lambda _: self.fleet.measure(question, vector, memories))

    @property
    def registration_bytes(self) -> int:
        """Bytes of the clients' registration, of all of them and both ways."""
        return registration_bytes(self.experiment)

    # -- a round -------------------------------------------------------------------------------------------------

    def finished_by(self, state: RunState) -> str | None:
        """Give the reason why the run ends here: ``"rounds"``, a limit's name; None where it goes on."""
        stop = self.experiment.training.stop
        if state.records and (reached := stop.reached_by(state.records[-1])):
            return reached
        if stop.wall_time_s is not None and state.records and state.wall_time_s >= stop.wall_time_s:
            return "wall_time_s"
        if state.round >= self.experiment.training.rounds:
            return "rounds"
        return None

    def advance(self, state: RunState) -> tuple[RunState, str | None]:
        """Play one round.

        Returns:
            The state after it, and None; or the state before it and the name of the limit that the round would pass.

        Raises:
            ClientJobError: A client's work failed.
        """
        with guarded(when=f"in round {state.round + 1}"):
            began, stop = time.perf_counter(), self.experiment.training.stop
            # Plan: who takes part, how much each does, when they synchronise, what models cost and the clock says.
            tools, rows, decision = self.tools, self._rows, None
            if self.spending is None:
                plan = self.planner.plan(state)
            elif isinstance(chosen := self.spending.next(state), str):
                return state, chosen
            else:
                plan, decision = chosen.plan, chosen.decision
                tools, rows = self._option_tools[chosen.number]
            limit = stop.passed_by(state.total_bytes + plan.num_bytes, plan.clock)
            if limit is not None:
                return state, limit
            if self._proves and state.stepping is None and any(point.start for point in plan.points):
                state = self._proved(plan, state)
            # Send, train, aggregate. Where a worker is lost the whole round, not its clients alone: the others' models
            # have moved on meanwhile.
            round = self._repaired(
                state.round + 1, lambda attempt: self.round_class(plan, state, tools, attempt).play()
            )
            # Payloads are known only now; a round that passes a limit with them never was.
            limit = stop.passed_by(state.total_bytes + round.ledger.total_bytes, plan.clock)
            if limit is not None:
                return state, limit
            # Record: test the model, make the row, tell the components.
            wall_time_s, is_due, components = time.perf_counter() - began, self._due(state.round + 1), round.components
            round.components = dict(components)  # a copy: in a last round components observe the tested row alone
            after = self._recorded(round, rows, wall_time_s, decision, tests=is_due)
            if not is_due and self._ends(after):
                round.components = components
                after = self._recorded(round, rows, wall_time_s, decision, tests=True)
            return after, None

    @cached_property
    def _option_tools(self) -> tuple[tuple[RoundTools, RowMaker], ...]:
        """The parts that rounds are played with and recorded by, for each way that a budget may be spent."""
        assert self.spending is not None
        tools = []
        for option, costs in ((each.option.experiment, each.costs) for each in self.spending.options):
            codecs = replace(option.communication, up=option.up_codec)
            tools.append((replace(self.tools, experiment=option, costs=costs, codecs=codecs), RowMaker(option, costs)))
        return tuple(tools)

    def _proved(self, plan: RoundPlan, state: RunState) -> RunState:
        """Return the run's state with the way in which clients are stepped, tried on a first tile of the round."""
        assert self.experiment.lanes is not None
        opening = self.round_class(plan, state, self.tools).opening(self.experiment.lanes.width, steps=PROVED_STEPS)
        memories = {task.client: state.memories[task.client] for task in opening.tasks if task.client in state.memories}
        try:
            stepping = self.fleet.prove(opening, state.vector, memories)
        except WorkerLost as lost:
            # Nothing of a round was played: whoever died, died of what was tried.
            self.fleet.repair()
            stepping = Stepping(kind="loop", notes=(one_by_one_note(f"the process that tried them was lost ({lost})"),))
        self._note(stepping.notes)
        return replace(state, stepping=stepping)

    def _repaired(self, round: int, work: Callable[[int], _Done]) -> _Done:
        """Have workers do something, from its start each time one of them was lost and is replaced; 0: the set-up."""
        when, last = f"round {round}" if round else "before round 1", ""
        for attempt in range(_MAX_ATTEMPTS):
            try:
                return work(attempt)
            except WorkerLost as lost:
                last = str(lost)
                self._on_repair(f"{when}: {last}; replacing it and going on")
                self.fleet.repair()
        raise RunError(
            f"{when}: begun {_MAX_ATTEMPTS} times and lost a client actor each time, at last: {last}; what clients run"
            " may end its process, by os._exit, a crash in a library or want of memory, and Ray's log may say more"
        )

    def _ends(self, state: RunState) -> bool:
        """Tell whether the run ends with the round that it is after, as far as the next one's plan can tell."""
        stop = self.experiment.training.stop
        if self.finished_by(state) is not None:
            return True
        if stop.total_bytes is None and stop.sim_time_s is None:
            return False
        chosen = None if self.spending is None else self.spending.next(state)
        if isinstance(chosen, str):
            return True
        plan, traffic = (chosen.plan, chosen.traffic) if chosen else (self.planner.plan(state), self.tools.card_traffic)
        # At the most: a test too many near the end is better than a run that ends without one.
        sent = state.total_bytes + plan.num_bytes + traffic.most_in_round(plan, state.taken_part)
        return stop.passed_by(sent, plan.clock) is not None

    def _recorded(
        self, round: Round, rows: RowMaker, wall_time_s: float, decision: Decision | None, *, tests: bool
    ) -> RunState:
        record = rows.row(round, wall_time_s=wall_time_s)
        if tests:
            record = self.tester.tested(record, round.vector, round.components["evaluation"], round.updates)
        if tests and self.tester.asks_clients:
            record = self.tester.clients_tested(record, round.state_after(record), self._answers)
        best = [past.best_accuracy for past in round.state.records[-1:]]
        record = replace(record, best_accuracy=best_of(*best, record.test_accuracy))
        for seam, component in self.experiment.method.having["observe"]:
            when = f"in round {record.round}"
            round.components[seam] = ask(component, "observe", round.components[seam], record, when=when)
        after = round.state_after(record)
        if decision is not None:
            after = replace(after, decisions=(*round.state.decisions, decision))
        return replace(after, notes=tuple(self.notes)) if self.notes else after

    def as_planned(self, state: RunState) -> RunState:
        """Return a state that a shorter run of the same experiment ended with, as this run has it after that round.

        The shorter run tested its last model, whatever ``evaluate_every`` says.
        """
        if not state.records or self._due(state.round) or self._ends(state):
            return state
        *before, last = state.records
        best = before[-1].best_accuracy if before else None
        columns = [column for metric in self.experiment.metrics for column in metric.columns]
        columns += self.experiment.world.data.learned.measures
        return replace(state, records=(*before, replace(untested(last, columns), best_accuracy=best)))

    def _due(self, round: int) -> bool:
        return round % self.experiment.evaluate_every == 0 or round == self.experiment.training.rounds
