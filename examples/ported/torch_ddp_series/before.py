"""PyTorch's DDP tutorial series (pytorch/examples, multigpu_torchrun.py, BSD-3-Clause licence).

    python examples/ported/torch_ddp_series/before.py
    torchrun --standalone --nproc-per-node 2 examples/ported/torch_ddp_series/before.py

A `Trainer` with snapshots. `main` stops half-way and starts anew from the last snapshot, as after
a failure. The loss is the squared error: the cross-entropy of the tutorial's one output is 0.
"""

import argparse
import os

import torch  # pyright: ignore[reportMissingImports]

# A group of one process, as torchrun --nproc-per-node 1 makes it.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
ALONE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}


def ddp_setup():
    if "RANK" not in os.environ:  # not started by torchrun
        os.environ.update(ALONE)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


class Trainer:
    """Trains a model; goes on from the snapshot if there is one."""

    def __init__(self, model, train_data, optimizer, save_every, snapshot_path):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = model.to(self.device)
        self.train_data = train_data
        self.optimizer = optimizer
        self.save_every = save_every
        self.snapshot_path = snapshot_path
        self.epochs_run = 0
        self.losses = []
        if os.path.exists(snapshot_path):
            self._load_snapshot()
        self.model = torch.nn.parallel.DistributedDataParallel(self.model)

    def _load_snapshot(self):
        snapshot = torch.load(self.snapshot_path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(snapshot["model"])
        self.epochs_run = snapshot["epochs_run"]
        if torch.distributed.get_rank() == 0:
            print(f"resumes from the snapshot after {self.epochs_run} epochs")

    def _save_snapshot(self, epochs_run):
        snapshot = {"model": self.model.module.state_dict(), "epochs_run": epochs_run}
        torch.save(snapshot, self.snapshot_path)
        print(f"snapshot saved after {epochs_run} epochs")

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach() * len(source)

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        total = torch.zeros((), device=self.device)
        for source, targets in self.train_data:
            total += self._run_batch(source.to(self.device), targets.to(self.device))
        torch.distributed.all_reduce(total)
        self.losses.append(total.item() / len(self.train_data.dataset))
        if torch.distributed.get_rank() == 0:
            print(f"epoch {epoch}: {len(self.train_data)} steps, loss {self.losses[-1]:.6f}")

    def train(self, max_epochs):
        """Trains until `max_epochs` epochs have been run since the first start."""
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            if torch.distributed.get_rank() == 0 and (epoch + 1) % self.save_every == 0:
                self._save_snapshot(epoch + 1)


def load_train_objs():
    torch.manual_seed(0)
    inputs = torch.rand(2043, 20)
    targets = (3 * inputs.mean(dim=1, keepdim=True)).sin() + 0.1 * torch.randn(len(inputs), 1)
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    return torch.utils.data.TensorDataset(inputs, targets), model, optimizer


def prepare_dataloader(dataset, batch_size):
    sampler = torch.utils.data.DistributedSampler(dataset)
    batch_size //= torch.distributed.get_world_size()
    return torch.utils.data.DataLoader(dataset, batch_size, sampler=sampler)


def start(options):
    dataset, model, optimizer = load_train_objs()
    train_data = prepare_dataloader(dataset, options.batch_size)
    return Trainer(model, train_data, optimizer, options.save_every, options.snapshot)


def main():
    parser = argparse.ArgumentParser(description="Trains with DDP and snapshots.")
    parser.add_argument("--total-epochs", type=int, default=8)
    parser.add_argument("--save-every", type=int, default=2, help="epochs between snapshots")
    parser.add_argument("--batch-size", type=int, default=64, help="of all processes")
    parser.add_argument("--snapshot", default="snapshot.pt", help="its file")
    options = parser.parse_args()
    ddp_setup()
    first = start(options)
    first.train(options.total_epochs // 2)
    torch.distributed.barrier()
    second = start(options)
    second.train(options.total_epochs)
    if torch.distributed.get_rank() == 0:
        os.remove(options.snapshot)
    torch.distributed.destroy_process_group()
    return first.losses + second.losses


if __name__ == "__main__":
    main()
