"""How long do estimates take on models with very many columns, beside the operations they need?

    python benchmarks/estimate_speed.py [--only gpt convnext adagrad gpt2] [--threads 2] [--record FILE]

gpt       a four-layer GPT (width 256, 5,000 words) on 32 sequences of 64 tokens: all 16 block matrices.
convnext  one 1536 x 384 layer of ConvNeXt-T with 200 classes, 128 images of 64 pixels.
adagrad   Adagrad's matrix of 1,000 gradients of a 512 x 512 layer, the optimum certified.
gpt2      GPT-2 small (12 layers, width 768, 50,257 words) on 32 sequences of 128 tokens: all 48 block matrices, to a
          standard error of 0.02.

Weights are random. For each: seconds, peak memory of the process, the largest standard error, and the time over that of
the counted floating-point operations (forward and backward passes and products; decompositions are not counted) at the
rate of large float32 products, measured before and after. The language models are those of transformers.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import kronscope as ks
from kronscope.paper.models import convnext_tiny

RECORD = Path(__file__).parent / "records" / "estimate_speed.json"


def language_model(layers: int, width: int, words: int, samples: int, tokens: int, accuracy: float) -> ks.Results:
    """All matrices in the blocks of a GPT-2 with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=words,
        n_positions=tokens,
        n_embd=width,
        n_layer=layers,
        n_head=max(1, width // 64),
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config).eval()
    text = torch.randint(words, (samples, tokens))
    data = [(part, part.roll(-1, 1)) for part in text.split(8)]
    names = [name for name, weight in model.named_parameters() if weight.dim() == 2 and ".h." in name]

    def logits(module: nn.Module, inputs: Tensor) -> Tensor:
        found: Tensor = module(input_ids=inputs).logits.transpose(1, 2)
        return found

    return ks.measure(model, nn.CrossEntropyLoss(), data, layers=names, forward=logits, accuracy=accuracy)


def convnext() -> ks.Results:
    """One wide layer of a ConvNeXt-T with random weights."""
    torch.manual_seed(0)
    model = convnext_tiny(classes=200, channels=3, image_size=64)
    names = [name for name, weight in model.named_parameters() if tuple(weight.shape[:2]) == (1536, 384)]
    data = list(zip(torch.randn(128, 3, 64, 64).split(16), torch.randint(200, (128,)).split(16), strict=True))
    return ks.measure(model, nn.CrossEntropyLoss(), data, layers=names[:1])


def adagrad() -> ks.Results:
    """A layer trained for 1,000 steps."""
    torch.manual_seed(0)
    model, teacher = nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    history = ks.GradientHistory.attach(optimizer, model)
    spread = torch.logspace(0, -2, 512)
    for _ in range(1000):
        inputs = torch.randn(32, 512) * spread
        optimizer.zero_grad()
        (model(inputs) - teacher(inputs).detach()).square().mean().backward()
        optimizer.step()
    return ks.measure_history(history)


WORKLOADS: dict[str, tuple[float, Callable[[], ks.Results]]] = {
    "gpt": (60, lambda: language_model(4, 256, 5000, 32, 64, 0.01)),
    "convnext": (90, convnext),
    "adagrad": (90, adagrad),
    "gpt2": (1800, lambda: language_model(12, 768, 50257, 32, 128, 0.02)),
}


def rate() -> float:
    """Floating-point operations a second of large float32 products."""
    one, two = torch.randn(2, 2048, 2048)
    best = math.inf
    for _ in range(4):
        started = time.perf_counter()
        _ = one @ two
        best = min(best, time.perf_counter() - started)
    return 2 * 2048**3 / best


def one(name: str, threads: int) -> dict[str, Any]:
    """Run a workload in this process."""
    torch.set_num_threads(threads)
    goal, work = WORKLOADS[name]
    before = rate()
    started = time.perf_counter()
    with FlopCounterMode(display=False) as counter:
        results = work()
    seconds = time.perf_counter() - started
    speed = (before + rate()) / 2
    operations = counter.get_total_flops()
    errors = [row.stderr for row in results if not math.isnan(row.stderr)]
    return {
        "workload": name,
        "seconds": seconds,
        "goal": goal,
        "layers": len(results.layers),
        "largest stderr": max(errors, default=0.0),
        "answers": sum(not math.isnan(row.cosine) for row in results),
        "rows": len(results.rows),
        "notes": sorted({row.note for row in results}),
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "operations": operations,
        "operations a second": speed,
        "time over counted": seconds * speed / operations,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--one", choices=WORKLOADS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one, args.threads)))
        return
    known = json.loads(args.record.read_text(encoding="utf-8"))["workloads"] if args.record.exists() else {}
    for name in args.only:  # each in a process of its own, for its peak of memory
        command = [sys.executable, __file__, "--one", name, "--threads", str(args.threads)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        known[name] = json.loads(done.stdout.splitlines()[-1])
        print(json.dumps(known[name], indent=1), flush=True)
        content = {
            "command": "python benchmarks/estimate_speed.py",
            "threads": args.threads,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "workloads": known,
        }
        args.record.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
