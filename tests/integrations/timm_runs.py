"""Training a model of timm as its own script does, on one process or many; started by tests and by torchrun."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import kronscope as ks
from tests.integrations.stand_in import imported_timm
from tests.integrations.tiny import weights

BATCH, STEPS, SAVED = 64, 6, 3
# Blocks so small that the first gradient gives their factors full rank: bases of a null space are as rounding has them.
OPTIONS = {"kronscope-soap": {"block_size": 8}}


def vision_transformer(timm: ModuleType) -> Any:
    """A small transformer, the same in every call."""
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 8, "depth": 2, "embed_dim": 16, "num_heads": 2, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **sizes)


def made(timm: ModuleType, model: Any, name: str, own: dict[str, Any] | None = None, **options: Any) -> Any:
    """An optimizer from the registry, with its own options and timm's groups."""
    ks.integrations.timm.register()
    groups = partial(ks.integrations.timm.param_groups, **options)
    return timm.optim.create_optimizer_v2(model, name, lr=1e-2, param_group_fn=groups, **(own or {}))


def train(folder: str, name: str, resume: str | None = None) -> dict[str, Tensor]:
    """Train from the start, saving half-way on the first process, or from there; return the weights."""
    timm = imported_timm()
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = vision_transformer(timm).double()
    optimizer = made(timm, model, name, OPTIONS.get(name), weight_decay=0.05, layer_decay=0.75)
    first = 0
    if resume is not None:
        timm.models.resume_checkpoint(model, resume, optimizer, log_info=False)
        first = SAVED
    scheduler = timm.scheduler.CosineLRScheduler(optimizer, t_initial=10, warmup_t=2, t_in_epochs=False)
    scheduler.step_update(first)
    parallel = DistributedDataParallel(model) if size > 1 else model
    for step in range(first, STEPS):
        torch.manual_seed(step)
        images, labels = torch.randn(BATCH, 3, 16, 16, dtype=torch.float64), torch.randint(0, 5, (BATCH,))
        mine = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(parallel(images[mine]), labels[mine]).backward()
        optimizer.step()
        scheduler.step_update(step + 1)
        if rank == 0 and resume is None and step + 1 == SAVED:
            Path(folder).mkdir(parents=True, exist_ok=True)
            saver = timm.utils.CheckpointSaver(parallel, optimizer, checkpoint_dir=folder, recovery_dir=folder)
            saver.save_checkpoint(SAVED)
    return weights(model)


def together(folder: str) -> dict[str, dict[str, Any]]:
    """On two processes: a whole run that saves half-way, and one that resumes from there."""
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    imported_timm()
    found: dict[str, dict[str, Any]] = {}
    for name in ks.integrations.timm.register():
        whole = train(f"{folder}/{name}", name)
        dist.barrier()
        saved = f"{folder}/{name}/checkpoint-{SAVED}.pth.tar"
        found[name] = {"whole": whole, "resumed": train(f"{folder}/{name}-again", name, saved)}
    return found
