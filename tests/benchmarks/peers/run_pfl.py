"""A set-up in pfl-research's own interface: ``torchrun ... run_pfl.py FOLDER``, in its environment.

Its simulated backend splits each cohort over the processes that torchrun started; the aggregation is its federated
averaging with a weight for each user. Nothing is evaluated.
"""

from __future__ import annotations

import os
import sys

os.environ["PFL_PYTORCH_DEVICE"] = "cpu"

import numpy as np
import torch
import torch.nn.functional as F
import work
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import nn


class Network(nn.Module):
    """With the two functions that pfl asks of a module."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.net = work.network(name)

    def forward(self, inputs):  # type: ignore[no-untyped-def]
        return self.net(inputs)

    def loss(self, inputs, targets, is_eval=False):  # type: ignore[no-untyped-def]
        self.eval() if is_eval else self.train()
        return F.cross_entropy(self(inputs), targets)

    def metrics(self, inputs, targets, is_eval=True):  # type: ignore[no-untyped-def]
        return {}


class InTurns(TrainingProcessCallback):
    """Waits for each round's turn; in all processes, of which the first one answers."""

    def __init__(self, turns: work.Turns, rounds: int) -> None:
        self.turns, self.rounds = turns, rounds

    def on_train_begin(self, *, model):  # type: ignore[no-untyped-def]
        self.turns.begins()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # type: ignore[no-untyped-def]
        self.turns.ends()
        if central_iteration + 1 < self.rounds:
            self.turns.begins()
        return False, Metrics()


def main(folder: str) -> None:
    """All rounds."""
    work.one_thread()
    asked, images, labels = work.read(folder)

    def client(user: int) -> Dataset:
        drawn = work.samples(images, labels, user, asked.steps * asked.batch_size)
        return Dataset(raw_data=[*drawn], user_id=str(user))

    np.random.seed(0)
    torch.manual_seed(0)
    clients = FederatedDataset(client, get_user_sampler("random", list(range(len(labels)))))
    network = Network(asked.network)
    model = PyTorchModel(
        model=network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), 1.0),
    )
    turns = work.Turns(folder, speaks=int(os.environ.get("RANK", "0")) == 0)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=asked.rounds,
            evaluation_frequency=asked.rounds + 1,
            train_cohort_size=asked.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=clients, val_data=clients, postprocessors=[WeightByUser()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1,  # of what the client's data set holds: as many samples as it has steps for
            local_learning_rate=asked.learning_rate,
            local_batch_size=asked.batch_size,
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=asked.batch_size),
        callbacks=[InTurns(turns, asked.rounds)],
    )


if __name__ == "__main__":
    main(sys.argv[1])
