"""Trains a PyTorch module with PyTorch's own optimizer, as `DistributedDataParallel` does.

    mpirun -n 4 python examples/torch_ddp.py

The losses are the same. Each replica has its own module and optimizer, which stay equal because
they take the same steps.
"""

import argparse
import pathlib

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

import hpcstrat as hs


def make_module():
    """The network with its initial parameters."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def load_data():
    """Images of shape (1792, 64) and their digits, as a PyTorch dataset."""
    images, digits = np.load(pathlib.Path(__file__).with_name("digits.npz")).values()
    return torch.utils.data.TensorDataset(
        torch.tensor(images[:1792] / 16).float(), torch.tensor(digits[:1792])
    )


def main():
    parser = argparse.ArgumentParser(description="A PyTorch module and optimizer on each replica.")
    parser.add_argument(
        "--epochs", type=int, default=3, help="passes over the images (%(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=64, help="images per step, of all replicas (%(default)s)"
    )
    options = parser.parse_args()

    strategy = hs.CentralStorageStrategy()
    loader = torch.utils.data.DataLoader(load_data(), options.batch_size)
    batches = strategy.experimental_distribute_dataset(loader)
    module = make_module().to(hs.torch.device(strategy))
    hs.torch.broadcast(module)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)

    def step(batch):
        images, digits = hs.torch.as_tensors(batch)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(images), digits)
        loss.backward()
        hs.torch.all_reduce_gradients("MEAN", module)
        optimizer.step()
        return loss

    for epoch in range(1, options.epochs + 1):
        losses = [strategy.run(step, args=(batch,)) for batch in batches]
        print(
            f"epoch {epoch}: loss "
            f"{sum(strategy.reduce('MEAN', losses, axis=None)) / len(losses):.7f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
