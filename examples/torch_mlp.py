"""Trains a PyTorch module on a strategy's variables; autograd computes the gradients.

    mpirun -n 4 python examples/torch_mlp.py

The tensors use the variables' memory without a copy, so all replicas of a host share the
parameters.
"""

import argparse
import pathlib

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

import hpcstrat as hs


def make_module(seed):
    """The network with its initial parameters."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def load_data():
    """Images of shape (1797, 64), float32, and their digits."""
    images, digits = np.load(pathlib.Path(__file__).with_name("digits.npz")).values()
    return (images / 16).astype(np.float32), digits


def main():
    parser = argparse.ArgumentParser(description="A PyTorch module over a strategy's variables.")
    parser.add_argument(
        "--epochs", type=int, default=3, help="passes over the images (%(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=64, help="images per step, of all replicas (%(default)s)"
    )
    options = parser.parse_args()

    strategy = hs.CentralStorageStrategy()
    module = make_module(seed=0)
    with strategy.scope():
        variables = {
            name: hs.Variable(value, name=name) for name, value in module.named_parameters()
        }
        optimizer = hs.optimizers.SGD(0.1, momentum=0.9)
        loss = hs.metrics.Mean()
    module.to("meta")  # its own parameters are not used

    def step(images, digits):
        values, images, digits = hs.torch.as_tensors((variables, images, digits))
        scores = torch.func.functional_call(module, values, (images,))
        losses = torch.nn.functional.cross_entropy(scores, digits, reduction="none")
        (losses.sum() / options.batch_size).backward()
        optimizer.apply_gradients(
            (values[name].grad, variable) for name, variable in variables.items()
        )
        loss.update_state(losses)

    images, digits = load_data()
    dataset = hs.data.Dataset.from_tensor_slices((images, digits)).batch(
        options.batch_size, drop_remainder=True
    )
    batches = strategy.experimental_distribute_dataset(dataset)
    for epoch in range(1, options.epochs + 1):
        loss.reset_state()
        for batch in batches:
            strategy.run(step, args=batch)
        print(f"epoch {epoch}: loss {loss.result():.7f}", flush=True)


if __name__ == "__main__":
    main()
