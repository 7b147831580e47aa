"""A first look at an installed kronscope: `make dist` runs it where the sources are not.

Exits with an error if kronscope comes from the sources, or if measuring, training or the report does not work.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import kronscope as ks


def main() -> None:
    place = Path(ks.__file__).resolve()
    assert "site-packages" in place.parts, f"kronscope comes from {place}, not from an installation"
    assert not any(parent == Path(__file__).resolve().parent.parent / "src" for parent in place.parents)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    inputs, targets = torch.randn(32, 6), torch.randint(3, (32,))
    optimizer = ks.Shampoo(model, lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    results = ks.measure(model, nn.CrossEntropyLoss(), [(inputs, targets)], operators={"live": optimizer})
    assert "live" in results.approximations
    with tempfile.TemporaryDirectory() as folder:
        page = results.report(Path(folder) / "report.html")
        assert "<script" in page.read_text(encoding="utf-8"), "the wheel lacks the report's scripts"
        results.plot(Path(folder) / "cosines.png")
    sys.stdout.write(
        f"kronscope {ks.__version__} with torch {torch.__version__}: measures, trains, draws and reports\n"
    )


if __name__ == "__main__":
    main()
