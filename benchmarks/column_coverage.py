"""How often two standard errors cover the exact cosine where the truth is estimated from some columns.

Small classifiers of one or several tokens, over the number of classes, the confidence of the model, and whether one
sample or many carry the curvature. Each repetition draws other random columns for the same samples. Exact values come
from the exact columns, or where these are very many (and then without K-FAC) from the matrix itself, by Jacobians.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacfwd

import kronscope as ks
from kronscope import GradientStream, approx
from kronscope.gradients import Recorder, resolve_layers
from kronscope.gradients.atoms import FactoredAtoms
from kronscope.measures.columns import TruthColumns
from kronscope.measures.estimates import RandomColumns
from kronscope.measures.options import MeasureOptions

RECORD = Path(__file__).parent / "records" / "column_coverage.json"
NAMES = ("optimal", "shampoo2", "shampoo", "kfac-reduce")
LAYER = "inner.weight"
# Exact columns of a sample above which the matrix itself is computed.
MANY = 5000


class Classifier(nn.Module):
    """Classifies each token from itself and the mean of all."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(5, 8), nn.Linear(8, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits, classes second; the last input says how sharp a sample's are."""
        features, sharpness = inputs[..., :5], inputs[:, :1, 5:]
        hidden = torch.tanh(self.inner(features))
        outputs: Tensor = (self.head(hidden + hidden.mean(1, keepdim=True)) * sharpness).transpose(1, 2)
        return outputs


def problem(
    tokens: int, confidence: float, classes: int, few: bool, samples: int = 12
) -> tuple[Recorder, nn.Module, Tensor]:
    """A model whose mean largest probability is ``confidence``; with ``few``, all samples but one are much surer."""
    torch.manual_seed(0)
    model = Classifier(classes).double()
    inputs = torch.randn(samples, tokens, 6, dtype=torch.float64)
    targets = torch.randint(classes, (samples, tokens))

    def at(sharpness: float) -> Tensor:
        given = inputs.clone()
        given[..., 5] = sharpness
        if few:
            given[1:, :, 5] *= 3
        return given

    low, high = 0.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        with torch.no_grad():
            reached = float(model(at(middle)).softmax(1).amax(1).mean())
        low, high = (middle, high) if reached < confidence else (low, middle)
    given = at(low)
    return Recorder(model, nn.CrossEntropyLoss(), [(given, targets)], resolve_layers(model, [LAYER])), model, given


def exact_stream(recorder: Recorder, model: nn.Module, inputs: Tensor) -> GradientStream:
    """Gradients that have the exact matrix, up to its scale."""
    if recorder.exact_columns <= MANY:
        return recorder.streams("exact")[LAYER]
    weight = model.get_parameter(LAYER).detach()

    def outputs(weight: Tensor, inputs: Tensor) -> Tensor:
        found: Tensor = functional_call(model, {LAYER: weight}, (inputs,))
        return found

    matrix = torch.zeros(weight.numel(), weight.numel(), dtype=torch.float64)
    for sample in inputs.split(1):
        slopes = jacfwd(outputs)(weight, sample)[0].flatten(2)  # (classes, tokens, weights)
        chances = outputs(weight, sample)[0].detach().softmax(0)
        scaled = (slopes * chances.sqrt().unsqueeze(2)).flatten(0, 1)
        means = (slopes * chances.unsqueeze(2)).sum(0)
        matrix += scaled.T @ scaled - means.T @ means
    # optimal, shampoo2 and shampoo depend on the matrix alone, and any gradients that have it will do
    values, vectors = torch.linalg.eigh(matrix)
    grads = vectors.T * values.clamp_min(0).sqrt().unsqueeze(1)
    return GradientStream.from_tensors(grads.view(-1, *weight.shape))


def cell(recorder: Recorder, model: nn.Module, inputs: Tensor, repetitions: int) -> list[dict[str, Any]]:
    """Estimate again and again, and compare with the exact values."""
    options = MeasureOptions([ks.Fit()], max_columns=1 if recorder.exact_columns > 16 else None)
    columns = TruthColumns(options, recorder, 100).of(16)
    exact = exact_stream(recorder, model, inputs)
    moment = ks.SecondMoment(exact)
    names = NAMES if isinstance(next(iter(exact)), FactoredAtoms) else NAMES[:3]
    rows: list[dict[str, Any]] = [
        {"approximation": name, "exact": ks.cosine(moment, approx.get(name).fit(exact))} for name in names
    ]
    if not columns.mixed:
        return [{**row, "columns": "exact"} for row in rows]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for seed in range(repetitions):
        stream = recorder.streams("mixed", draws=columns.draws, fixed=columns.fixed, seed=seed)[LAYER]
        estimator = RandomColumns(stream)
        for name in names:
            estimate = estimator.cosine(approx.get(name))
            found[name].append((estimate.value, estimate.stderr))
    for row in rows:
        pairs = [pair for pair in found[row["approximation"]] if not math.isnan(pair[0])]
        errors = torch.tensor([value - row["exact"] for value, _ in pairs], dtype=torch.float64)
        bars = torch.tensor([stderr for _, stderr in pairs], dtype=torch.float64)
        row |= {
            "columns": f"{columns.fixed} exact, {columns.draws} random",
            "answers": len(pairs),
            "bias": float(errors.mean()),
            "spread": float(errors.std()),
            "stderr": float(bars.median()),
            "covered": float((errors.abs() <= 2 * bars + 1e-9).double().mean()),
            "smallest": min(value for value, _ in pairs),
            "largest": max(value for value, _ in pairs),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=100)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 5, 64])
    parser.add_argument("--classes", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--confidence", type=float, nargs="+", default=[0.1, 0.5, 0.9, 0.99, 0.999])
    parser.add_argument("--record", type=Path, default=RECORD)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cells = []
    for tokens, classes, confidence, few in itertools.product(
        args.tokens, args.classes, args.confidence, (False, True)
    ):
        if confidence <= 1 / classes:
            continue
        where = {"tokens": tokens, "classes": classes, "confidence": confidence, "few samples carry it": few}
        for row in cell(*problem(tokens, confidence, classes, few), args.repetitions):
            cells.append({**where, **row})
            print(json.dumps(cells[-1]), flush=True)
    content = {
        "command": "python benchmarks/column_coverage.py",
        "repetitions": args.repetitions,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cells": cells,
    }
    args.record.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
