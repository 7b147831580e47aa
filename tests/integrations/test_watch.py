"""The watch callbacks in the real trainers: training is unchanged, and a killed run goes on in the same folder."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

import kronscope as ks
from kronscope.integrations.loggers import CSV, TensorBoard, WandB
from kronscope.watching import WatchRecords
from tests.integrations.launch import QUIET, ROOT
from tests.integrations.tiny import assert_same, needed, points, weights

# transformers, lightning and torch warn of each other's deprecations
pytestmark = pytest.mark.filterwarnings("ignore")


def steps(path: Path) -> list[int]:
    return [record["step"] for record in WatchRecords.load(path).records]


def killed(script: str, *arguments: str) -> None:
    """Run a script that kills itself."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *arguments],
        env={**os.environ, **QUIET, "PYTHONPATH": paths},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]


TRAINER = """
import os, signal, sys
import kronscope as ks
from transformers import TrainerCallback
from tests.integrations import trainer_runs

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

running = trainer_runs.trainer(sys.argv[1] + "/out", "kl")
running.add_callback(ks.integrations.transformers.WatchCallback(every=1, path=sys.argv[1] + "/watch"))
running.add_callback(Kill())
running.train()
"""


def test_trainer_killed_and_resumed_has_continuous_records(trainer_runs: ModuleType, tmp_path: Path) -> None:
    killed(TRAINER, str(tmp_path))
    assert steps(tmp_path / "watch") == [1, 2, 3, 4, 5]
    running = trainer_runs.trainer(str(tmp_path / "out"), "kl")
    callback = ks.integrations.transformers.WatchCallback(every=1, path=tmp_path / "watch")
    running.add_callback(callback)
    running.train(resume_from_checkpoint=True)
    assert steps(tmp_path / "watch") == list(range(1, trainer_runs.STEPS + 1))
    assert callback.watch.records[-1]["run"]["loss"] > 0
    # the checkpoint of step 3 counts: what was recorded from there on is of the resumed run
    assert_same(weights(running.model), trainer_runs.train(str(tmp_path / "plain"), "kl"))


def test_trainer_with_adamw_and_cosines(trainer_runs: ModuleType, tmp_path: Path) -> None:
    from transformers import Trainer

    from tests.integrations.tiny import Sentences, language_model

    sentences = Sentences(2).tokens
    data = [({"input_ids": sentences}, sentences)]

    def forward(model: nn.Module, inputs: Any) -> torch.Tensor:
        logits: torch.Tensor = model(**inputs).logits
        return logits.transpose(1, 2)

    callback = ks.integrations.transformers.WatchCallback(
        every=2,
        loss=nn.CrossEntropyLoss(),
        data=data,
        forward=forward,
        log=CSV(tmp_path / "watch.csv"),
        budget=math.inf,
    )
    found = []
    for callbacks in ([callback], []):
        running = Trainer(
            language_model(),
            trainer_runs.arguments(str(tmp_path / "out"), optim="adamw_torch"),
            train_dataset=Sentences(),
            callbacks=callbacks,
        )
        running.train()
        found.append(weights(running.model))
    assert_same(found[0], found[1])
    live = [row for row in callback.watch.results if row.approximation == "live"]
    assert len(live) > 10
    assert all(0 < row.cosine <= 1 for row in live)
    table = pd.read_csv(tmp_path / "watch.csv", float_precision="round_trip")
    assert sorted(set(table["step"])) == [2, 4, 6]
    assert any(name.startswith("kronscope/cosine_live/") for name in table["name"])


LIGHTNING = """
import os, signal, sys
import kronscope as ks
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from tests.integrations import lightning_runs

class Kill(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

out = sys.argv[1] + "/out"
saving = ModelCheckpoint(out, every_n_epochs=lightning_runs.SAVED, save_top_k=-1, filename="{step}")
watching = ks.integrations.lightning.WatchCallback(every=1, path=sys.argv[1] + "/watch")
lightning_runs.train(out, "kl", callbacks=[saving, watching, Kill()])
"""


def test_lightning_killed_and_resumed_has_continuous_records(lightning_runs: ModuleType, tmp_path: Path) -> None:
    import lightning

    killed(LIGHTNING, str(tmp_path))
    assert steps(tmp_path / "watch") == [1, 2, 3, 4, 5]
    callback = ks.integrations.lightning.WatchCallback(every=1, path=tmp_path / "watch")
    saved = tmp_path / "out" / f"step={lightning_runs.SAVED}.ckpt"
    logger = lightning.pytorch.loggers.CSVLogger(str(tmp_path / "csv"))
    resumed = lightning_runs.train(
        str(tmp_path / "again"), "kl", resume=str(saved), callbacks=[callback], logger=logger
    )
    assert steps(tmp_path / "watch") == list(range(1, lightning_runs.STEPS + 1))
    assert_same(resumed, lightning_runs.train(str(tmp_path / "plain"), "kl"))
    (table,) = (tmp_path / "csv").rglob("metrics.csv")
    assert "kronscope/update_ratio/network.0.weight" in pd.read_csv(table).columns


@pytest.mark.parametrize("kind", ["csv", "tensorboard", "wandb"])
def test_loggers_take_what_watching_logs(kind: str, tmp_path: Path) -> None:
    log: Any
    if kind == "csv":
        log = CSV(tmp_path / "watch.csv")
    elif kind == "tensorboard":
        needed("tensorboard")
        log = TensorBoard(tmp_path)
    else:
        wandb = needed("wandb")
        settings = wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True)
        run = wandb.init(mode="offline", dir=str(tmp_path), project="kronscope", settings=settings)
        log = WandB()
    model = nn.Linear(6, 4).double()
    optimizer = ks.Shampoo(model.named_parameters(), lr=1e-2, method="kronecker")
    inputs, targets = points(16).tensors
    with ks.watch(optimizer, model, every=2, log=log) as watch:
        for _ in range(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    wanted = watch.records[-1]["layers"]["update_ratio"][0]
    name = "kronscope/update_ratio/weight"
    if kind == "csv":
        table = pd.read_csv(tmp_path / "watch.csv", float_precision="round_trip").pivot(
            index="step", columns="name", values="value"
        )
        assert table.loc[4, name] == wanted
    elif kind == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        log.writer.close()
        assert EventAccumulator(str(tmp_path)).Reload().Scalars(name)[-1].value == pytest.approx(wanted)
    else:
        seen = dict(run.summary)
        run.finish()
        assert seen[name] == wanted
        assert list(tmp_path.rglob("*.wandb")), json.dumps([str(path) for path in tmp_path.rglob("*")])
