"""Models that are traced in the tests: plain torch modules, small but of the real structure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Basic(nn.Module):
    expansion = 1

    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(i, o, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(o)
        self.conv2 = nn.Conv2d(o, o, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(o)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(i, o, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(i, o, 1, bias=False), nn.BatchNorm2d(o)
        self.conv2, self.bn2 = nn.Conv2d(o, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o)
        self.conv3, self.bn3 = nn.Conv2d(o, 4 * o, 1, bias=False), nn.BatchNorm2d(4 * o)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(i, 4 * o, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


def shortcut(i: int, o: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and i == o:
        return None
    return nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))


class ResNet(nn.Module):
    """torchvision's layout and state-dict names (v1.5 for bottlenecks), with ``width`` channels after the stem."""

    def __init__(self, block: type[Basic | Bottleneck], layers: list[int], width: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        i = width
        for n, count in enumerate(layers):
            o, blocks = width << n, []
            for j in range(count):
                blocks.append(block(i, o, 2 if j == 0 and n else 1))
                i = o * block.expansion
            setattr(self, f"layer{n + 1}", nn.Sequential(*blocks))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(i, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        out: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return out


def resnet18(width: int = 64, classes: int = 10) -> ResNet:
    return ResNet(Basic, [2, 2, 2, 2], width, classes)


def resnet50(width: int = 64, classes: int = 10) -> ResNet:
    return ResNet(Bottleneck, [3, 4, 6, 3], width, classes)


class RMSNorm(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(d) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32) if x.dtype != torch.float64 else x
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * normed.to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class LlamaBlock(nn.Module):
    def __init__(self, d: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, d // heads
        self.norm1, self.norm2 = RMSNorm(d), RMSNorm(d)
        self.q, self.o = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.k, self.v = (nn.Linear(d, kv_heads * self.width, bias=False) for _ in range(2))
        self.gate, self.up = nn.Linear(d, ffn, bias=False), nn.Linear(d, ffn, bias=False)
        self.down = nn.Linear(ffn, d, bias=False)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (
            p(x).view(b, t, n, self.width).transpose(1, 2)
            for p, n in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        q, k = (y * cos + rotate_half(y) * sin for y in (q, k))
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, 1) for y in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).reshape(b, t, d))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x), cos, sin)
        h = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out


class Llama(nn.Module):
    """GQA, rope on whole heads, SwiGLU, RMS norms written out; the head is tied to the embedding."""

    def __init__(self, vocab: int = 128, d: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(LlamaBlock(d, 4, 2, 2 * d) for _ in range(layers))
        self.norm, self.head = RMSNorm(d), nn.Linear(d, vocab, bias=False)
        self.head.weight = self.embed.weight
        inverse = 10000.0 ** (-torch.arange(0, d // 4, 2) / (d // 4))
        self.register_buffer("inverse", inverse, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        angle = torch.arange(ids.shape[1]).to(self.inverse.dtype)[:, None] * self.inverse
        angle = torch.cat((angle, angle), -1)
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, angle.cos(), angle.sin())
        out: Tensor = self.head(self.norm(x))
        return out


class GPT2Block(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads, self.ln1, self.ln2 = heads, nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.ln1(x)).split(d, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(y)
        out: Tensor = x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))
        return out


class GPT2(nn.Module):
    def __init__(self, vocab: int = 128, d: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocab, d), nn.Embedding(32, d)
        self.blocks = nn.ModuleList(GPT2Block(d, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


class BertLayer(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.up, self.down, self.dropout = nn.Linear(d, 4 * d), nn.Linear(4 * d, d), nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (p(x).view(b, t, self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / (d // self.heads) ** 0.5 + mask
        y = self.dropout(torch.softmax(scores, -1)) @ v
        x = self.norm1(x + self.dropout(self.o(y.transpose(1, 2).reshape(b, t, d))))
        out: Tensor = self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))
        return out


class Bert(nn.Module):
    """With a classifier on the first token, and an additive mask from 0 and 1."""

    def __init__(self, vocab: int = 128, d: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.place, self.kind = nn.Embedding(vocab, d), nn.Embedding(32, d), nn.Embedding(2, d)
        self.norm, self.dropout = nn.LayerNorm(d), nn.Dropout(0.1)
        self.layers = nn.ModuleList(BertLayer(d, 4) for _ in range(layers))
        self.pool, self.classify = nn.Linear(d, d), nn.Linear(d, 3)

    def forward(self, ids: Tensor, kinds: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1])) + self.kind(kinds)
        x = self.dropout(self.norm(x))
        added = (1.0 - mask[:, None, None, :].to(x.dtype)) * -10000.0
        for layer in self.layers:
            x = layer(x, added)
        out: Tensor = self.classify(torch.tanh(self.pool(x[:, 0])))
        return out


class ConvBlock(nn.Module):
    def __init__(self, i: int, o: int, k: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(i, o, k, stride, k // 2, bias=False), nn.BatchNorm2d(o)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.bn(self.conv(x)))


class YoloNeck(nn.Module):
    """A backbone of three scales, SPPF pooling, a top-down path with upsampling and concats, and two heads."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.stem, self.c3 = ConvBlock(3, c, 3, 2), ConvBlock(c, 2 * c, 3, 2)
        self.c4, self.reduce = ConvBlock(2 * c, 4 * c, 3, 2), ConvBlock(4 * c, 2 * c, 1)
        self.pool, self.spp = nn.MaxPool2d(5, 1, 2), ConvBlock(8 * c, 4 * c, 1)
        self.up, self.merge = nn.Upsample(scale_factor=2, mode="nearest"), ConvBlock(4 * c, 2 * c)
        self.down, self.heads = (
            ConvBlock(2 * c, 4 * c, 3, 2),
            nn.ModuleList([nn.Conv2d(2 * c, 6, 1), nn.Conv2d(8 * c, 6, 1)]),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p3 = self.c3(self.stem(x))
        p4 = self.c4(p3)
        half = self.reduce(p4)
        pools = [half]
        for _ in range(3):
            pools.append(self.pool(pools[-1]))
        p4 = self.spp(torch.cat(pools, 1))
        merged = self.merge(torch.cat((self.up(self.reduce(p4)), p3), 1))
        low = torch.cat((self.down(merged), p4), 1)
        return self.heads[0](merged).sigmoid(), self.heads[1](low).sigmoid()


class ConvLSTM(nn.Module):
    """Convolution, max-pool, a two-layer bidirectional LSTM over the columns, scores per column."""

    def __init__(self, d: int = 12) -> None:
        super().__init__()
        self.conv, self.lstm = (
            nn.Conv2d(1, 4, 3, padding=1),
            nn.LSTM(16, d, 2, bidirectional=True, batch_first=True),
        )
        self.head = nn.Linear(2 * d, 7)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.conv(x)), 2)
        y, _ = self.lstm(y.permute(0, 3, 1, 2).flatten(2))
        return torch.softmax(self.head(y), -1)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(6, 5)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = self.cell(x, (h, c))
        return out


@dataclass(frozen=True)
class Case:
    """A module in eval mode with running statistics of its own, and inputs for it."""

    module: nn.Module
    inputs: tuple[Any, ...]


def settle(module: nn.Module) -> nn.Module:
    """Statistics and affine parameters that are not those of a new module."""
    for m in module.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.normal_(0, 0.2)  # type: ignore[union-attr]
            m.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
            nn.init.uniform_(m.weight, 0.5, 1.5)
            nn.init.normal_(m.bias, 0, 0.2)
    return module.eval()


def language_model() -> Case:
    from lf_meta.models import gr00t_lm

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = gr00t_lm.build("tiny", vocab_size=96, layers=2)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.model.logits(tokens)

    return Case(Logits().eval(), (torch.randint(0, 96, (2, 12)),))


def vla() -> Case:
    """gr00t_n16_vla's act, one Euler step, two cameras of 3 x 64 x 64."""
    from lf_meta.models import gr00t_vla
    from lf_meta.models.gr00t_vla_batch import random_batch

    class Act(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = gr00t_vla.build("tiny", image_size=64)

        def forward(self, batch: dict[str, Tensor], noise: Tensor) -> Tensor:
            return self.model.act(batch, steps=1, noise=noise)

    act = Act().eval()
    c = act.model.config
    batch = random_batch(c, 2, 12, seed=0)
    keys = ("pixel_values", "input_ids", "lengths", "state", "embodiment_id")
    batch = {k: batch[k] for k in keys}
    batch["pixel_values"] = torch.rand(2, c.cameras, 3, 64, 64) * 2 - 1
    return Case(act, (batch, torch.randn(2, c.horizon, c.action_dim)))


def case(name: str) -> Case:
    """One of :data:`NAMES`, always the same."""
    torch.manual_seed(0)
    ids = torch.randint(0, 128, (2, 16))
    if name == "gr00t_n16_lm":
        return language_model()
    if name == "gr00t_n16_vla":
        return vla()
    makers: dict[str, Any] = {
        "resnet18": lambda: (resnet18(8), (torch.randn(2, 3, 32, 32),)),
        "resnet50": lambda: (resnet50(8), (torch.randn(1, 3, 32, 32),)),
        "llama": lambda: (Llama(), (ids,)),
        "gpt2": lambda: (GPT2(), (ids,)),
        "bert": lambda: (Bert(), (ids, ids % 2, (ids > 20).long())),
        "yolo_neck": lambda: (YoloNeck(), (torch.randn(2, 3, 64, 64),)),
        "conv_lstm": lambda: (ConvLSTM(), (torch.randn(2, 1, 8, 20),)),
        "lstm_cell": lambda: (Cell(), (torch.randn(3, 6), torch.randn(3, 5), torch.randn(3, 5))),
    }
    module, inputs = makers[name]()
    return Case(settle(module), inputs)


NAMES = (
    "resnet18", "resnet50", "llama", "gpt2", "bert", "yolo_neck", "conv_lstm", "lstm_cell", "gr00t_n16_lm",
    "gr00t_n16_vla",
)  # fmt: skip
