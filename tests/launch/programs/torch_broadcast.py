"""A broadcast of a module, in a call of which a rank is interrupted, and goes on."""

import contextlib
import sys

import torch  # pyright: ignore[reportMissingImports]

import hpcstrat as hs

name, interrupted = sys.argv[1:]
module = torch.nn.Sequential(*[torch.nn.Linear(2, 1) for _ in range(3)])
taken = getattr(torch.Tensor, name)
calls = []


def interrupt(tensor, *values):
    calls.append(taken(tensor, *values))
    if len(calls) == 4:
        raise KeyboardInterrupt
    return calls[-1]


if hs.rank() == int(interrupted):
    setattr(torch.Tensor, name, interrupt)
with contextlib.suppress(KeyboardInterrupt):
    hs.torch.broadcast(module)
hs.torch.broadcast(module)
print("unreachable")
