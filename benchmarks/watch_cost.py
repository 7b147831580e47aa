"""What does watching cost a run? The time of its hooks as a part of training's.

    python benchmarks/watch_cost.py [--steps 100] [--data-steps 150] [--out benchmarks/records/watch_cost.json]

The model is the character GPT of ``optim_training.py`` (2 layers of width 128, batches of 16 x 64 characters, random
text). Each optimizer trains twice from the same seed, without and with a watch that writes to a folder; the clock runs
around whole steps and around the hooks, in the same run, so that a busy machine disturbs their ratio little. At the end
the parameters of both runs are compared to the bit. With data: a record every 10 steps, cosines on 2 sequences, within
the default budget of a tenth of the training time after the first two seconds.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import kronscope as ks
from benchmarks.optim_training import CharGPT

KINDS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), 1e-3),
    "Shampoo": lambda model: ks.Shampoo(ks.param_groups(model), 1e-3),
    "SOAP": lambda model: ks.SOAP(ks.param_groups(model), 1e-3),
    "KLShampoo": lambda model: ks.KLShampoo(ks.param_groups(model), 1e-3),
}
LETTERS, CONTEXT = 65, 64
DATA_EVERY = 10


def text(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sequences with a pattern, and their next characters."""
    generator = torch.Generator().manual_seed(seed)
    start, stride = (torch.randint(1, LETTERS, (count, 1), generator=generator) for _ in range(2))
    tokens = (start + stride * torch.arange(CONTEXT + 1)) % LETTERS
    return tokens[:, :-1], tokens[:, 1:]


def by_sequence(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits (sequence, character, place), as the cross-entropy of sequences wants them."""
    logits: Tensor = model(tokens)
    return logits.unflatten(0, tokens.shape).transpose(1, 2)


def trained(kind: str, steps: int, watching: Callable[[Optimizer, nn.Module], Any] | None) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = CharGPT(LETTERS)
    optimizer = KINDS[kind](model)
    watch = watching(optimizer, model) if watching else None
    for step in range(steps):
        tokens, targets = text(16, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), targets.flatten()).backward()
        optimizer.step()
    return model, watch


def cost(kind: str, steps: int, every: int, *, with_data: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = (
            {"loss": nn.CrossEntropyLoss(), "data": [text(2, 10**6)], "forward": by_sequence} if with_data else {}
        )

        def watching(optimizer: Optimizer, model: nn.Module) -> Any:
            return ks.watch(optimizer, model, every=every, path=Path(folder) / "run", **options)

        started = time.perf_counter()
        model, watch = trained(kind, steps, watching)
        whole = time.perf_counter() - started
        watch.detach()
    plain, _ = trained(kind, steps, None)
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    spent = watch._spent
    measuring = watch._measuring
    return {
        "step, milliseconds": round(1e3 * (whole - spent) / steps, 2),
        "watching, per cent": round(100 * spent / (whole - spent), 3),
        "training, seconds": round(whole - spent, 1),
        "measuring, seconds": round(measuring.seconds, 2) if measuring else None,
        "layers measured": len({(row.step, row.layer) for row in watch.results}),
        "parameters equal to the bit": same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--data-steps", type=int, default=0, help="steps of the runs with data; 0 leaves them out")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table: dict[str, Any] = {}
    for kind in args.kinds:
        table[kind] = {"without data": cost(kind, args.steps, args.every, with_data=False)}
        print(kind, table[kind], flush=True)
        if args.data_steps:
            table[kind]["with data"] = cost(kind, args.data_steps, DATA_EVERY, with_data=True)
            print(kind, table[kind]["with data"], flush=True)
    if args.out:
        record = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "processor": platform.processor() or platform.machine(),
            "steps": args.steps,
            "steps with data": args.data_steps,
            "every": args.every,
            "cost": table,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
