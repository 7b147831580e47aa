"""
Train a sharded model (FSDP2)
=============================

SOAP on a model that no process holds whole (``fully_shard``), with checkpoints that any other run can load.

Run it::

    torchrun --nproc-per-node 2 examples/fsdp2.py
    torchrun --nproc-per-node 4 examples/fsdp2.py    # continues, on more processes

Gradients travel to the processes that own a matrix's blocks, and updates back; the step is that of the whole matrices.
Checkpoints are written by torch.distributed.checkpoint to ``runs/fsdp2``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import kronscope as ks

FOLDER = Path("runs/fsdp2")


def main() -> None:
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    inputs = torch.randn(512, 32, device=device)
    targets = torch.tanh(inputs @ torch.randn(32, 8, device=device))
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).to(device)
    # for HSDP: init_device_mesh(device.type, (size // 2, 2), mesh_dim_names=("replicate", "shard"))
    mesh = init_device_mesh(device.type, (size,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # after fully_shard: the optimizer must see the sharded parameters
    optimizer = ks.SOAP(model.named_parameters(), lr=1e-2)
    if rank == 0:
        print(optimizer.explain().parallel)

    begin = 0
    # the file that is written last, once everything else is there
    done = sorted(FOLDER.glob("step*/.metadata"))
    if done:
        begin = int(done[-1].parent.name.removeprefix("step"))
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=done[-1].parent)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    for step in range(begin, begin + 40):
        mine = torch.arange(rank, len(inputs), size)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs[mine]), targets[mine])
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            whole = loss.detach().clone()
            dist.all_reduce(whole)
            if rank == 0:
                print(f"step {step + 1}: loss {float(whole) / size:.5f}")
            model_state, optimizer_state = get_state_dict(model, optimizer)
            dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=FOLDER / f"step{step + 1:06d}")
    # gloo may still be letting go of the last exchange: a process that ends meanwhile can be aborted
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
