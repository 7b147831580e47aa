"""What people switch on in Lightning, tried with our optimizers."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import kronscope as ks
from tests.integrations.tiny import FAMILIES, assert_same, weights

# lightning and torch warn of each other's deprecations
pytestmark = pytest.mark.filterwarnings("ignore")


def fit(runs: ModuleType, module: Any, folder: Path, **options: Any) -> Any:
    trainer = runs.trainer(str(folder), **{"enable_checkpointing": False, "callbacks": [], **options})
    trainer.fit(module, runs.loader(1))
    return trainer


@pytest.mark.parametrize("family", FAMILIES)
def test_accumulated_gradients_make_half_the_steps(lightning_runs: ModuleType, tmp_path: Path, family: str) -> None:
    """With one batch over and over, the mean of two of its gradients is the gradient."""
    module, plain = lightning_runs.Classifier(family), lightning_runs.Classifier(family)
    options = {"gradient_clip_val": None, "max_steps": 3}
    trainer = fit(lightning_runs, module, tmp_path, **options)
    both: Any = [*lightning_runs.loader(1)] * 2
    # the last batch of an epoch makes a step by itself, so an epoch needs two
    twice = lightning_runs.trainer(
        str(tmp_path), enable_checkpointing=False, callbacks=[], accumulate_grad_batches=2, **options
    )
    twice.fit(plain, DataLoader(both, batch_size=None))
    assert trainer.global_step == twice.global_step == 3
    assert_same(weights(plain), weights(module), 1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_mixed_trains(lightning_runs: ModuleType, tmp_path: Path, family: str) -> None:
    module = lightning_runs.Classifier(family).float()
    data: Any = [(inputs.float(), targets) for inputs, targets in lightning_runs.loader(1)]
    trainer = lightning_runs.trainer(
        str(tmp_path), enable_checkpointing=False, callbacks=[], precision="bf16-mixed", max_steps=30
    )
    trainer.fit(module, DataLoader(data, batch_size=None))
    first = torch.nn.functional.cross_entropy(lightning_runs.Classifier(family).float().network(data[0][0]), data[0][1])
    assert trainer.callback_metrics["loss"] < first
    factors = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
    assert all(value.dtype != torch.bfloat16 for value in factors)


def test_averaged_weights_are_kept_beside(lightning_runs: ModuleType, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    module, plain = lightning_runs.Classifier("kl"), lightning_runs.Classifier("kl")
    fit(lightning_runs, plain, tmp_path)
    fit(lightning_runs, module, tmp_path, callbacks=[EMAWeightAveraging(decay=0.5)])
    ours, average = weights(plain), weights(module)  # Lightning puts the average into the module at the end
    assert any(bool((average[name] != value).any()) for name, value in ours.items())


def test_layers_thaw_with_groups_of_their_own(lightning_runs: ModuleType, tmp_path: Path) -> None:
    """BaseFinetuning adds bare tensors; `named_groups` gives them the names that the groups before have."""
    from lightning.pytorch.callbacks import BaseFinetuning

    class Thaw(BaseFinetuning):  # type: ignore[misc]
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.network[0])

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 2:
                self.make_trainable(pl_module.network[0])
                groups = [{"params": list(pl_module.network[0].parameters()), "lr": 1e-3}]
                for group in ks.integrations.named_groups(pl_module, groups):
                    optimizer.add_param_group(group)

    class Constant(lightning_runs.Classifier):  # type: ignore[misc, name-defined]
        def configure_optimizers(self) -> Any:
            return FAMILIES[self.family](ks.param_groups(self), lr=1e-2)

    module = Constant("soap")
    before = weights(module)
    trainer = fit(lightning_runs, module, tmp_path, callbacks=[Thaw()])
    after = weights(module)
    assert bool((after["network.0.weight"] != before["network.0.weight"]).any())
    plan = {row.name: row.method for row in trainer.optimizers[0].explain().rows}
    assert plan["network.0.weight"].startswith("SOAP")


def test_the_finetuning_callbacks_own_groups_are_taken(lightning_runs: ModuleType, tmp_path: Path) -> None:
    """Bare tensors beside named groups, which torch alone would refuse."""
    from lightning.pytorch.callbacks import BackboneFinetuning

    class WithBackbone(lightning_runs.Classifier):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__("kl")
            self.backbone = self.network[0]

        def configure_optimizers(self) -> Any:
            return ks.KLShampoo(ks.param_groups(self), lr=1e-2)

    module = WithBackbone()
    before = weights(module)
    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=2, backbone_initial_lr=1e-3, train_bn=False)
    trainer = fit(lightning_runs, module, tmp_path, callbacks=[finetuning])
    assert len(trainer.optimizers[0].explain().rows) == 6
    assert bool((weights(module)["network.0.weight"] != before["network.0.weight"]).any())


def test_manual_optimization_reaches_our_methods(lightning_runs: ModuleType, tmp_path: Path) -> None:
    seen = []

    class Manual(lightning_runs.Classifier):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__("shampoo")
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            inputs, targets = batch
            optimizer.zero_grad()
            self.manual_backward(torch.nn.functional.cross_entropy(self.network(inputs), targets))
            optimizer.step()
            seen.append(len(ks.integrations.unwrap(optimizer).diagnostics().rows))

    fit(lightning_runs, Manual(), tmp_path, gradient_clip_val=None)
    assert seen == [6] * 6
