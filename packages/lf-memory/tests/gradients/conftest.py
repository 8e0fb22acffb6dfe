"""Models of the gradient tests, which are left out where torch is not installed."""

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.set_num_threads(1)  # small models: a second thread only waits

    class Block(nn.Module):
        """A pre-norm transformer block."""

        def __init__(self, width, heads):
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            batch, length, width = x.shape
            qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
            attended = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    class GPT(nn.Module):
        """A decoder that returns its loss; with `head_loss`, that function makes it of hidden states and head."""

        def __init__(self, layers=2, width=64, heads=4, vocab=512, context=64, tied=False, head_loss=None):
            super().__init__()
            self.embed, self.position = nn.Embedding(vocab, width), nn.Embedding(context, width)
            self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
            self.head_loss = head_loss
            self.run_block = lambda block, x: block(x)
            if tied:
                self.head.weight = self.embed.weight

        def forward(self, ids):
            x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
            for block in self.blocks:
                x = self.run_block(block, x)
            x = self.norm(x)
            if self.head_loss is not None:
                return self.head_loss(x.flatten(0, 1), self.head.weight, ids.flatten())
            return F.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())

    @pytest.fixture(scope="session")
    def gpt_class():
        """The class GPT, with weights as the seed then stands."""
        return GPT

    @pytest.fixture
    def gpt():
        """The class GPT."""
        torch.manual_seed(0)
        return GPT

    @pytest.fixture
    def ids():
        """Token ids of two sequences."""
        return torch.randint(0, 512, (2, 32), generator=torch.Generator().manual_seed(0))
