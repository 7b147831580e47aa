"""Several processes of one command, as ``torchrun`` starts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

__all__ = ["is_rank_0", "process_group"]


def is_rank_0() -> bool:
    """Whether this process is the one that prints and writes: rank 0, or the only one.

    >>> is_rank_0()
    True
    """
    return not _launched() or int(os.environ["RANK"]) == 0


def _launched() -> bool:
    """Whether a launcher started several processes and said how they meet."""
    known = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    return known and int(os.environ["WORLD_SIZE"]) > 1 and dist.is_available()


@contextmanager
def process_group() -> Iterator[None]:
    """Join the processes that a launcher started, and leave them at the end; nothing for a process alone."""
    if not _launched() or dist.is_initialized():
        yield
        return
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend)
    try:
        ended: SystemExit | None = None
        try:
            yield
        except SystemExit as end:  # how a command ends, also one that went well
            if end.code:
                raise
            ended = end
        # whoever leaves while another still works takes connections away from it
        dist.barrier()
        if ended is not None:
            raise ended
    finally:
        dist.destroy_process_group()
