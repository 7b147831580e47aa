"""What the plan saves: adapters, mixtures of experts and a head without a name, as planned and as they would be else.

    python benchmarks/optim_plans.py [--parts adapters head ...] [--out benchmarks/records/optim_plans.json]

adapters   rank-8 adapters of all seven matrices of each layer of a 1.1B-shaped Llama (22 layers, width 2048), as
           planned on the meta device; and steps of one layer's adapters. Before, 64 MiB were allowed for each.
peft       peft's own adapters (rank 8, all linear layers) of a Llama with one layer of that shape, in training; needs
           the environment of `make test-integrations`, and is left out unless named.
experts    Mixtral's shapes (8 experts, 14336 x 4096) on the meta device; and steps of 8 experts of 512 x 256.
mixture    the loss of a small mixture of experts after 300 steps, mean of three seeds, at the best of three rates.
head       steps of a 32000 x 512 matrix, with and without a name.
cheaper    steps of one layer of a transformer of width 256 with options that make them cheaper.

Steps are timed in turns in this process: mean CPU time over a period of ten steps after the first, with every root
taken once in it (``refresh=10``). What is in the file of ``--out`` already stays there, so that parts can be run one by
one.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kronscope as ks

Named = list[tuple[str, nn.Parameter]]
MAKERS: dict[str, Callable[..., Any]] = {"Shampoo": ks.Shampoo, "SOAP": ks.SOAP, "KLShampoo": ks.KLShampoo}


def adapters(layers: int, device: str) -> Named:
    """Adapters as peft names them."""
    width, hidden, keys, rank = 2048, 5632, 256, 8
    sides = {"q": (width, width), "k": (keys, width), "v": (keys, width), "o": (width, width)}
    sides |= {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
    named = []
    for layer in range(layers):
        for name, (rows, columns) in sides.items():
            for side, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                weight = nn.Parameter(torch.randn(shape, device=device))
                named.append((f"base_model.model.model.layers.{layer}.{name}_proj.lora_{side}.default.weight", weight))
    return named


def experts(count: int, rows: int, columns: int, device: str) -> Named:
    """Both weights of a layer of experts, as transformers names them."""
    shapes = {"gate_up_proj": (count, 2 * rows, columns), "down_proj": (count, columns, rows)}
    return [(f"mlp.experts.{name}", nn.Parameter(torch.randn(shape, device=device))) for name, shape in shapes.items()]


def unnamed(named: Named) -> list[nn.Parameter]:
    return [param for _, param in named]


def needs(optimizer: Any) -> dict[str, float]:
    plan = optimizer.explain()
    return {"MiB": plan.total_bytes / 2**20, "GFLOP": sum(row.flops for row in plan.rows) / 1e9}


def as_before(kind: Callable[..., Any], named: Named) -> Any:
    """Return the optimizer with both sides of each matrix whose factors stay below 64 MiB."""
    both: Named = []
    rest: Named = []
    for name, param in named:
        (both if 8 * max(param.shape) ** 2 <= 64 * 2**20 else rest).append((name, param))
    return kind([{"params": both, "memory_budget": math.inf}, *([{"params": rest}] if rest else [])])


def adamw_mib(named: Named) -> float:
    return 8 * sum(param.numel() for _, param in named) / 2**20


def step_times(makers: dict[str, Callable[[Named], Any]], make: Callable[[], Named], steps: int) -> dict[str, float]:
    """Mean CPU milliseconds of a step, over ``steps`` of them, taken in turns."""
    runs = {}
    for label, maker in makers.items():
        named = make()
        for _, param in named:
            param.grad = torch.randn_like(param)
        runs[label] = maker(named)
    times: dict[str, list[float]] = {label: [] for label in runs}
    for step in range(1 + steps):
        for label, optimizer in runs.items():
            start = time.process_time()
            optimizer.step()
            if step >= 1:
                times[label].append(1e3 * (time.process_time() - start))
    return {label: round(statistics.fmean(found), 2) for label, found in times.items()}


def adamw(named: Named) -> Any:
    return torch.optim.AdamW(unnamed(named), lr=1e-3, fused=True)


class Mixture(nn.Module):
    """A layer of experts between two layers of its own; each token goes to its best expert."""

    def __init__(self, width: int = 32, hidden: int = 48, count: int = 8) -> None:
        super().__init__()
        self.inputs = nn.Linear(16, width)
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.Module()
        self.experts.up_proj = nn.Parameter(torch.randn(count, hidden, width) / width**0.5)
        self.experts.down_proj = nn.Parameter(torch.randn(count, width, hidden) / hidden**0.5)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = torch.tanh(self.inputs(x))
        weights = self.router(x).softmax(-1)
        best = weights.argmax(-1)
        hidden = torch.relu(torch.einsum("bhw,bw->bh", self.experts.up_proj[best], x))
        out = torch.einsum("bwh,bh->bw", self.experts.down_proj[best], hidden)
        return self.head(x + out * weights.gather(-1, best.unsqueeze(-1)))  # type: ignore[no-any-return]


def mixture_loss(make: Callable[[nn.Module], Any], seed: int) -> float:
    torch.manual_seed(seed)
    inputs = torch.randn(4096, 16)
    with torch.no_grad():
        targets = (6 * Mixture()(inputs)).argmax(-1)
    model = Mixture()
    optimizer = make(model)
    for _ in range(300):
        batch = torch.randint(3072, (128,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        return nn.functional.cross_entropy(model(inputs[3072:]), targets[3072:]).item()


def mixture(kind: Callable[..., Any]) -> dict[str, dict[str, float]]:
    def treated(model: nn.Module, lr: float, **options: Any) -> Any:
        named = list(model.named_parameters())
        roles = [
            "" if name.startswith("experts") else role for (name, _), role in zip(named, roles_of(model), strict=True)
        ]
        apart = [i for i, (name, _) in enumerate(named) if name.startswith("experts")]
        rest = [i for i in range(len(named)) if i not in apart]
        groups = [
            {"params": [named[i] for i in rest], "roles": [roles[i] for i in rest]},
            {"params": [named[i] for i in apart], "roles": [roles[i] for i in apart], **options},
        ]
        return kind(groups, lr=lr)

    ways: dict[str, dict[str, Any]] = {
        "one matrix (as before)": {"view": "matrix"},
        "AdamW": {"method": "adam"},
        "a factor per mode": {"view": "modes"},
        "experts (as planned)": {"view": "experts"},
    }
    found = {}
    for label, options in ways.items():
        by_rate = {
            lr: statistics.fmean(
                mixture_loss(lambda m, lr=lr, o=options: treated(m, lr, **o), seed) for seed in range(3)
            )
            for lr in (1e-3, 3e-3, 1e-2)
        }
        best = min(by_rate, key=by_rate.__getitem__)
        found[label] = {"loss": by_rate[best], "lr": best}
    return found


def roles_of(model: nn.Module) -> list[str]:
    from kronscope.optim.roles import roles_in

    roles = roles_in(model)
    return [roles[param] for param in model.parameters()]


def of_adapters(make: Callable[..., Any], steps: int) -> dict[str, Any]:
    lora = adapters(22, "meta")
    return {
        "1.1B": {
            "as planned": needs(make(lora)),
            "as before": needs(as_before(make, lora)),
            "AdamW": {"MiB": adamw_mib(lora)},
        },
        "one layer, ms": step_times(
            {"as planned": make, "as before": lambda named: as_before(make, named), "AdamW": adamw},
            lambda: adapters(1, "cpu"),
            steps,
        ),
    }


def of_peft(make: Callable[..., Any], steps: int) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4}
    tokens = torch.randint(0, 1000, (2, 8), generator=torch.Generator().manual_seed(0))
    ways = {"as planned": make, "as before": lambda named: as_before(make, named), "AdamW": adamw}
    found = {}
    for label, way in ways.items():
        torch.manual_seed(0)
        llama = LlamaForCausalLM(LlamaConfig(vocab_size=1000, num_hidden_layers=1, **shape))
        model = get_peft_model(llama, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
        optimizer = way([(name, param) for name, param in model.named_parameters() if param.requires_grad])
        times = []
        for _ in range(1 + steps):
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            start = time.process_time()
            optimizer.step()
            times.append(1e3 * (time.process_time() - start))
        state = [tensor for tensors in optimizer.state.values() for tensor in tensors.values()]
        mib = sum(tensor.numel() * tensor.element_size() for tensor in state) / 2**20
        found[label] = {"ms": round(statistics.fmean(times[1:]), 2), "MiB": round(mib, 1)}
    return found


def of_experts(make: Callable[..., Any], steps: int) -> dict[str, Any]:
    mixtral = experts(8, 14336, 4096, "meta")
    return {
        "one layer of Mixtral": {
            "as planned": needs(make(mixtral)),
            "one matrix (as before)": needs(make(unnamed(mixtral))),
            "AdamW": {"MiB": adamw_mib(mixtral)},
        },
        "8 experts of 512 x 256, ms": step_times(
            {"as planned": make, "one matrix (as before)": lambda named: make(unnamed(named)), "AdamW": adamw},
            lambda: experts(8, 512, 256, "cpu"),
            steps,
        ),
    }


def of_head(make: Callable[..., Any], steps: int) -> dict[str, Any]:
    return {
        "32000 x 512, ms": step_times(
            {
                "without a name, as planned": lambda named: make(unnamed(named)),
                "without a name, one-sided (as before)": lambda named: make(unnamed(named), method="kronecker"),
                "with its name": make,
                "AdamW": adamw,
            },
            lambda: [("lm_head.weight", nn.Parameter(torch.randn(32000, 512)))],
            steps,
        )
    }


def of_cheaper(make: Callable[..., Any], steps: int) -> dict[str, Any]:
    def layer(device: str = "cpu") -> Named:
        shapes = {"qkv": (768, 256), "out": (256, 256), "up": (1024, 256), "down": (256, 1024)}
        return [(f"layers.0.{n}.weight", nn.Parameter(torch.randn(s, device=device))) for n, s in shapes.items()]

    ways: dict[str, dict[str, Any]] = {
        "defaults": {},
        "roots every 50 steps": {"refresh": 50},
        "block_size=256": {"block_size": 256},
        "block_size=256, roots every 50 steps": {"block_size": 256, "refresh": 50},
        "memory_budget=4 MiB": {"memory_budget": 4 * 2**20},
    }
    makers: dict[str, Callable[[Named], Any]] = {
        label: lambda named, o=options: make(named, **o) for label, options in ways.items()
    }
    # a whole number of the longest period
    times = step_times({**makers, "AdamW": adamw}, layer, 50 * -(-steps // 50))
    sizes = {label: needs(maker(layer("meta")))["MiB"] for label, maker in makers.items()}
    sizes["AdamW"] = adamw_mib(layer("meta"))
    return {label: {"ms": times[label], "MiB": round(sizes[label], 1)} for label in times}


PARTS: dict[str, Callable[[Callable[..., Any], int], dict[str, Any]]] = {
    "adapters": of_adapters,
    "peft": of_peft,
    "experts": of_experts,
    "mixture": lambda make, steps: mixture(make),
    "head": of_head,
    "cheaper": of_cheaper,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10, help="timed steps, a multiple of ten")
    parser.add_argument("--kinds", nargs="+", default=list(MAKERS), choices=list(MAKERS))
    usual = [part for part in PARTS if part != "peft"]
    parser.add_argument("--parts", nargs="+", default=usual, choices=list(PARTS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", message=".*does not know the names")
    warnings.filterwarnings("ignore", message=".*without names")
    record: dict[str, Any] = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    record["environment"] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": args.threads,
        "steps": args.steps,
    }
    for part in args.parts:
        for kind in args.kinds:
            found = PARTS[part](functools.partial(MAKERS[kind], refresh=10), args.steps)
            record.setdefault(part, {})[kind] = found
            print(part, kind, json.dumps(found, indent=1), flush=True)
            if args.out:
                args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
