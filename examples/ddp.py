"""
Train in several processes (DDP)
================================

Shampoo in several processes that all hold the model (DistributedDataParallel).

Run it::

    torchrun --nproc-per-node 2 examples/ddp.py

The optimizer sees the process group and divides its roots; each process has the whole state, so rank 0 can save alone.
Prints who keeps and receives what, and the loss.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import kronscope as ks


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
    network = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).to(device)
    model = DistributedDataParallel(network)
    optimizer = ks.Shampoo(model.named_parameters(), lr=1e-2)
    if rank == 0:
        print(optimizer.explain().parallel)

    for step in range(60):
        # each process takes its part of the batch; DistributedDataParallel averages the gradients
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
    # gloo may still be letting go of the last exchange: a process that ends meanwhile can be aborted
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
