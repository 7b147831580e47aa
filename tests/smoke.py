"""A first look at an installed kronscope: `make dist` runs it where the sources are not.

Exits with an error if kronscope comes from the sources, or if measuring, training or a page does not work.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import kronscope as ks
from kronscope.watching.server import LiveServer


def main() -> None:
    place = Path(ks.__file__).resolve()
    assert "site-packages" in place.parts, f"kronscope comes from {place}, not from an installation"
    assert not any(parent == Path(__file__).resolve().parent.parent / "src" for parent in place.parents)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    inputs, targets = torch.randn(32, 6), torch.randint(3, (32,))
    loss, data = nn.CrossEntropyLoss(), [(inputs, targets)]
    optimizer = ks.Shampoo(model, lr=1e-2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ks.watch(optimizer, model, every=1, path=folder / "run"):
            for _ in range(3):
                optimizer.zero_grad()
                loss(model(inputs), targets).backward()
                optimizer.step()
        results = ks.measure(model, loss, data, operators={"live": optimizer})
        assert "live" in results.approximations
        results.plot(folder / "cosines.png")
        advice = ks.advise(model, loss, data, progress=False)
        # the three pages, each made of files that only the wheel brings
        with LiveServer(folder / "run") as server:
            pages = [server.page.decode()]
        pages += [
            page.read_text(encoding="utf-8")
            for page in (results.report(folder / "r.html"), advice.report(folder / "a.html"))
        ]
        for page in pages:
            assert page.count("<script") >= 2, "the wheel lacks scripts of a page"
            assert "<style" in page, "the wheel lacks styles of a page"
    done = "measures, trains, watches, advises, draws and reports"
    sys.stdout.write(f"kronscope {ks.__version__} with torch {torch.__version__}: {done}\n")


if __name__ == "__main__":
    main()
