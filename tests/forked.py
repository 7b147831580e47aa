"""Processes that start in milliseconds: forked from one that has imported torch, kronscope and what they import late.

A fresh interpreter takes about five CPU seconds to get there, more than most tests then need.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

# Imported by the process that forks, which does nothing else.
PRELOADED = (
    "torch",
    "torch._dynamo",  # by the first optimizer that is made
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "kronscope.cli",
    "kronscope.optim.parallel.distributed",
    "kronscope.paper",
    "fontTools.subset",  # by the first PDF that is drawn
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_pdf",
    "matplotlib.figure",
    "pydantic.type_adapter",  # by the first command
    "pytest",  # by the tests' own modules
    "sklearn.datasets",
    "transformers.models.resnet.modeling_resnet",
)
# generous: a busy machine is no reason to fail
SECONDS = 200.0


@cache
def forking() -> Any:
    """How to start processes; as new interpreters where there is no fork."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # the first imports all the others, where tests are run in the project's folder
    context.set_forkserver_preload(["tests.preloaded", *PRELOADED])
    # One thread: forking is safe only in a process that has no others.
    alone = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    with mock.patch.dict(os.environ, {**alone, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}):
        multiprocessing.forkserver.ensure_running()
    # what comes now does not wait for the imports
    first = context.Process(target=_nothing)
    first.start()
    first.join()
    return context


def _nothing() -> None:
    pass


class Forked(NamedTuple):
    """A process that was started, and the other end of the pipe it was given."""

    process: Any
    pipe: Connection


@contextlib.contextmanager
def forked(function: Callable[..., object], *arguments: Any) -> Iterator[Forked]:
    """Run ``function(pipe, *arguments)`` in a process of its own; at the end it is killed if it has not ended."""
    ours, theirs = forking().Pipe()
    process = forking().Process(target=_with_one_thread, args=(function, theirs, *arguments))
    process.start()
    theirs.close()
    try:
        yield Forked(process, ours)
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


def _with_one_thread(function: Callable[..., object], *arguments: Any) -> None:
    import torch

    torch.set_num_threads(1)
    function(*arguments)


class Ended(NamedTuple):
    """How a command ended on one process."""

    code: int | None
    out: str
    err: str


def run_program(
    folder: Path, *arguments: str, size: int = 1, out: str | None = None, variables: Mapping[str, str] | None = None
) -> list[Ended]:
    """Run a program in a folder, on several processes with the environment that ``torchrun`` gives them.

    Args:
        folder: Where it runs.
        *arguments: A script and its arguments, or ``"kronscope"`` and those of a command.
        size: Number of processes.
        out: A file for their standard output, instead of what is given back.
        variables: Of the environment, besides those.
    """
    together: dict[str, str] = {}
    given = dict(variables or {})
    if size > 1:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        # held here, as by torchrun, so that nobody else takes the port before the processes meet
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        together = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(size)}
        together |= {"GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with tempfile.TemporaryDirectory() as written:
        processes = []
        for rank in range(size):
            environment = {**given, **together, "RANK": str(rank), "LOCAL_RANK": str(rank)} if together else given
            files = (out or str(Path(written) / f"out-{rank}"), str(Path(written) / f"err-{rank}"))
            process = forking().Process(
                target=_with_one_thread, args=(_program, list(arguments), str(folder), environment, files)
            )
            process.start()
            processes.append(process)
        for process in processes:
            process.join(SECONDS)
            process.kill()
            process.join()
        texts = [
            [
                "" if out and kind == "out" else (Path(written) / f"{kind}-{rank}").read_text(encoding="utf-8")
                for kind in ("out", "err")
            ]
            for rank in range(size)
        ]
        return [Ended(process.exitcode, *text) for process, text in zip(processes, texts, strict=True)]


def _program(arguments: list[str], folder: str, environment: dict[str, str], files: tuple[str, str]) -> None:
    os.environ.update(environment, COLUMNS="100")
    os.chdir(folder)
    for path, descriptor in zip(files, (1, 2), strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
    sys.argv = arguments
    if arguments[0] == "kronscope":
        from kronscope import cli
        from kronscope.measures import progress

        # one line of progress would follow on a machine that takes ten seconds
        progress._FIRST_LINE = math.inf

        cli.main()
    else:
        sys.path[0] = str(Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
