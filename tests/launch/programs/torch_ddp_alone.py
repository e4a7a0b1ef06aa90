"""What examples/torch_ddp.py does, with PyTorch alone; its arguments are folders."""

import sys

sys.path.insert(0, sys.argv[1])
import torch  # pyright: ignore[reportMissingImports]
from mpi4py import MPI
from torch_ddp import load_data, make_module  # pyright: ignore[reportMissingImports]

comm = MPI.COMM_WORLD
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{sys.argv[2]}", rank=comm.rank, world_size=comm.size
)
data = load_data()
sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
loader = torch.utils.data.DataLoader(data, 64 // comm.size, sampler=sampler)
module = torch.nn.parallel.DistributedDataParallel(make_module())
optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)

for epoch in range(1, 4):
    total = torch.zeros(1)
    for images, digits in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(images), digits)
        loss.backward()  # whose gradients DDP averages over the ranks
        optimizer.step()
        total += loss.detach()
    torch.distributed.all_reduce(total)
    if comm.rank == 0:
        print(f"epoch {epoch}: loss {total.item() / comm.size / len(loader):.7f}")
torch.distributed.destroy_process_group()
