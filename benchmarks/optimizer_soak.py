"""What the optimizers survive: long runs, odd cases, decompositions that fail, interrupts, gradients of any size.

    python -m benchmarks.optimizer_soak [soak] [fuzz] [failures] [interrupts] [scales] [check] [shapes]
        [--steps 100000] [--families KLShampoo SOAP] [--cases 10000] [--out benchmarks/records/optimizer_soak.json]

Each part adds its counts to the record. Run it with OMP_NUM_THREADS=1; seconds are CPU time.

- *soak*: a network of 8-16-4 units, so many steps; resident memory and the CPU time of a step, by tenths of the run.
  Beside the optimizer's step the model's forward and backward pass is timed, which does the same work in every tenth:
  if it takes longer, the machine is slower. A tenth counts by the median of its twenty parts, which a burst of other
  work does not move.
- *fuzz*: so many random cases: shapes of no to five dimensions, empty, 1 × n, n × 1 and long ones, four dtypes, groups,
  missing, zero, huge, sparse and non-finite gradients, states through a file into another optimizer. Counted: NaN,
  parameters that stay though their gradient is not small, states that go on differently, errors.
- *failures*: eigh, QR, Cholesky and triangular solves that raise, or return NaN or nonsense.
- *interrupts*: SIGINT at operations of a step, spread over all of them.
- *scales*: gradients times 1e-30 to 1e30.
- *check*: the part of a refresh that the check of its decomposition takes.
- *shapes*: five steps of 5,000 parameters of different shapes, none of which can be treated together.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import math
import platform
import random
import resource
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import kronscope as ks
from kronscope.errors import GradientError
from kronscope.kron.bases import decomposition_residuals

RECORD = Path(__file__).parent / "records" / "optimizer_soak.json"
FAMILIES: dict[str, Callable[..., Any]] = {
    "Shampoo": ks.Shampoo,
    "KLShampoo": ks.KLShampoo,
    "SOAP": ks.SOAP,
    "SOAP, published": lambda params, lr, **options: ks.SOAP(params, lr, reference=True, **options),
}
MAKERS: dict[str, Callable[[Any], Any]] = {
    **{name: partial(kind, lr=0.01) for name, kind in FAMILIES.items()},
    "Shampoo, every 2": lambda p: ks.Shampoo(p, 0.01, refresh=2, scale="adam"),
    "Shampoo, original": lambda p: ks.Shampoo(
        p, 0.01, betas=(0.0, 1.0), eps=1e-4, exponent=-0.25, scale=None, refresh=1
    ),
    "Shampoo, blocks": lambda p: ks.Shampoo(p, 0.01, block_size=3, refresh=2),
    "Shampoo, modes": lambda p: ks.Shampoo(p, 0.01, view="modes", method="kronecker"),
    "Shampoo, adaptive": lambda p: ks.Shampoo(p, 0.01, refresh=ks.Adaptive(0.1)),
    "Shampoo, warm": lambda p: ks.Shampoo(p, 0.01, solver=ks.optim.WarmQR()),
    "Shampoo, momentum": lambda p: ks.Shampoo(p, 0.01, momentum=0.9, nesterov=True),
    "KLShampoo, blocks": lambda p: ks.KLShampoo(p, 0.01, block_size=4, refresh=2),
    "SOAP, decomposing": lambda p: ks.SOAP(p, 0.01, solver=ks.optim.Eigh(), refresh=2),
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
PARTS = 20  # of a tenth of a long run
EVENTS = ("grad", "grad", "grad", "missing", "zero", "nan", "inf", "save", "sparse", "frozen")


# --- soak -------------------------------------------------------------------------------------------------------------


def resident() -> float:
    """Return the process's resident memory in MiB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


def soak(steps: int, families: Sequence[str]) -> dict[str, Any]:
    """Train for long; return memory and times by tenths of the run."""
    found = {}
    for name in families:
        kind = FAMILIES[name]
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        optimizer = kind(model, 1e-3, weight_decay=0.01)
        x, y = torch.randn(256, 8), torch.randint(0, 4, (256,))
        loss_of = nn.CrossEntropyLoss()
        memory, models, times = [], [], []
        length = max(1, steps // (10 * PARTS))
        for _ in range(10):
            parts = []
            for _ in range(PARTS):
                passes = own = 0.0
                for step in range(length):
                    rows = slice(32 * (step % 8), 32 * (step % 8) + 32)
                    began = time.process_time()
                    optimizer.zero_grad()
                    loss = loss_of(model(x[rows]), y[rows])
                    loss.backward()
                    middle = time.process_time()
                    optimizer.step()
                    passes += middle - began
                    own += time.process_time() - middle
                parts.append((1e3 * passes / length, 1e3 * own / length))
            models.append(round(median(part[0] for part in parts), 4))
            times.append(round(median(part[1] for part in parts), 4))
            memory.append(round(resident(), 2))
        metrics = optimizer.metrics()
        slower, slower_model = (sum(row[5:]) / sum(row[:5]) for row in (times, models))
        found[name] = {
            "steps": int(metrics["step"]),
            "resident_mib": memory,
            "milliseconds": times,
            "model_milliseconds": models,
            "last_loss": round(float(loss.detach()), 5),
            "growth_after_first_tenth": round(memory[-1] / memory[0] - 1, 5),
            "later_half_over_earlier": round(slower, 3),
            "later_half_over_earlier_of_the_model": round(slower_model, 3),
            "lost_roots": metrics["lost_roots"],
        }
        print(name, found[name], flush=True)
    return found


# --- fuzz -------------------------------------------------------------------------------------------------------------


def _shape(dice: random.Random) -> tuple[int, ...]:
    kind = dice.random()
    if kind < 0.6:
        return tuple(dice.randint(0 if dice.random() < 0.15 else 1, 5) for _ in range(dice.randint(0, 5)))
    long = dice.randint(50, 300)
    return dice.choice([(1, 1), (1, long), (long, 1), (2, long), (long, 3), (7, 9), (1, 1, 1, 7), (12, 12)])


def _groups(dice: random.Random, params: list[nn.Parameter]) -> list[dict[str, Any]]:
    cut = dice.randint(0, len(params))
    options: dict[str, Any] = {"weight_decay": dice.choice([0.0, 0.1])}
    return [group for group in ({"params": params[:cut]}, {"params": params[cut:], **options}) if group["params"]]


def fuzz_case(seed: int) -> Counter[str]:
    """Train a random set of parameters through random events; return what was counted."""
    dice, counts = random.Random(seed), Counter[str](cases=1)
    generator = torch.Generator().manual_seed(seed)
    dtype = dice.choice(DTYPES)
    params = [
        nn.Parameter(torch.randn(_shape(dice), generator=generator, dtype=torch.float64).to(dtype))
        for _ in range(dice.randint(1, 4))
    ]
    maker = dice.choice(sorted(MAKERS))
    optimizer = MAKERS[maker](_groups(dice, params))
    scale = 10.0 ** dice.uniform(-4, 3)
    for event in [dice.choice(EVENTS) for _ in range(dice.randint(1, 5))] + ["grad"] * 2:
        if event == "save":
            counts["states through a file"] += 1
            counts["states that go on differently"] += not _resumes(optimizer, params, maker)
            continue
        _set_gradients(event, params, scale, dice, generator)
        before = [param.detach().clone() for param in params]
        if event == "sparse":
            counts["sparse gradients refused"] += _is_refused(optimizer, params, before)
            continue
        optimizer.step()
        counts["steps"] += 1
        bad = event in ("nan", "inf") and any(param.grad is not None and param.numel() for param in params)
        for param, old in zip(params, before, strict=True):
            counts["parameters with NaN"] += not bool(torch.isfinite(param).all())
            counts["parameters changed by a bad step"] += bad and not torch.equal(param, old)
        moves = event == "grad" and not ("published" in maker and _is_first(optimizer))
        if moves:
            for param, old in zip(params, before, strict=True):
                # in half precision a step may be below the resolution
                still = param.numel() > 0 and torch.equal(param, old) and dtype in (torch.float64, torch.float32)
                counts["parameters that stayed"] += still
    optimizer.explain()
    optimizer.diagnostics()
    return counts


def _is_first(optimizer: Any) -> bool:
    return any(int(state["step"]) <= 1 for state in optimizer.state.values() if "step" in state)


def _set_gradients(
    event: str, params: list[nn.Parameter], scale: float, dice: random.Random, generator: torch.Generator
) -> None:
    for place, param in enumerate(params):
        param.requires_grad_(event != "frozen" or place % 2 == 0)
        grad = (scale * torch.randn(param.shape, generator=generator, dtype=torch.float64)).to(param.dtype)
        if event == "zero":
            grad = torch.zeros_like(grad)
        elif event in ("nan", "inf"):
            grad = torch.full_like(grad, math.nan if event == "nan" else math.inf)
        is_missing = (event == "missing" and dice.random() < 0.5) or not param.requires_grad
        param.grad = None if is_missing else grad


def _is_refused(optimizer: Any, params: list[nn.Parameter], before: list[Tensor]) -> bool:
    wide = [param for param in params if param.ndim == 2 and param.numel()]
    if not wide:
        return False
    wide[0].grad = torch.sparse_coo_tensor(
        torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, wide[0].shape[1], dtype=wide[0].dtype), wide[0].shape
    )
    try:
        optimizer.step()
    except GradientError:
        wide[0].grad = None
        return all(torch.equal(param, old) for param, old in zip(params, before, strict=True))
    raise AssertionError("a sparse gradient was taken")


def _resumes(optimizer: Any, params: list[nn.Parameter], maker: str) -> bool:
    """Whether a state that went through a file goes on as the optimizer itself would."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    twins = [nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad) for param in params]
    places = {param: place for place, param in enumerate(params)}
    groups = [
        {"params": [twins[places[p]] for p in group["params"]], "weight_decay": group["weight_decay"]}
        for group in optimizer.param_groups
    ]
    twin = MAKERS[maker](groups)
    twin.load_state_dict(torch.load(file, weights_only=True))
    # and a copy, so that this step is not the run's
    mine = copy.deepcopy((params, optimizer))
    for param, other in zip(mine[0], twins, strict=True):
        param.grad = torch.ones_like(param) if param.requires_grad else None
        other.grad = torch.ones_like(other) if other.requires_grad else None
    mine[1].step()
    twin.step()
    return all(torch.equal(a, b) for a, b in zip(mine[0], twins, strict=True))


def fuzz(cases: int) -> dict[str, Any]:
    """Try many cases; return counts, and the seeds of those that failed."""
    counts, failed = Counter[str](), dict[str, str]()
    for seed in range(cases):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = fuzz_case(seed)
        except Exception as error:  # noqa: BLE001  # every one is a finding
            counts["errors"] += 1
            failed[str(seed)] = f"{type(error).__name__}: {error}"[:200]
            continue
        counts.update(found)
        for name in BAD:
            if found[name]:
                failed[str(seed)] = name
        if seed % 1000 == 999:
            print(seed + 1, dict(counts), flush=True)
    counts.update(dict.fromkeys((*BAD, "errors"), 0))
    return {**dict(counts), "failed": failed}


BAD = (
    "parameters with NaN",
    "parameters that stayed",
    "parameters changed by a bad step",
    "states that go on differently",
)


# --- failures, interrupts, scales, the price of the check -------------------------------------------------------------


def failures() -> dict[str, Any]:
    """Run every kind of failure of every family; return how losses end beside undisturbed ones."""
    from tests.optim.failing import KINDS, failing
    from tests.optim.test_failing_solvers import FAMILIES as OPTIMIZERS
    from tests.optim.test_failing_solvers import WHEN, run

    found: dict[str, Any] = {"runs": 0, "stopped": 0, "injected": 0, "most_warnings_of_a_run": 0, "families": {}}
    for family in OPTIMIZERS:
        plain = run(family)[0]
        ends = []
        for when in WHEN:
            for kind in KINDS:
                found["runs"] += 1
                try:
                    with failing(kind, WHEN[when]) as injected:
                        losses, _, told = run(family)
                except Exception as error:  # noqa: BLE001  # every one is a finding
                    found["stopped"] += 1
                    print(family, when, kind, repr(error), flush=True)
                    continue
                ends.append(losses[-1])
                found["injected"] += injected.hits
                found["most_warnings_of_a_run"] = max(found["most_warnings_of_a_run"], len(told))
        found["families"][family] = {
            "first_loss": round(plain[0], 4),
            "undisturbed": round(plain[-1], 4),
            "disturbed": [round(min(ends), 4), round(max(ends), 4)],
        }
        print(family, found["families"][family], flush=True)
    return found


def interrupts(number: int) -> dict[str, Any]:
    """Interrupt steps at operations spread over all of them; return how many were left half-way."""
    from tests.optim.test_whole_steps import FAMILIES as OPTIMIZERS
    from tests.optim.test_whole_steps import At, backward, operations, same, snapshot, trained

    # a shell lets what it starts in the background ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found = Counter[str](interrupts=0, whole=0, untouched=0, half=0, runs_that_end_otherwise=0)
    for family in OPTIMIZERS:
        _, _, seen = trained(family, 4)
        for step in (0, 1, 2, 3):
            count = operations(family, step)
            for place in {count * i // number for i in range(number)}:
                model, optimizer, _ = trained(family, step)
                backward(model, step)
                try:
                    with At(place, lambda: signal.raise_signal(signal.SIGINT)):
                        optimizer.step()
                except KeyboardInterrupt:
                    found["interrupts"] += 1
                now = snapshot(model, optimizer)
                whole, untouched = same(now, seen[step + 1]), same(now, seen[step])
                found["whole"] += whole
                found["untouched"] += untouched
                found["half"] += not (whole or untouched)
                for later in range(step + whole, 4):
                    backward(model, later)
                    optimizer.step()
                found["runs_that_end_otherwise"] += not same(snapshot(model, optimizer), seen[4])
    print(dict(found), flush=True)
    return dict(found)


def scales() -> dict[str, Any]:
    """Multiply gradients by powers of ten; return how many runs ended with NaN, were skipped in words, or moved."""
    found = Counter[str]({"runs": 0, "with NaN": 0, "skipped with a warning": 0, "moved": 0, "as still as AdamW": 0})
    found["still where AdamW moves"] = 0
    for name, make in {**MAKERS, "AdamW": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.0)}.items():
        for dtype in DTYPES:
            for power in range(-30, 31, 2):
                moved = _scaled(make, dtype, 10.0**power)
                if name == "AdamW":
                    continue
                found["runs"] += 1
                found["with NaN"] += moved == "NaN"
                found["skipped with a warning"] += moved == "skipped"
                found["moved"] += moved == "moved"
                if moved == "still":
                    reference = _scaled(lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.0), dtype, 10.0**power)
                    expected = reference != "moved" or "original" in name
                    found["as still as AdamW" if expected else "still where AdamW moves"] += 1
                    if not expected:
                        print("still where AdamW moves:", name, dtype, power, flush=True)
    print(dict(found), flush=True)
    return dict(found)


def _scaled(make: Callable[[Any], Any], dtype: torch.dtype, scale: float) -> str:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((6, 4), (5,))]
    before = [param.detach().clone() for param in params]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer = make(params)
        for _ in range(4):
            for param in params:
                noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
                param.grad = (scale * noise).to(dtype)
            optimizer.step()
    if not all(bool(torch.isfinite(param).all()) for param in params):
        return "NaN"
    if any("skipped" in str(one.message) for one in told):
        return "skipped"
    return "still" if any(torch.equal(a, b) for a, b in zip(params, before, strict=True)) else "moved"


def check_cost() -> dict[str, Any]:
    """Return the part of an eigendecomposition's time that checking it takes, by size; CPU time, medians of seven."""
    found = {}
    for size in (32, 128, 512, 1024):
        rows = torch.randn(1, size, 2 * size)
        factor = rows @ rows.mT
        repeats = max(1, 256 // size)
        ratios = []
        for _ in range(7):
            began = time.process_time()
            for _ in range(repeats):
                values, vectors = torch.linalg.eigh(factor)
            middle = time.process_time()
            for _ in range(repeats):
                decomposition_residuals(factor, values, vectors).tolist()
            ratios.append((time.process_time() - middle) / (middle - began))
        found[str(size)] = round(sorted(ratios)[3], 4)
    print(found, flush=True)
    return found


def shapes(number: int = 5000, steps: int = 5) -> dict[str, Any]:
    """Train many parameters of different shapes, 4 to 75 on a side; return CPU milliseconds for each, step by step."""
    generator = torch.Generator().manual_seed(0)
    sides = [divmod(place, 72) for place in range(number)]
    params = [nn.Parameter(torch.randn(4 + m, 4 + n, generator=generator)) for m, n in sides]
    optimizer = ks.Shampoo(params, 1e-3)
    found: dict[str, Any] = {"parameters": number, "milliseconds_each": []}
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        began = time.process_time()
        optimizer.step()
        found["milliseconds_each"].append(round(1e3 * (time.process_time() - began) / number, 3))
    # the same decompositions alone, as many and as large: what no library can save
    factors = [side @ side.T for param in params for side in (param.detach(), param.detach().T)]
    began = time.process_time()
    for factor in factors:
        torch.linalg.eigh(factor)
    found["eigh_alone"] = round(1e3 * (time.process_time() - began) / number, 3)
    print(found, flush=True)
    return found


def main() -> None:
    """Run the parts that are asked for, and add them to the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = ("soak", "fuzz", "failures", "interrupts", "scales", "check", "shapes")
    parser.add_argument("parts", nargs="*", choices=[*every, []], default=list(every))
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="of the soak")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--interrupts", type=int, default=25, help="for each family and each of four steps")
    parser.add_argument("--out", type=Path, default=RECORD)
    options = parser.parse_args()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "soak": lambda: soak(options.steps, options.families),
        "fuzz": lambda: fuzz(options.cases),
        "failures": failures,
        "interrupts": lambda: interrupts(options.interrupts),
        "scales": scales,
        "check": check_cost,
        "shapes": shapes,
    }
    for part in options.parts:
        found = parts[part]()
        record = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
        record |= {"torch": torch.__version__, "python": platform.python_version(), "processor": platform.machine()}
        record[part] = {**record.get(part, {}), **found} if part == "soak" else found
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
