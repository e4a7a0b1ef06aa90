"""PyTorch's DDP tutorial with hpcstrat: the same losses on any number of replicas.

    mpirun -n 4 python examples/ported/torch_ddp_series/after.py

The strategy splits the loader's batches, two lines of hs.torch do what `DistributedDataParallel`
did, and rank 0 writes the snapshots. The sampler only shuffles: it is that of one process. Sums are
divided by the number of elements of all replicas, so the last batch, of 59, counts right; DDP
repeats elements until all processes have equally many.
"""

import argparse
import os

import torch  # pyright: ignore[reportMissingImports]

import hpcstrat as hs

strategy = hs.MirroredStrategy()


class Trainer:
    """Trains a model; goes on from the snapshot if there is one."""

    def __init__(self, model, train_data, optimizer, save_every, snapshot_path):
        self.model = model.to(hs.torch.device(strategy))
        self.train_data = train_data
        self.batches = strategy.experimental_distribute_dataset(train_data)
        self.optimizer = optimizer
        self.save_every = save_every
        self.snapshot_path = snapshot_path
        self.epochs_run = 0
        self.losses = []
        if hs.on_lead(os.path.exists, snapshot_path):
            self._load_snapshot()
        hs.torch.broadcast(self.model)

    def _load_snapshot(self):
        snapshot = torch.load(self.snapshot_path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(snapshot["model"])
        self.epochs_run = snapshot["epochs_run"]
        print(f"resumes from the snapshot after {self.epochs_run} epochs")

    def _save_snapshot(self, epochs_run):
        snapshot = {"model": self.model.state_dict(), "epochs_run": epochs_run}
        hs.on_lead(torch.save, snapshot, self.snapshot_path)
        print(f"snapshot saved after {epochs_run} epochs")

    def _run_batch(self, batch):
        source, targets = hs.torch.as_tensors(batch)
        size = hs.get_replica_context().all_reduce("SUM", len(source))
        self.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.model(source), targets, reduction="sum")
        (loss / size).backward()
        hs.torch.all_reduce_gradients("SUM", self.model)
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        total = 0
        for batch in self.batches:
            losses = strategy.run(self._run_batch, args=(batch,))
            total += strategy.reduce("SUM", losses, axis=None)
        self.losses.append(total / len(self.train_data.dataset))
        print(f"epoch {epoch}: {len(self.train_data)} steps, loss {self.losses[-1]:.6f}")

    def train(self, max_epochs):
        """Trains until `max_epochs` epochs have been run since the first start."""
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            if (epoch + 1) % self.save_every == 0:
                self._save_snapshot(epoch + 1)


def load_train_objs():
    torch.manual_seed(0)
    inputs = torch.rand(2043, 20)
    targets = (3 * inputs.mean(dim=1, keepdim=True)).sin() + 0.1 * torch.randn(len(inputs), 1)
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    return torch.utils.data.TensorDataset(inputs, targets), model, optimizer


def prepare_dataloader(dataset, batch_size):
    sampler = torch.utils.data.DistributedSampler(dataset, 1, 0)
    return torch.utils.data.DataLoader(dataset, batch_size, sampler=sampler)


def start(options):
    dataset, model, optimizer = load_train_objs()
    train_data = prepare_dataloader(dataset, options.batch_size)
    return Trainer(model, train_data, optimizer, options.save_every, options.snapshot)


def main():
    parser = argparse.ArgumentParser(description="Trains on all replicas, with snapshots.")
    parser.add_argument("--total-epochs", type=int, default=8)
    parser.add_argument("--save-every", type=int, default=2, help="epochs between snapshots")
    parser.add_argument("--batch-size", type=int, default=64, help="of all processes")
    parser.add_argument("--snapshot", default="snapshot.pt", help="its file")
    options = parser.parse_args()
    first = start(options)
    first.train(options.total_epochs // 2)
    second = start(options)
    second.train(options.total_epochs)
    hs.on_lead(os.remove, options.snapshot)
    return first.losses + second.losses


if __name__ == "__main__":
    main()
