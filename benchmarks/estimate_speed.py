"""How long do estimates take on models with very many columns, beside the operations they need?

    python benchmarks/estimate_speed.py [--only gpt convnext adagrad gpt2 curvlinops] [--threads 2] [--record FILE]

gpt       a four-layer GPT (width 256, 5,000 words) on 32 sequences of 64 tokens: all 16 block matrices.
convnext  one 1536 x 384 layer of ConvNeXt-T with 200 classes, 128 images of 64 pixels.
adagrad   Adagrad's matrix of 1,000 gradients of a 512 x 512 layer, the optimum certified.
gpt2      GPT-2 small (12 layers, width 768, 50,257 words) on 32 sequences of 128 tokens: all 48 block matrices, to a
          standard error of 0.02.
curvlinops  one layer of the four-layer GPT: 30 Gauss-Newton products by curvlinops and the error of a cosine made of
          these probes, beside our own estimate of the same cosine and its error.

Weights are random. For each: seconds, CPU seconds, peak memory of the process, the largest standard error, the load of
the machine at the end, and the time over that of the counted floating-point operations (forward and backward passes and
products; decompositions are not counted) at the rate of large products of their type, measured before and after. The
language models are those of transformers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import kronscope as ks
from kronscope.paper.models import convnext_tiny

# Layers, width, words, sequences and tokens.
GPT = (4, 256, 5000, 32, 64)
RECORD = Path(__file__).parent / "records" / "estimate_speed.json"


class Words(nn.Module):
    """A GPT-2 with random weights that gives its logits (samples, words, tokens)."""

    def __init__(self, layers: int, width: int, words: int, tokens: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

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
        self.model = GPT2LMHeadModel(config)

    def forward(self, inputs: Tensor) -> Tensor:
        """The logits of tokens."""
        found: Tensor = self.model(input_ids=inputs).logits.transpose(1, 2)
        return found


def language_model(
    layers: int, width: int, words: int, samples: int, tokens: int
) -> tuple[Words, list[tuple[Tensor, Tensor]]]:
    """A model and sequences."""
    torch.manual_seed(0)
    model = Words(layers, width, words, tokens).eval()
    text = torch.randint(words, (samples, tokens))
    return model, [(part, part.roll(-1, 1)) for part in text.split(8)]


def block_matrices(sizes: tuple[int, int, int, int, int], accuracy: float, budget: int | None = None) -> ks.Results:
    """All matrices in the blocks of a language model."""
    model, data = language_model(*sizes)
    names = [name for name, weight in model.named_parameters() if weight.dim() == 2 and ".h." in name]
    return ks.measure(model, nn.CrossEntropyLoss(), data, layers=names, accuracy=accuracy, memory_budget=budget)


def beside_curvlinops(threads: int) -> dict[str, Any]:
    """Probes of one layer against our estimate of the same cosine."""
    from curvlinops import GGNLinearOperator

    torch.set_num_threads(threads)
    model, data = language_model(*GPT)
    model.model.set_attn_implementation("eager")  # the fused one has no forward derivative
    name = next(name for name, _ in model.named_parameters() if ".h.1.mlp.c_fc.weight" in name)
    weight = dict(model.named_parameters())[name]
    loss = nn.CrossEntropyLoss()
    started, used = time.perf_counter(), time.process_time()
    # fitted on the real labels, so that both compare H with exactly the same product
    (row,) = ks.measure(model, loss, data, layers=[name], approximations=["shampoo2"], labels="real", progress=False)
    ours = {"seconds": time.perf_counter() - started, "CPU seconds": time.process_time() - used}
    moment = ks.second_moment(model, loss, data, layer=name, truth="empirical_fisher", progress=False)
    fitted = ks.approx.get("shampoo2").fit(moment.stream)
    theirs = GGNLinearOperator(model, loss, [weight], data, check_deterministic=False)

    class Products:
        shape = moment.shape
        seconds = 0.0
        used = 0.0

        def left(self) -> Tensor:
            return torch.zeros(1)

        def matvec(self, vectors: Tensor) -> Tensor:
            started, used = time.perf_counter(), time.process_time()
            turned = vectors if vectors.shape[1:] == weight.shape else vectors.mT
            found = torch.stack([theirs @ each.float().flatten() for each in turned]).detach().double()
            self.seconds, self.used = time.perf_counter() - started, time.process_time() - used
            found = found.view(-1, *weight.shape)
            return found if vectors.shape[1:] == weight.shape else found.mT

    products = Products()
    probed = ks.measures.probes.Probes(count=30).cosine(products, fitted)  # type: ignore[arg-type]
    return {
        "workload": "curvlinops",
        "layer": name,
        "ours": {**ours, "cosine": row.cosine, "stderr": row.stderr, "note": row.note},
        "30 products": {
            "seconds": products.seconds,
            "CPU seconds": products.used,
            "cosine": probed.value,
            "stderr": probed.stderr,
        },
        "load": os.getloadavg()[0],
    }


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
    "gpt": (60, lambda: block_matrices(GPT, 0.01)),
    "convnext": (90, convnext),
    "adagrad": (90, adagrad),
    "gpt2": (1800, lambda: block_matrices((12, 768, 50257, 32, 128), 0.02, 4 << 30)),
}


class Operations(TorchDispatchMode):
    """Counts floating-point operations, by the type of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a call, and make it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        counted = flop_registry.get(func.overloadpacket)
        if counted is not None:
            first = next(part for part in (out if isinstance(out, (tuple, list)) else [out]) if part is not None)
            self.counts[first.dtype] += counted(*args, **kwargs, out_val=out)
        return out


def rate(dtype: torch.dtype) -> float:
    """Floating-point operations a second of large products."""
    one, two = torch.randn(2, 2048, 2048, dtype=dtype)
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
    before = {dtype: rate(dtype) for dtype in (torch.float32, torch.float64)}
    started, used = time.perf_counter(), time.process_time()
    with Operations() as operations:
        results = work()
    seconds, used = time.perf_counter() - started, time.process_time() - used
    speeds = {dtype: (known + rate(dtype)) / 2 for dtype, known in before.items()}
    counted = sum(count / speeds[dtype] for dtype, count in operations.counts.items())
    errors = [row.stderr for row in results if not math.isnan(row.stderr)]
    return {
        "workload": name,
        "seconds": seconds,
        "CPU seconds": used,
        "load": os.getloadavg()[0],
        "goal": goal,
        "layers": len(results.layers),
        "largest stderr": max(errors, default=0.0),
        "answers": sum(not math.isnan(row.cosine) for row in results),
        "rows": len(results.rows),
        "notes": sorted({row.note for row in results}),
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "operations": {str(dtype): count for dtype, count in operations.counts.items()},
        "operations a second": {str(dtype): speed for dtype, speed in speeds.items()},
        "time over counted": seconds / counted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*WORKLOADS, "curvlinops"], default=list(WORKLOADS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--one", choices=[*WORKLOADS, "curvlinops"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        done = beside_curvlinops(args.threads) if args.one == "curvlinops" else one(args.one, args.threads)
        print(json.dumps(done))
        return
    known = json.loads(args.record.read_text(encoding="utf-8"))["workloads"] if args.record.exists() else {}
    for name in args.only:  # each in a process of its own, for its peak of memory
        command = [sys.executable, __file__, "--one", name, "--threads", str(args.threads)]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        known[name] = json.loads(ended.stdout.splitlines()[-1])
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
