"""
Use it in Transformers' Trainer
===============================

Train a tiny language model with Shampoo in Transformers' Trainer, stop half-way, and go on from the checkpoint.

Run it::

    python examples/trainer.py

Needs transformers and accelerate; nothing is downloaded. Prints the plan, the losses, and whether
the two runs are equal.
"""

from __future__ import annotations

import logging
import tempfile

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import kronscope as ks


def made(folder: str) -> Trainer:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, max_position_embeddings=16, **sizes))
    # counting upwards from a random start
    rows = (torch.randint(0, 32, (320, 1)) + torch.arange(16)) % 32
    args = TrainingArguments(
        folder,
        learning_rate=3e-3,
        weight_decay=0.01,
        per_device_train_batch_size=16,
        max_steps=20,
        save_steps=10,
        logging_steps=5,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        args,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        optimizer_cls_and_kwargs=ks.integrations.transformers.optimizer(ks.Shampoo, args),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    ks.integrations.transformers.log_metrics(trainer)
    return trainer


def main() -> None:
    transformers.utils.logging.set_verbosity(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        whole = made(folder)
        whole.train()
        print(ks.integrations.unwrap(whole.optimizer).explain())
        for record in whole.state.log_history:
            if "loss" in record:
                print(f"step {record['step']}: loss {record['loss']:.4f}")
        resumed = made(folder)
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-10")
        pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
        same = all(torch.equal(ours, theirs) for ours, theirs in pairs)
        print(f"resumed from step 10, the weights are {'the same to the bit' if same else 'different'}")


if __name__ == "__main__":
    main()
