"""How would a step scale to 8 ... 1024 GPUs? An estimate on paper, from counted FLOPs and bytes.

    python benchmarks/scaling_estimate.py [--write docs/scaling.md]

Nothing is timed. The division of work is the one the optimizers make (`kronscope.optim.parallel.division`), the FLOPs
and bytes are counted from it, and divided by the rates below. The document says which of them are assumptions.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from kronscope.optim.blocks import LayoutOptions, plan_layout
from kronscope.optim.config import Every, Graft, Hyper
from kronscope.optim.elementwise import elementwise_state
from kronscope.optim.parallel.division import Division
from kronscope.optim.parallel.placement import Planned
from kronscope.optim.parallel.shards import Shards
from kronscope.optim.roles import role_of
from kronscope.optim.rules.shampoo import ShampooRule
from kronscope.optim.schedule import assign_phases
from kronscope.optim.solvers import CostModel
from kronscope.optim.stacks import initial_state

# NVIDIA H100 SXM data sheet, dense: float32 without tensor cores, bfloat16 with. NVLink 4: 900 GB/s both ways.
FLOAT32, BFLOAT16, NVLINK = 67e12, 989e12, 450e9
# One 400 Gb/s network port per GPU; eight GPUs to a node.
NETWORK, NODE = 50e9, 8
# Assumed, not measured: the fraction of the peak that matrix products reach, in the model and in the optimizer; the
# fraction of a link's bandwidth that a collective reaches; and what an eigendecomposition in float32 reaches. It takes
# about 9 d^3 multiply-adds; a coupled Newton iteration takes about 12 rounds of 4 products.
MODEL_SHARE, PRODUCT_SHARE, LINK_SHARE, EIGH_RATE = 0.4, 0.6, 0.7, 0.5e12
EIGH_WORK, NEWTON_WORK = 9.0, 48.0
TOKENS, PERIOD = 16384, 10
SIZES = (8, 64, 256, 1024)
MODELS = {"GPT-2 small": (12, 768), "GPT-2 XL": (48, 1600)}


@dataclass(frozen=True)
class Estimate:
    """One line of the table; times in seconds, sizes in bytes."""

    processes: int
    state: float
    balance: float
    products: float
    eigh: float
    together: float
    newton: float
    newton_together: float
    replicated: float
    sharded: float


def shapes(layers: int, width: int) -> list[tuple[str, tuple[int, ...]]]:
    found: list[tuple[str, tuple[int, ...]]] = [("wte.weight", (50257, width)), ("wpe.weight", (1024, width))]
    for layer in range(layers):
        matrices = {
            "qkv": (3 * width, width),
            "out": (width, width),
            "up": (4 * width, width),
            "down": (width, 4 * width),
        }
        for name, shape in matrices.items():
            found += [(f"h.{layer}.{name}.weight", shape), (f"h.{layer}.{name}.bias", shape[:1])]
        found += [(f"h.{layer}.ln{i}.{part}", (width,)) for i in (1, 2) for part in ("weight", "bias")]
    return found


def planned(layers: int, width: int) -> list[Planned]:
    """The parameters of a model, in float32 and without memory, with the optimizers' default layouts."""
    hyper = Hyper(ShampooRule(), 0.9, 0.95, 1e-8, (-0.5,), Graft(), Every(PERIOD), 1e-4, 1, 1, 0.0, False, CostModel())
    entries = []
    for name, shape in shapes(layers, width):
        layout = plan_layout(shape, LayoutOptions(role=role_of(name), block_size=math.inf))
        entries.append(Planned(name, torch.empty(shape, device="meta"), layout, hyper))
    return entries


def phases_of(entries: list[Planned]) -> dict[int, list[torch.Tensor]]:
    """The step of the period at which each factor's root is taken, as the optimizers spread them."""
    found: dict[int, list[torch.Tensor]] = {}
    newcomers = []
    for index, entry in enumerate(entries):
        tables = [torch.zeros(tile.total, len(tile.block), dtype=torch.int64) for tile in entry.layout.tiles]
        found[index] = tables
        newcomers.append(({f"tile{i}.phase": table for i, table in enumerate(tables)}, entry.layout, entry.hyper))
    assign_phases([], newcomers)
    return found


def state_sizes(entries: list[Planned]) -> dict[torch.Tensor, dict[str, int]]:
    """Bytes of each tensor of each parameter's state."""
    found = {}
    for entry in entries:
        if entry.layout.is_elementwise:
            state = elementwise_state(entry.param, torch.float32)
        else:
            state = initial_state(entry.param, entry.layout, entry.hyper)
        found[entry.param] = {name: tensor.numel() * tensor.element_size() for name, tensor in state.items()}
    return found


def estimate(entries: list[Planned], sizes: dict[torch.Tensor, dict[str, int]], processes: int) -> Estimate:
    whole, cut = Division(processes), Division(processes)
    whole.add(entries, {entry.param: None for entry in entries})
    cut.add(entries, {entry.param: rows_cut(entry.param.shape[0], processes) for entry in entries})
    products = [0.0] * processes
    cubes = [[0.0] * PERIOD for _ in range(processes)]
    phases = phases_of(entries)
    for index, entry in enumerate(entries):
        for number, tile in enumerate(entry.layout.tiles):
            for rank, (start, stop) in enumerate(whole.ranges[entry.param][number]):
                for mode in tile.modes if stop > start else ():
                    # a Gram matrix, and a product with the root
                    products[rank] += (stop - start) * 2 * 2.0 * tile.block[mode] * math.prod(tile.block)
                    for phase in phases[index][number][start:stop, mode].tolist():
                        cubes[rank][phase] += 2.0 * float(tile.block[mode]) ** 3
    # a step is over when the slowest process is: spread roots meet on no two processes at once
    slowest = sum(max(cubes[rank][phase] for rank in range(processes)) for phase in range(PERIOD)) / PERIOD
    together = max(sum(row) for row in cubes) / PERIOD
    link = (NVLINK if processes <= NODE else NETWORK) * LINK_SHARE
    return Estimate(
        processes,
        max(whole.state_bytes(sizes)),
        max(whole.loads) * processes / sum(whole.loads),
        max(products) / (FLOAT32 * PRODUCT_SHARE),
        slowest * EIGH_WORK / EIGH_RATE,
        together * EIGH_WORK / EIGH_RATE,
        slowest * NEWTON_WORK / (FLOAT32 * PRODUCT_SHARE),
        together * NEWTON_WORK / (FLOAT32 * PRODUCT_SHARE),
        max(whole.traffic()) / link,
        max(cut.traffic()) / link,
    )


def rows_cut(rows: int, processes: int) -> Shards:
    chunk = -(-rows // processes)
    edges = [min(chunk * rank, rows) for rank in range(processes + 1)]
    return Shards(0, tuple(pairwise(edges)), (0,) * processes)


def table(name: str, layers: int, width: int) -> list[str]:
    entries = planned(layers, width)
    sizes = state_sizes(entries)
    count = sum(entry.param.numel() for entry in entries)
    model = 6.0 * count * TOKENS / (BFLOAT16 * MODEL_SHARE)
    head = (
        "GPUs",
        "state",
        "work, fullest / mean",
        "products",
        "eigh, spread",
        "eigh, together",
        "Newton, spread",
        "Newton, together",
        "DDP: parameters",
        "FSDP2: gradients, updates",
    )
    lines = [f"## {name}: {count / 1e6:.0f} million parameters", ""]
    lines.append(
        f"Forward and backward of {TOKENS} tokens on each GPU take {1e3 * model:.0f} ms by the same reckoning."
    )
    lines.append("Times in milliseconds per step; state in MiB on the fullest GPU.")
    lines += ["", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for processes in SIZES:
        one = estimate(entries, sizes, processes)
        times = (one.products, one.eigh, one.together, one.newton, one.newton_together, one.replicated, one.sharded)
        cells = [f"{one.state / 2**20:.0f}", f"{one.balance:.2f}", *(f"{1e3 * seconds:.1f}" for seconds in times)]
        lines.append(f"| {processes} | {' | '.join(cells)} |")
    return [*lines, ""]


HEAD = f"""# Scaling, on paper

Made by `python benchmarks/scaling_estimate.py --write docs/scaling.md`. Nothing here was timed on a GPU: the division
of work is the one the optimizers make, FLOPs and bytes are counted from it, and divided by rates.

**Rates from data sheets**: H100 SXM with {FLOAT32 / 1e12:.0f} TFLOP/s in float32 (factors and roots use neither TF32
nor bfloat16), {BFLOAT16 / 1e12:.0f} TFLOP/s in bfloat16 for the model, NVLink with {NVLINK / 1e9:.0f} GB/s each way
within a node of {NODE}, one network port of 400 Gb/s for each GPU.

**Assumed**: {MODEL_SHARE:.0%} of the peak in the model, {PRODUCT_SHARE:.0%} in the optimizer's products,
{LINK_SHARE:.0%} of a link's bandwidth, and the slowest link for all bytes; {EIGH_RATE / 1e12:.1f} TFLOP/s in an
eigendecomposition of {EIGH_WORK:.0f} d³ multiply-adds, {NEWTON_WORK:.0f} d³ in a coupled Newton iteration. Latency and
overlap are left out.

**Setting**: Shampoo with exponent −½, Adam's length, `refresh={PERIOD}`, whole matrices, float32 parameters;
embeddings get AdamW. *Spread* is the default: each step takes the roots whose turn it is, the same ones as on one
process. A step is over when the slowest process is, so with more processes than roots per step most wait. *Together*
is `Every({PERIOD}, spread=False)`: all roots in one of every {PERIOD} steps; the column is the mean over them.
"""

TAIL = """## What it says

- State falls as 1/GPUs until each GPU has one block; then the largest matrix decides. Cutting it (`block_size`) helps.
- So does work: the largest matrix is a lower bound on the fullest process, whatever the division.
- Eigendecompositions would dominate a step. `CoupledNewton`, whose work is matrix products, is the solver for GPUs of
  this kind; `measure_solvers` makes the table that chooses it.
- Spreading the roots keeps one process's steps equally long, but with many processes nearly every step waits for
  somebody's largest root. `spread=False` takes them together and is several times cheaper there; which of the two a run
  uses is its own choice, so that the same options give the same numbers on any number of processes.
- Gathering whole parameters (DDP) costs the same on any number of nodes, and less than the gradients' all-reduce before
  it. FSDP2's traffic falls as 1/GPUs until one matrix per GPU is left.
"""


def document() -> str:
    lines = [HEAD]
    for name, (layers, width) in MODELS.items():
        lines += table(name, layers, width)
    return "\n".join([*lines, TAIL])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="where to write the document; printed otherwise")
    arguments = parser.parse_args()
    text = document()
    if arguments.write is None:
        print(text, end="")
    else:
        arguments.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
