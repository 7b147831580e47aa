"""What does watching cost a run? The time of its hooks as a part of training's.

    python benchmarks/watch_cost.py [--steps 100] [--with-data] [--out benchmarks/records/watch_cost.json]

The model is the character GPT of ``optim_training.py`` (2 layers of width 128, batches of 16 x 64 characters, random
text). Each optimizer trains twice from the same seed, without and with a watch that writes to a folder; the clock runs
around whole steps and around the hooks, in the same run, so that a busy machine disturbs their ratio little. At the end
the parameters of both runs are compared to the bit.

With data: cosines within the default budget of a tenth, with AdamW, of that model (100 and 250 steps, on 2 sequences),
of a heavier one (30 steps, 4 layers of width 256, 128 places, on 2 sequences) and of a tiny network (1000 steps, three
layers of width 32, on 32 samples). "most" is the largest fraction at any record after the first look's half second.

``--cpu`` counts processor time in one thread instead of the clock on the wall, in the watch's own decisions too: what a
machine without other work would show.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import kronscope as ks
from benchmarks.optim_training import CharGPT
from kronscope.watching.measuring import FIRST_LOOK

KINDS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), 1e-3),
    "Shampoo": lambda model: ks.Shampoo(ks.param_groups(model), 1e-3),
    "SOAP": lambda model: ks.SOAP(ks.param_groups(model), 1e-3),
    "KLShampoo": lambda model: ks.KLShampoo(ks.param_groups(model), 1e-3),
}
LETTERS, CONTEXT = 65, 64


@dataclass(frozen=True)
class WithData:
    """A run with cosines: its model, batches and what is measured on."""

    steps: int
    every: int
    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    sample: Callable[[], tuple[Tensor, Tensor]]
    forward: Callable[[nn.Module, Tensor], Tensor] | None = None


def text(count: int, seed: int, places: int = CONTEXT) -> tuple[Tensor, Tensor]:
    """Sequences with a pattern, and their next characters."""
    generator = torch.Generator().manual_seed(seed)
    start, stride = (torch.randint(1, LETTERS, (count, 1), generator=generator) for _ in range(2))
    tokens = (start + stride * torch.arange(places + 1)) % LETTERS
    return tokens[:, :-1], tokens[:, 1:]


def by_sequence(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits (sequence, character, place), as the cross-entropy of sequences wants them."""
    logits: Tensor = model(tokens)
    return logits.unflatten(0, tokens.shape).transpose(1, 2)


class Heavier(nn.Module):
    """Four layers of width 256."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(LETTERS, 256), nn.Linear(256, LETTERS, bias=False)
        layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (sequences, places) to logits of every place, as :class:`CharGPT` does."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits: Tensor = self.head(self.blocks(self.tokens(tokens), mask, is_causal=True))
        return logits.flatten(0, 1)


def flat(tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return tokens, targets.flatten()


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 20, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs[:, :4].argmax(1)


def tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def characters(steps: int) -> WithData:
    return WithData(
        steps,
        10,
        lambda: CharGPT(LETTERS),
        lambda step: flat(*text(16, step)),
        lambda: text(2, 10**6),
        by_sequence,
    )


WITH_DATA = {
    "character GPT, 100 steps": characters(100),
    "character GPT, 250 steps": characters(250),
    "heavier, 30 steps": WithData(
        30, 1, Heavier, lambda step: flat(*text(16, step, 128)), lambda: text(2, 10**6, 128), by_sequence
    ),
    "tiny, 1000 steps": WithData(1000, 10, tiny, lambda step: points(64, step), lambda: points(32, 10**6)),
}


def trained(
    make: Callable[[], nn.Module],
    kind: str,
    steps: int,
    batch: Callable[[int], tuple[Tensor, Tensor]],
    watching: Callable[[Optimizer, nn.Module], Any] | None,
) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = make()
    optimizer = KINDS[kind](model)
    watch = watching(optimizer, model) if watching else None
    for step in range(steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model, watch


def cost(kind: str, run: WithData, *, with_data: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {}
        if with_data:
            options = {"loss": nn.CrossEntropyLoss(), "data": [run.sample()], "forward": run.forward}

        def watching(optimizer: Optimizer, model: nn.Module) -> Any:
            return ks.watch(optimizer, model, every=run.every, path=Path(folder) / "run", **options)

        started = time.perf_counter()
        model, watch = trained(run.model, kind, run.steps, run.batch, watching)
        whole = time.perf_counter() - started
        watch.detach()
    plain, _ = trained(run.model, kind, run.steps, run.batch, None)
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    spent = watch._clock.watching
    found = {
        "step, milliseconds": round(1e3 * (whole - spent) / run.steps, 2),
        "watching, per cent": round(100 * spent / (whole - spent), 3),
        "training, seconds": round(whole - spent, 2),
        "parameters equal to the bit": same,
    }
    if with_data:
        parts = [record["run"] for record in watch.records]
        measured = [(row.step, row.layer) for row in watch.results]
        over = [one for one in parts if one["measuring_seconds"] > FIRST_LOOK]
        found |= {
            "measuring, seconds": round(parts[-1]["measuring_seconds"], 3),
            "measuring, per cent": round(100 * parts[-1]["measuring_seconds"] / parts[-1]["training_seconds"], 2),
            "most, per cent": round(
                max((100 * one["measuring_seconds"] / one["training_seconds"] for one in over), default=0.0), 2
            ),
            "layers": len(watch._records.layers),
            "measurements of a layer": len(set(measured)),
            "layers measured": len({layer for _, layer in measured}),
            "first cosines at step": min((step for step, _ in measured), default=None),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--with-data", nargs="*", choices=list(WITH_DATA), help="runs with cosines; without names all")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--cpu", action="store_true", help="count processor time")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.cpu:
        time.perf_counter = time.process_time
    table: dict[str, Any] = {}
    for kind in args.kinds:
        run = WithData(args.steps, args.every, lambda: CharGPT(LETTERS), characters(1).batch, characters(1).sample)
        table[kind] = cost(kind, run, with_data=False)
        print(kind, table[kind], flush=True)
    data: dict[str, Any] = {}
    for name in () if args.with_data is None else args.with_data or WITH_DATA:
        data[name] = cost("AdamW", WITH_DATA[name], with_data=True)
        print(name, data[name], flush=True)
    if args.out:
        record = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "processor": platform.processor() or platform.machine(),
            "clock": "processor time" if args.cpu else "wall",
            "steps": args.steps,
            "every": args.every,
            "cost": table,
            "with data": data,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
