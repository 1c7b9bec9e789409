"""A set-up in Flower's own interface; a module of its own, since its actors import it.

Clients run in Ray actors of Flower's simulation, one CPU each; the aggregation is its FedAvg. Nothing is evaluated.
"""

from __future__ import annotations

import functools
import os

import torch
import torch.nn.functional as F
import work
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

FOLDER = os.environ["FEDSWEEP_PEER_FOLDER"]
client, server = ClientApp(), ServerApp()


@functools.cache
def given() -> tuple:
    """Set-up, data and network, once in each actor."""
    work.one_thread()
    asked, images, labels = work.read(FOLDER)
    return asked, images, labels, work.network(asked.network)


@client.train()
def train(message: Message, context: Context) -> Message:
    """One client's steps."""
    asked, images, labels, model = given()
    own = int(context.node_config["partition-id"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=asked.learning_rate)
    inputs, targets = work.samples(images, labels, own, asked.steps * asked.batch_size)
    for position in range(asked.steps):
        part = slice(position * asked.batch_size, (position + 1) * asked.batch_size)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[part]), targets[part]).backward()
        optimizer.step()
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(labels[own])}),
    }
    return Message(content=RecordDict(content), reply_to=message)


class InTurns(FedAvg):
    """FedAvg that waits for each round's turn."""

    turns: work.Turns

    def configure_train(self, server_round, arrays, config, grid):  # type: ignore[no-untyped-def]
        self.turns.begins()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):  # type: ignore[no-untyped-def]
        replies = list(replies)
        if failed := [reply for reply in replies if reply.has_error()]:
            print(failed[0].error, flush=True)
            os._exit(1)  # Flower itself would go on without them
        found = super().aggregate_train(server_round, replies)
        self.turns.ends()
        return found


@server.main()
def main(grid: Grid, context: Context) -> None:
    """All rounds."""
    asked, images, _, model = given()
    strategy = InTurns(
        fraction_train=asked.cohort / len(images),
        fraction_evaluate=0.0,
        min_train_nodes=asked.cohort,
        min_available_nodes=len(images),
    )
    strategy.turns = work.Turns(FOLDER)
    strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=asked.rounds)
