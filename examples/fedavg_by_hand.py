"""FedAvg by hand: three rounds in plain PyTorch that end with the very bits of ``fedsweep.run``."""

import hashlib
import tempfile

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fedsweep
from fedsweep.components import weighted_mean

CONFIG = {
    "name": "by-hand",
    "scenario": {"dataset": "digits", "clients": 20, "partition": {"kind": "dirichlet", "dirichlet_alpha": 0.3}},
    "model": {"name": "mlp"},
    "training": {"rounds": 3, "cohort_size": 5, "local_epochs": 1, "batch_size": 16, "optimizer": {"lr": 0.05}},
    "tracking": {"uri": "none"},
}
torch.set_num_threads(1)  # the engine's steps have one: the number of threads shows in the bits of a sum

# Load and partition: images and labels, and for each client the indices of its samples.
experiment = fedsweep.prepare(CONFIG)
seed, rate, batch_size = experiment.seed, experiment.training.learning_rate, experiment.training.batch_size
world, model = experiment.world, experiment.new_model()
images = world.data.transform(torch.from_numpy(world.data.images), generator=None, train=True).float()
labels = torch.from_numpy(world.data.labels).long()
test_images = world.data.transform(torch.from_numpy(world.test_images), generator=None, train=False).float()
test_labels = torch.from_numpy(world.test_labels).long()

server = parameters_to_vector(model.parameters()).detach()
for number in range(1, experiment.training.rounds + 1):
    draw = fedsweep.stream(seed, "selection", number).numpy()
    cohort = sorted(draw.choice(np.arange(len(world.indices)), size=experiment.training.cohort_size, replace=False))
    locals_, samples = [], []
    for client in cohort:
        # Local steps: each client starts from the server's model and goes once through its own data.
        vector_to_parameters(server.clone(), model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        order = fedsweep.stream(seed, "batches", number, client).numpy().permutation(world.indices[client])
        for batch in np.split(order, range(batch_size, len(order), batch_size)):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        locals_.append(parameters_to_vector(model.parameters()).detach())
        samples.append(len(order))
    # Average by numbers of samples; `weighted_mean` adds in one order, whatever the machine.
    weighted_mean(locals_, (torch.tensor(samples, dtype=torch.float64) / sum(samples)).tolist(), server)
    vector_to_parameters(server.clone(), model.parameters())
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean()
    print(f"round {number}: accuracy {accuracy:.4f}")

with tempfile.TemporaryDirectory() as folder:
    engine = parameters_to_vector(fedsweep.run(CONFIG, out=f"{folder}/run").model.parameters()).detach()
hashes = [hashlib.sha256(vector.numpy().tobytes()).hexdigest() for vector in (server, engine)]
print(f"by hand {hashes[0][:12]}, by the engine {hashes[1][:12]}")
assert hashes[0] == hashes[1]
