"""One measurement in a folder of its own: results, a picture and a report."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kronscope import figures
from kronscope.measures import Results
from kronscope.runs.run import Run
from kronscope.support.processes import ALONE, Processes

__all__ = ["run_measurement"]


def run_measurement(
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    measure: Callable[[], Results],
    processes: Processes = ALONE,
    resume: Callable[[Results], Results] | None = None,
) -> tuple[Results, list[Path]]:
    """Measure once and keep results, picture and report.

    The folder is taken before the work, so that nothing is measured that cannot be kept. What fails before there are
    results leaves the folder as it was; a measurement that was killed is made again by the same call, and if its
    results were there already, only what came after them. One that was interrupted after its first row keeps what it
    has, marked as partial, and is not finished: the same call goes on with it. Whole results are never overwritten.

    Args:
        path: The folder.
        config: What was asked for, as plain data.
        measure: Measures; called on every process.
        processes: The processes that measure together; rank 0 has the folder.
        resume: Goes on from partial results; without it everything is measured again.

    Returns:
        The results, and the files to look at.

    Raises:
        RunError: The folder holds a finished run or another one, cannot be made, or is in use.
        ResultsError: A file cannot be written.
        MissingExtraError: matplotlib is not installed; nothing is measured that cannot be drawn.
        KeyboardInterrupt: Measuring was interrupted before the first row.
    """
    with processes.failing_together():
        figures.require_matplotlib()
    with Run.start(path, config, resume=True, reopen=False, processes=processes) as run:
        file = run.results_path
        results = processes.on_rank_0(lambda: Results.load(file) if file.exists() else None)
        if results is None or results.partial:
            results = measure() if results is None or resume is None else resume(results)
            if not results.rows:
                raise KeyboardInterrupt
            # first what took long
            processes.on_rank_0(lambda: results.save(file))
        files = processes.on_rank_0(lambda: [file, *_show(results, run.folder)])
        if not results.partial:
            run.finish(needs=[made.name for made in files])
    return results, files


def _show(results: Results, folder: Path) -> list[Path]:
    picture = figures.cosines(results)
    pictures = [figures.save(picture, folder / f"figure{suffix}") for suffix in (".png", ".pdf")]
    return [*pictures, results.report(folder / "report.html")]
