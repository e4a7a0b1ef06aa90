"""A DataLoader with worker processes, whose order is seeded, or not."""

import sys
import warnings

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

import hpcstrat as hs

warnings.filterwarnings("ignore", ".*use of fork.*")  # of Python 3.12 and later
warnings.filterwarnings("ignore", "iterating over .* have no")  # the last batch has two numbers


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, i):
        return np.float32(i), torch.utils.data.get_worker_info().id


strategy = hs.CentralStorageStrategy()
options = {
    "generator": torch.Generator().manual_seed(0) if sys.argv[1] == "seeded" else None,
    "persistent_workers": sys.argv[2] == "persistent",
}
loader = torch.utils.data.DataLoader(Numbers(), 8, shuffle=True, num_workers=2, **options)
in_order = list(range(50))
for _epoch in range(2):
    dataset = strategy.experimental_distribute_dataset(loader)
    found = [strategy.gather(batch, 0) for batch in dataset]
    numbers, workers = (np.concatenate(parts) for parts in zip(*found, strict=True))
    print(len(found), sorted(numbers) == in_order, list(numbers) == in_order, {*workers.tolist()})
