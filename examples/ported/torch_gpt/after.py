"""The small GPT with hpcstrat: the same steps and the same text on any number of replicas.

    mpirun -n 4 python examples/ported/torch_gpt/after.py

The model, its optimizer and the schedule are untouched. The strategy splits the batches, the loss
is divided by the size of the whole batch, and the gradients are summed before they are clipped.
"""

import math
import pathlib

import torch  # pyright: ignore[reportMissingImports]

import hpcstrat as hs

LAYERS, HEADS, WIDTH, BLOCK = 2, 4, 32, 32  # characters in a block
STEPS, WARM_UP, BATCH = 200, 20, 26  # blocks in a batch
RATE, SMALLEST_RATE = 1e-2, 1e-3


class CausalSelfAttention(torch.nn.Module):
    """Each character attends to itself and to those before it."""

    def __init__(self):
        super().__init__()
        self.project_in = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.project_out = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):  # noqa: D102
        blocks, n, _ = x.shape
        heads = self.project_in(x).view(blocks, n, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
        is_later = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        # Kept for the picture.
        self.weights = scores.masked_fill(is_later, -math.inf).softmax(dim=-1)
        return self.project_out((self.weights @ value).transpose(1, 2).reshape(x.shape))


class Layer(torch.nn.Module):
    """Attention and a perceptron, each added to its normalised input."""

    def __init__(self):
        super().__init__()
        self.attention = CausalSelfAttention()
        self.perceptron = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)

    def forward(self, x):  # noqa: D102
        x = x + self.attention(self.norm1(x))
        return x + self.perceptron(self.norm2(x))


class GPT(torch.nn.Module):
    """The scores of the next character, of shape (blocks, n, characters)."""

    def __init__(self, characters):
        super().__init__()
        self.embedding = torch.nn.Embedding(characters, WIDTH)
        self.position = torch.nn.Embedding(BLOCK, WIDTH)
        self.layers = torch.nn.Sequential(*[Layer() for _ in range(LAYERS)])
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.scores = torch.nn.Linear(WIDTH, characters, bias=False)
        self.embedding.weight = self.scores.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                is_residual = name.endswith(("project_out.weight", "perceptron.2.weight"))
                scale = 0.02 / math.sqrt(2 * LAYERS) if is_residual else 0.02
                torch.nn.init.normal_(parameter, std=scale)
            elif name.endswith("bias"):
                torch.nn.init.zeros_(parameter)

    def forward(self, x):  # noqa: D102
        x = self.embedding(x) + self.position.weight[: x.shape[1]]
        return self.scores(self.norm(self.layers(x)))


def batches(text):
    """Blocks at random places, and the same shifted by a character: shape (BATCH, BLOCK)."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        starts = torch.randint(len(text) - BLOCK, (BATCH, 1), generator=generator)
        yield text[starts + torch.arange(BLOCK)], text[starts + torch.arange(1, BLOCK + 1)]


def learning_rate(step):
    if step < WARM_UP:
        return RATE * (step + 1) / WARM_UP
    progress = (step - WARM_UP) / (STEPS - WARM_UP)
    return SMALLEST_RATE + (RATE - SMALLEST_RATE) * (1 + math.cos(math.pi * progress)) / 2


@torch.no_grad()
def write(model, x, n):
    """Continues `x`, of shape (1, m), by n characters that are drawn with their probabilities."""
    generator = torch.Generator(x.device).manual_seed(0)
    for _ in range(n):
        p = (model(x[:, -BLOCK:])[:, -1] / 0.8).softmax(dim=-1)
        x = torch.cat([x, torch.multinomial(p, 1, generator=generator)], dim=1)
    return x


def main():
    strategy = hs.MirroredStrategy()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    text = pathlib.Path(__file__).with_name("sonnets.txt").read_text()
    characters = sorted(set(text))
    device = hs.torch.device(strategy)
    model = GPT(len(characters)).to(device)
    hs.torch.broadcast(model)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, RATE, betas=(0.9, 0.99))

    def train(x, y):
        x, y = hs.torch.as_tensors((x, y))
        optimizer.zero_grad()
        scores = model(x).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(scores, y.flatten(), reduction="sum")
        loss = loss / (BATCH * BLOCK)
        loss.backward()
        hs.torch.all_reduce_gradients("SUM", model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    history = []
    text = torch.tensor([characters.index(character) for character in text])
    parts = strategy.experimental_distribute_dataset(lambda: batches(text))
    for step, batch in enumerate(parts):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss = strategy.run(train, args=batch)
        if step % 20 == 0 or step == STEPS - 1:
            history.append((step, float(strategy.reduce("SUM", loss, axis=None))))
            print("step {}: loss {:.6f}".format(*history[-1]), flush=True)
    x = write(model, torch.tensor([[characters.index("\n")]], device=device), 200)
    written = "".join(characters[i] for i in x[0])
    print(written)
    return history, written[-BLOCK:], model.layers[0].attention.weights[0]


if __name__ == "__main__":
    main()
