"""Trains a module; the first argument says what rank 1 does otherwise than the others."""

import sys

import torch  # pyright: ignore[reportMissingImports]

import hpcstrat as hs

module = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(module.parameters(), 0.1)
hs.torch.broadcast(module)
steps = 3 + hs.rank() * (sys.argv[1] == "more steps")


def train():
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.ones(3, 2)).sum().backward()
        hs.torch.all_reduce_gradients("MEAN", module)
        optimizer.step()
        if hs.rank() == 1 and sys.argv[1] == "adds":
            module.weight.data += 1


hs.CentralStorageStrategy().run(train)
hs.barrier()
