"""What do the commands survive? Kills, full disks, damaged files, odd paths and terminals, counted.

    python benchmarks/survival.py [--parts kills disks operations damage paths terminals] [--scale 1.0]
                                  [--commands demo ...] [--out benchmarks/records/survival.json]

Every trial is a command in a forked child, on a small workload, in a folder of its own. A trial that was disturbed is
given again without disturbance and must end with the results of an undisturbed run: all files byte for byte but for
times. What it printed must hold no traceback, and if it ended with exit code 2, one line that begins with
``kronscope:``. Disks that are full are small file systems in memory (``mount -t tmpfs``, for root on Linux); where they
cannot be made, that part is left out, and the record says so.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import kronscope as ks
from kronscope import cli
from kronscope.support.files import write_atomically
from kronscope.watching.records import WatchRecords

Body = Callable[[], object]
MODULE = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))

def data():
    torch.manual_seed(1)
    return [(torch.randn(20, 8), torch.randint(0, 3, (20,)))]
"""
PAPER = (
    "paper",
    "figure1",
    "--workload",
    "digits-linear",
    "--steps",
    "4",
    "--samples",
    "20",
    "--measure-at",
    "0,2,3,4",
)
MINE = ("mine:build", "--data", "mine:data")


class Ended(NamedTuple):
    """How a child ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def in_words(self) -> bool:
        """No traceback, and a refusal is one line besides warnings."""
        lines = [line for line in self.err.splitlines() if line and not line.startswith("kronscope: warning:")]
        refused = len(lines) == 1 and lines[0].startswith("kronscope: ")
        return "Traceback" not in self.err and (refused or self.code != 2)


def command(name: str, folder: Path) -> Body:
    """A command that works in a folder and can be given again."""
    arguments: dict[str, tuple[str, ...]] = {
        "paper": (*PAPER, "--resume", f"--out={folder}"),
        "measure": ("measure", *MINE, f"--out={folder}"),
        "advise": ("advise", *MINE, f"--out={folder}"),
        "demo": ("demo", f"--out={folder}"),
        "report": ("report", "source", f"--out={folder / 'page.html'}"),
    }
    if name == "ks.watch":
        return lambda: watched(folder)

    def run() -> None:
        sys.argv = ["kronscope", *arguments[name]]
        cli.main()

    return run


def watched(folder: Path) -> None:
    """Train and watch, from the last checkpoint on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = ks.Shampoo(model.named_parameters(), lr=1e-2)
    inputs, targets = torch.randn(20, 8), torch.randint(0, 3, (20,))
    loss, done, checkpoint = nn.CrossEntropyLoss(), 0, folder / "model.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    with ks.watch(optimizer, model, 2, loss, [(inputs, targets)], path=folder / "watch", budget=1e9):
        for step in range(done + 1, 25):
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()
            optimizer.step()
            if step % 4 == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                write_atomically(checkpoint, lambda file, state=state: torch.save(state, file))  # type: ignore[misc]


def start(body: Body, log: Path, prepare: Body = lambda: None) -> int:
    """Begin in a forked child; ``prepare`` changes the child before it begins."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code: Any = 1
    try:
        signal.alarm(600)  # a child that hangs does not hang the trials
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{log}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
        sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
        prepare()
        try:
            body()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:  # noqa: BLE001  # what a terminal would show
            traceback.print_exc()
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except BaseException as error:  # noqa: BLE001
        os.write(2, f"Traceback at the end: {error!r}".encode())
    finally:
        # never back into what the parent does
        os._exit(code if isinstance(code, int) else 1)


def has_ended(child: int) -> bool:
    """Whether a child is done; its exit code stays to be read."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def end(child: int, log: Path) -> Ended:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    texts = []
    for name in ("out", "err"):
        path = Path(f"{log}.{name}")
        # a child that was killed at once has not begun to write
        texts.append(path.read_text(encoding="utf-8", errors="replace") if path.exists() else "")
        path.unlink(missing_ok=True)
    return Ended(code, *texts)


def run(body: Body, log: Path, prepare: Body = lambda: None) -> Ended:
    return end(start(body, log, prepare), log)


def fingerprint(name: str, folder: Path) -> dict[str, str]:
    """The files that stay, without times: of an undisturbed run always the same."""
    if name == "ks.watch":
        rows = [_plain_row(row) for row in WatchRecords.load(folder / "watch").results]
        # the file itself also says which tensors share memory
        weights = torch.load(folder / "model.pt", weights_only=True)["model"]
        tensors = b"".join(tensor.numpy().tobytes() for tensor in weights.values())
        return {"rows": _digest("\n".join(rows).encode()), "model": _digest(tensors)}
    found = {}
    for path in sorted(folder.rglob("*")):
        inside = str(path.relative_to(folder))
        if not path.is_file() or "history" in inside or path.name.startswith("."):
            continue
        # what advice says depends on measured times, what it was measured from does not
        if path.name == "advice.json" or (path.suffix in (".html", ".csv") and name in ("measure", "advise")):
            found[inside] = "with times"
        elif path.suffix == ".json":
            found[inside] = _digest(json.dumps(_timeless(json.loads(path.read_bytes()))).encode())
        else:
            found[inside] = _digest(path.read_bytes())
    return found


def _plain_row(row: Any) -> str:
    return str((row.layer, row.step, row.approximation, row.cosine, row.stderr, row.relative_error))


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _timeless(item) for name, item in value.items() if name not in ("seconds", "milliseconds")}
    return [_timeless(item) for item in value] if isinstance(value, list) else value


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Trials:
    """Runs and counts trials in one place."""

    def __init__(self, place: Path) -> None:
        self.place, self.random = place, random.Random(0)
        (place / "mine.py").write_text(MODULE)
        os.chdir(place)
        sys.path.insert(0, str(place))
        self.expected: dict[str, dict[str, str]] = {}
        self.seconds: dict[str, float] = {}
        self.examples: list[str] = []

    def warm_up(self) -> None:
        """Import what commands import, once, so that children need not."""
        for name in ("paper", "measure", "advise"):
            try:
                command(name, self.place / f"warm-{name}")()
            except SystemExit as end:
                if end.code:
                    raise

    def undisturbed(self, name: str) -> dict[str, str]:
        """What a command leaves, and how long it takes."""
        if name not in self.expected:
            if name == "report" and not (self.place / "source").exists():
                assert run(command("measure", self.place / "source"), self.place / "log").code == 0
            folder, began = self.place / f"undisturbed-{name}", time.monotonic()
            folder.mkdir(exist_ok=name in ("report", "ks.watch"))
            if name not in ("report", "ks.watch"):
                folder.rmdir()
            ended = run(command(name, folder), self.place / "log")
            assert ended.code == 0, ended.err
            self.seconds[name] = time.monotonic() - began
            self.expected[name] = fingerprint(name, folder)
        return self.expected[name]

    def fresh(self, name: str, root: Path | None = None) -> Path:
        """A folder that no trial has used."""
        folder = (root or self.place) / "trial"
        shutil.rmtree(folder, ignore_errors=True)
        if name in ("report", "ks.watch"):
            folder.mkdir(parents=True)
        return folder

    def ends_alike(self, name: str, folder: Path) -> bool:
        """Give the command once more, undisturbed, and compare; a finished one may say that it is finished."""
        ended = run(command(name, folder), self.place / "log")
        finished = ended.code == 2 and "finished" in ended.err
        alike = (ended.code == 0 or finished) and fingerprint(name, folder) == self.expected[name]
        if not alike:
            self.examples.append(f"{name} again: {ended.code} {ended.err[-300:]}")
        return alike

    def note(self, what: str, ended: Ended) -> bool:
        """Whether it ended in words; what did not is kept for the record."""
        if not ended.in_words:
            self.examples.append(f"{what}: {ended.code} {ended.err[-500:]}")
        return ended.in_words


# ---------------------------------------------------------------------- kills


def kills(trials: Trials, wanted: dict[str, int]) -> dict[str, Any]:
    """SIGKILL at random moments; after every few kills the command may end."""
    found = {}
    for name, count in wanted.items():
        trials.undisturbed(name)
        hits = rounds = alike = 0
        while hits < count:
            folder = trials.fresh(name)
            rounds += 1
            for _ in range(3):
                child = start(command(name, folder), trials.place / "log")
                until = time.monotonic() + trials.random.uniform(0, trials.seconds[name])
                while time.monotonic() < until and not has_ended(child):
                    time.sleep(min(0.01, trials.seconds[name] / 1000))
                os.kill(child, signal.SIGKILL)
                hits += end(child, trials.place / "log").code == -signal.SIGKILL
            alike += trials.ends_alike(name, folder)
        found[name] = {"kills": hits, "runs": rounds, "ended with the undisturbed results": alike}
        print(name, found[name], flush=True)
    return found


# ---------------------------------------------------------------------- full disks


@contextmanager
def small_disk(place: Path, kibibytes: int) -> Iterator[Path]:
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def disks(trials: Trials, wanted: dict[str, int]) -> dict[str, Any]:
    """A file system that is full after so many bytes; then room is made."""
    found: dict[str, Any] = {}
    for name, count in wanted.items():
        trials.undisturbed(name)
        folder = trials.place / f"undisturbed-{name}"
        needed = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) // 1024 + 100
        counts = {
            "trials": 0,
            "full": 0,
            "in words": 0,
            "ended alike after room was made": 0,
            "float16, and said so": 0,
        }
        for number in range(count):
            free = max(4, needed * (number + 1) // count)
            with small_disk(trials.place / "disk", 4 * needed + 4096) as disk:
                ballast = disk / "ballast"
                with ballast.open("wb") as file:
                    file.write(bytes((4 * needed + 4096 - free) * 1024))
                target = trials.fresh(name, disk)
                first = run(command(name, target), trials.place / "log")
                ballast.unlink()
                counts["trials"] += 1
                counts["full"] += first.code != 0
                counts["in words"] += trials.note(f"{name} on a disk of {free} KiB", first)
                alike = trials.ends_alike(name, target)
                said = "float16" in first.err and not alike
                counts["ended alike after room was made"] += alike
                counts["float16, and said so"] += said
        found[name] = counts
        print(name, counts, flush=True)
    with small_disk(trials.place / "disk", 4096) as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        ended = [run(command(name, disk / "x"), trials.place / "log") for name in ("paper", "measure", "advise")]
        found["read-only"] = {
            "trials": len(ended),
            "in words": sum(trials.note("read-only", one) for one in ended),
            "exit code 2": sum(one.code == 2 for one in ended),
        }
    return found


# ---------------------------------------------------------------------- every operation


def failing(after: int, counter: Path) -> Body:
    """Let every operation that writes fail after so many, as on a disk that is full."""

    def prepare() -> None:
        done = [0]

        def guard(original: Callable[..., Any], writes: Callable[..., bool]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                if writes(*args) and os.getpid() == own:
                    done[0] += 1
                    if after < 0:
                        counter.write_text(str(done[0]))
                    elif done[0] > after:
                        named = [os.fspath(item) for item in args[:1] if isinstance(item, (str, os.PathLike))]
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *named)
                return original(*args, **options)

            return call

        own = os.getpid()
        always: Callable[..., bool] = lambda *_: True  # noqa: E731
        not_a_terminal: Callable[..., bool] = lambda handle, *_: handle > 2  # noqa: E731
        flags: Callable[..., bool] = lambda path, flag, *_: bool(flag & (os.O_WRONLY | os.O_RDWR))  # noqa: E731
        for name in ("replace", "mkdir", "truncate"):
            setattr(os, name, guard(getattr(os, name), always))
        for name in ("write", "fsync"):
            setattr(os, name, guard(getattr(os, name), not_a_terminal))
        os.open = guard(os.open, flags)

    return prepare


def operations(trials: Trials, wanted: dict[str, int]) -> dict[str, Any]:
    """No space left from the k-th operation on that opens, writes, syncs, renames, cuts or makes a folder."""
    found = {}
    for name, count in wanted.items():
        trials.undisturbed(name)
        counter = trials.place / "operations"
        folder = trials.fresh(name)
        run(command(name, folder), trials.place / "log", failing(-1, counter))
        total = int(counter.read_text())
        counts = {"operations": total, "trials": 0, "in words": 0, "ended alike after room was made": 0}
        for after in sorted({total * number // count for number in range(count)}):
            folder = trials.fresh(name)
            first = run(command(name, folder), trials.place / "log", failing(after, counter))
            counts["trials"] += 1
            counts["in words"] += trials.note(f"{name} after {after} of {total} operations", first)
            counts["ended alike after room was made"] += trials.ends_alike(name, folder)
        found[name] = counts
        print(name, counts, flush=True)
    return found


# ---------------------------------------------------------------------- damage


def _flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 8]) + content[at + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut in half": lambda content: content[: len(content) // 2],
    "cut by a byte": lambda content: content[:-1],
    "a byte flipped": lambda content: _flipped(content, len(content) // 3),
    "null": lambda content: b"null\n",
    "a list": lambda content: b"[1, 2]\n",
    "not text": lambda content: b"\xff\xfe\x00" + content,
    "nested deeply": lambda content: b"[" * 100_000,
}  # fmt: skip


def damage(trials: Trials, wanted: int) -> dict[str, Any]:
    """Files of a run that was stopped, damaged: going on, and the report of it."""
    trials.undisturbed("paper")
    stopped = trials.place / "stopped"
    while not list((stopped / "stored").glob("gauss_newton-0-2*")) or (stopped / "stored" / "adagrad.json").exists():
        shutil.rmtree(stopped, ignore_errors=True)
        child = start(command("paper", stopped), trials.place / "log")
        until = time.monotonic() + 3 * trials.seconds["paper"]
        while not list((stopped / "stored").glob("gauss_newton-0-2*")) and time.monotonic() < until:
            time.sleep(0.001)
        os.kill(child, signal.SIGKILL)
        end(child, trials.place / "log")
    files = sorted(path for path in stopped.rglob("*") if path.is_file() and path.name not in (".lock", "seen"))
    counts = {"files": len(files), "trials": 0, "gone on with and ended alike": 0, "refused in one line": 0, "else": 0}
    reports = {"trials": 0, "in words": 0}
    every = [(file, how) for file in files for how in DAMAGES]
    for file, how in trials.random.sample(every, min(wanted, len(every))):
        folder = trials.fresh("paper")
        shutil.copytree(stopped, folder)
        path = folder / file.relative_to(stopped)
        path.write_bytes(DAMAGES[how](path.read_bytes() or b"xyz"))
        shown = run(_report_of(folder), trials.place / "log")
        reports["trials"] += 1
        reports["in words"] += trials.note(f"report: {path.name}, {how}", shown)
        ended = run(command("paper", folder), trials.place / "log")
        alike = ended.code == 0 and _without(fingerprint("paper", folder)) == _without(trials.expected["paper"])
        counts["trials"] += 1
        if alike and ended.in_words:
            counts["gone on with and ended alike"] += 1
        elif ended.code == 2 and ended.in_words:
            counts["refused in one line"] += 1
        else:
            counts["else"] += 1
            trials.examples.append(f"{path.relative_to(folder)}, {how}: {ended.code} {ended.err[-300:]}")
    print(counts, reports, flush=True)
    return {"going on": counts, "report": reports}


def _without(found: dict[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in found.items() if not name.startswith("page.html")}


def _report_of(folder: Path) -> Body:
    def body() -> None:
        sys.argv = ["kronscope", "report", str(folder), f"--out={folder.parent / 'page.html'}"]
        cli.main()

    return body


# ---------------------------------------------------------------------- paths and terminals


def paths(trials: Trials) -> dict[str, Any]:
    """Odd names of folders: taken, or refused in one line."""
    (trials.place / "real").mkdir(exist_ok=True)
    (trials.place / "link").symlink_to(trials.place / "real")
    (trials.place / "file").write_text("x")
    odd = ["a b", "größe·模型", "a[/b]c", "[red]x", "-dash", "new\nline", "x" * 300, "/".join(["y" * 200] * 30)]
    odd += ["link/sub", "file", "file/sub", "\u202etxt", "\x1b[2J", "~", "$HOME", "a'b\"c", "/proc/self/x", "/dev/null"]
    counts = {"trials": 0, "taken": 0, "refused in one line": 0, "else": 0}
    for name in ("paper", "measure", "advise"):
        for place in odd:
            ended = run(command(name, trials.place / f"odd-{name}" / place), trials.place / "log")
            if place in ("link/sub", "file", "file/sub") or place.startswith("/"):
                ended = run(command(name, trials.place / place), trials.place / "log")
            counts["trials"] += 1
            if ended.code == 0 and "Traceback" not in ended.err:
                counts["taken"] += 1
            elif ended.code == 2 and ended.in_words:
                counts["refused in one line"] += 1
            else:
                counts["else"] += 1
                trials.examples.append(f"{name} {place[:40]!r}: {ended.code} {ended.err[-300:]}")
            shutil.rmtree(trials.place / "real" / "sub", ignore_errors=True)
    print(counts, flush=True)
    return counts


def terminals(trials: Trials) -> dict[str, Any]:
    """Standard output that is closed, full, or knows no letters; a narrow terminal; no home."""
    for name in ("paper", "measure", "advise", "report"):
        trials.undisturbed(name)

    def full() -> None:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115

    def closed() -> None:
        sys.stdout = None  # as python has it when the descriptor is closed

    def broken() -> None:
        reading, writing = os.pipe()
        os.close(reading)
        os.dup2(writing, 1)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)

    def bare() -> None:
        os.environ |= {"LANG": "C", "LC_ALL": "C", "TERM": "dumb", "COLUMNS": "40"}
        os.environ.pop("HOME", None)
        sys.stdout, sys.stderr = (open(number, "w", encoding="ascii", closefd=False) for number in (1, 2))  # noqa: SIM115

    counts = {"trials": 0, "in words": 0, "whole results": 0}
    for prepare in (full, closed, broken, bare):
        for name in ("paper", "measure", "advise", "report"):
            folder = trials.fresh(name)
            ended = run(command(name, folder), trials.place / "log", prepare)
            counts["trials"] += 1
            counts["in words"] += trials.note(f"{name}, {prepare.__name__}", ended)
            counts["whole results"] += trials.ends_alike(name, folder)
    print(counts, flush=True)
    return counts


def main() -> None:
    """Run all parts, or those that are asked for, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ("kills", "disks", "operations", "damage", "paths", "terminals")
    parser.add_argument("--parts", nargs="+", choices=known, default=known)
    parser.add_argument("--scale", type=float, default=1.0, help="how many trials, relative to the record")
    parser.add_argument("--commands", nargs="+", help="of kills, disks and operations; the record keeps others")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/records/survival.json"))
    asked = parser.parse_args()
    out = asked.out.resolve()
    torch.set_num_threads(1)  # forking is safe only in a process without other threads

    def scaled(**counts: int) -> dict[str, int]:
        named = {name.replace("_", "."): max(2, round(asked.scale * count)) for name, count in counts.items()}
        return {name: count for name, count in named.items() if not asked.commands or name in asked.commands}

    record = json.loads(out.read_text()) if out.exists() else {}
    with tempfile.TemporaryDirectory() as place:
        trials = Trials(Path(place))
        trials.warm_up()
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "kills": lambda: kills(trials, scaled(paper=18, measure=9, advise=9, report=6, ks_watch=9, demo=6)),
            "disks": lambda: disks(trials, scaled(paper=24, measure=12, advise=12, report=6)),
            "operations": lambda: operations(trials, scaled(paper=60, measure=30, advise=30, report=10)),
            "damage": lambda: damage(trials, round(asked.scale * 120)),
            "paths": lambda: paths(trials),
            "terminals": lambda: terminals(trials),
        }
        record |= {"python": platform.python_version(), "torch": str(torch.__version__), "system": platform.system()}
        for name in asked.parts:
            before = len(trials.examples)
            if name == "disks" and (platform.system() != "Linux" or os.geteuid() != 0):
                record[name] = "left out: mounting takes root on Linux"
                continue
            kept = record if asked.commands else {}
            record[name] = {**kept.get(name, {}), **parts[name]()}
            wrong = [text.replace(place, "…") for text in trials.examples[before:]]
            record.setdefault("what was wrong", {})[name] = [*kept.get("what was wrong", {}).get(name, []), *wrong]
            os.chdir("/")
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            os.chdir(place)
        os.chdir("/")


if __name__ == "__main__":
    main()
