"""A watched run in a folder that a test names, in processes that it kills."""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch

import kronscope as ks
from kronscope.support.files import write_atomically
from tests.watching.running import LOSS, OPTIMIZERS, bits, network, points, train

STEPS, EVERY, SAVED = 48, 3, 8


def work(folder: Path) -> None:
    """Train from the last checkpoint, if there is one, and watch in the same folder as before."""
    checkpoint = folder / "checkpoint.pt"
    model = network()
    optimizer = OPTIMIZERS["shampoo"](model)
    done = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
        done = saved["step"]
    with ks.watch(optimizer, model, EVERY, LOSS, [points()], path=folder / "watch", budget=math.inf):
        for step in range(done + 1, STEPS + 1):
            train(model, optimizer, 1, first=step)
            time.sleep(0.002)
            if step % SAVED == 0:
                state = {
                    "step": step,
                    "model": bits(model),
                    "optimizer": optimizer.state_dict(),
                    "random": torch.get_rng_state(),
                }
                write_atomically(checkpoint, lambda file, state=state: torch.save(state, file))  # type: ignore[misc]
    (folder / "done.json").write_text("{}")
