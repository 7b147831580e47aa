"""Small models, one for every way a weight can be used."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class SequenceLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Any:
        return self.outer(self.inner(x).tanh()).mean(1)


class Attention(nn.Module):
    """Self-attention (or cross-attention from the first tokens), batch or sequence first."""

    def __init__(self, batch_first: bool, cross: bool = False) -> None:
        super().__init__()
        self.batch_first, self.cross = batch_first, cross
        self.embed = nn.Linear(5, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=batch_first)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        if not self.batch_first:
            x = x.transpose(0, 1)
        query = x.narrow(1 if self.batch_first else 0, 0, 2) if self.cross else x
        mixed = self.attention(query, x, x, need_weights=False)[0]
        return self.head(mixed.mean(1 if self.batch_first else 0))


class SequenceFirst(nn.Module):
    """All hidden activations are (positions, samples, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Any:
        hidden = self.inner(x.transpose(0, 1).contiguous()).tanh()
        return self.outer(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2]).sum(0)


class TiedLanguageModel(nn.Module):
    """Embedding and head share a weight; a hidden layer is called twice; positions have a table."""

    def __init__(self, padding_idx: int | None = None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 4, padding_idx=padding_idx)
        self.positions = nn.Embedding(6, 4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Any:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        h = h + self.hidden(self.hidden(h).tanh()).tanh()
        return self.head(h).transpose(1, 2)


class FusedBlock(nn.Module):
    """Pre-norm attention with a fused projection, without nn.MultiheadAttention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 4)
        self.blocks = nn.Sequential(FusedBlock(4), FusedBlock(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.blocks(self.embed(x)).mean(1))


class SeparateProjections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(5, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = kind(3, 4, batch_first=True)  # type: ignore[call-arg, arg-type]
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.cell(x)[0][:, -1])


class Unrolled(nn.Module):
    """A recurrence written by hand: as many uses as time steps."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.step, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        state = x.new_zeros(x.shape[0], 4)
        for time in range(x.shape[1]):
            state = (self.enter(x[:, time]) + self.step(state)).tanh()
        return self.head(state)


class Products(nn.Module):
    """Weights used by plain functions: addmm (as in GPT-2), @, the transpose, mm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bias = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(6))
        self.b, self.c, self.d = (nn.Parameter(torch.randn(*s)) for s in ((4, 6), (6, 4), (6, 4)))

    def forward(self, x: Tensor) -> Any:
        flat = torch.addmm(self.bias, x.reshape(-1, 5), self.a)
        hidden = flat.unflatten(0, x.shape[:2]).tanh()
        return (hidden @ self.b.t() + torch.matmul(hidden, self.c)).sum(1) + torch.mm(hidden[:, 0], self.d)


class Hidden(nn.Module):
    """A weight used in ways that are not watched: einsum, a detached copy, the left factor of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(*s)) for s in ((4, 5), (4, 4), (3, 4)))

    def forward(self, x: Tensor) -> Any:
        hidden = torch.einsum("oi,ni->no", self.a, x).tanh()
        hidden = F.linear(hidden, self.b) + F.linear(hidden, self.b.detach()) + F.linear(hidden, self.b * 2)
        return (self.c @ hidden.t()).t()


class ResidualConvnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.norm(self.stem(x)), inplace=True)
        x = x + F.relu(self.conv(x), inplace=True)
        return self.head(self.drop(x.mean((2, 3))))


class Routed(nn.Module):
    """Each sample goes to one of two experts; an expert sees only its own samples."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        out = x.new_zeros(len(x), 3)
        for mask, expert in ((x[:, 0] > 0, self.left), (x[:, 0] <= 0, self.right)):
            if bool(mask.any()):
                out[mask] = expert(x[mask])
        return out


def images(samples: int, *shape: int) -> Tensor:
    return torch.randn(samples, *shape, dtype=torch.float64)
