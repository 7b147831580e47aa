"""Run a function of a module on several processes, started by torchrun as a user would.

The first one's result comes back. Frameworks keep settings of the process group for as long as a process lives, so
every launch has fresh ones.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent.parent
QUIET = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "ACCELERATE_USE_CPU": "true",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def launch(function: Callable[..., Any], count: int, out: Path, **kwargs: Any) -> Any:
    """Run ``function(**kwargs)`` on some processes and return what the first one returned."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    job = [function.__module__, function.__name__, str(out), json.dumps(kwargs)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, "-m", "tests.integrations.launch", *job],
        env={**os.environ, **QUIET, "PYTHONPATH": paths},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    # what torchrun itself says comes last and names no cause
    assert done.returncode == 0, done.stderr.partition("torch/distributed/elastic")[0][-6000:]
    return torch.load(out, weights_only=False)


def main() -> None:
    module, name, out, kwargs = sys.argv[1:]
    torch.set_num_threads(1)
    result = getattr(importlib.import_module(module), name)(**json.loads(kwargs))
    if os.environ["RANK"] == "0":
        torch.save(result, out)
    if torch.distributed.is_initialized():
        # gloo may still be letting go of the last exchange: a process that ends meanwhile can be aborted
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
