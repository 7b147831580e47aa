"""The names others rely on exist and behave as promised, and importing them stays light."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import pytest
import torch

import kronscope as ks

APPROXIMATIONS = (
    *("optimal", "shampoo2", "shampoo", "kfac-reduce", "kfac-expand", "ekfac", "soap", "tnt", "caspr", "kl"),
    *("one-sided", "diagonal", "identity"),
)


def test_every_name_of_the_contract_exists() -> None:
    names = (
        "GradientStream",
        "SecondMoment",
        "approx",
        "cosine",
        "measure",
        "Results",
        "GradientHistory",
        "measure_history",
    )
    for name in names:
        assert name in ks.__all__
        assert hasattr(ks, name)
    for name in ks.__all__:
        assert getattr(ks, name) is not None
    assert set(APPROXIMATIONS) <= set(ks.approx.names())
    for name in ("shape", "trace", "norm", "matvec", "left", "right", "inner", "to_dense"):
        assert hasattr(ks.SecondMoment, name)
    for name in ("to_pandas", "save", "load", "plot", "report"):
        assert hasattr(ks.Results, name)
    assert issubclass(ks.errors.KronscopeError, Exception)


def test_signatures_are_those_of_the_contract() -> None:
    parameters = inspect.signature(ks.measure).parameters
    promised = {
        "layers": None,
        "truth": "gauss_newton",
        "labels": None,
        "batch_size": 1,
        "approximations": ("optimal", "shampoo2", "shampoo", "kfac-reduce"),
        "max_samples": None,
        "seed": 0,
        "step": 0,
        "progress": True,
        "forward": None,
        "draws": 1,
        "population": False,
        "estimator": "exact",
        "memory_budget": None,
    }
    assert list(parameters)[:3] == ["model", "loss", "data"]
    assert list(parameters)[3:17] == list(promised)
    assert {name: parameters[name].default for name in promised} == promised
    history = inspect.signature(ks.measure_history).parameters
    assert list(history)[:3] == ["history", "approximations", "at"]
    assert history["approximations"].default == ("optimal", "shampoo2", "shampoo")
    attach = inspect.signature(ks.GradientHistory.attach).parameters
    assert list(attach)[:4] == ["optimizer", "model", "layers", "path"]


@pytest.mark.parametrize("name", APPROXIMATIONS)
@pytest.mark.parametrize("factored", [False, True])
def test_operators_have_the_promised_methods(name: str, factored: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    B, A = (torch.randn(30, 2, size, generator=generator, dtype=torch.float64) for size in (3, 4))
    G = B.mT @ A
    stream = ks.GradientStream.from_factors(B, A) if factored else ks.GradientStream.from_tensors(G)
    if not factored and "kfac" in name:
        with pytest.raises(ks.errors.NotFactoredError):
            ks.approx.get(name).fit(stream)
        return
    H, K = ks.SecondMoment(stream), ks.approx.get(name).fit(stream)
    dense, matrix = H.to_dense(), K.to_dense()
    assert H.shape == K.shape == (3, 4)
    assert dense.shape == matrix.shape == (12, 12)
    V = torch.randn(5, 2, 3, 4, generator=generator, dtype=torch.float64)
    assert torch.allclose(K.apply(V).flatten(2), V.flatten(2) @ matrix, atol=1e-10)
    assert torch.allclose(H.matvec(V).flatten(2), V.flatten(2) @ dense, atol=1e-10)
    for value, expected in (
        (H.norm(), dense.norm()),
        (H.trace(), dense.trace()),
        (K.norm(), matrix.norm()),
        (K.trace(), matrix.trace()),
        (H.inner(K), (dense * matrix).sum()),
    ):
        assert isinstance(value, float)
        assert value == pytest.approx(float(expected), rel=1e-9)
    found = ks.cosine(H, K)
    assert isinstance(found, float)
    assert found == pytest.approx(float((dense * matrix).sum() / dense.norm() / matrix.norm()), abs=1e-10)


def test_fits_are_on_the_promised_scale() -> None:
    G = torch.randn(20, 3, 4, dtype=torch.float64)
    stream = ks.GradientStream.from_tensors(G)
    L, R = torch.einsum("imn,ikn->mk", G, G) / 20, torch.einsum("imn,imk->nk", G, G) / 20
    dense = {name: ks.approx.get(name).fit(stream).to_dense() for name in ("shampoo2", "tnt", "shampoo", "one-sided")}
    assert torch.allclose(dense["shampoo2"], torch.kron(L, R) / L.trace(), atol=1e-12)
    assert torch.allclose(dense["tnt"], dense["shampoo2"], atol=1e-12)
    roots = [torch.linalg.eigh(factor) for factor in (L, R)]
    half = torch.kron(*((vectors * values.sqrt()) @ vectors.T for values, vectors in roots))
    assert torch.allclose(dense["shampoo"], half, atol=1e-12)
    assert torch.allclose(dense["one-sided"], torch.kron(L, torch.eye(4).double()) / 4, atol=1e-12)
    tall = ks.GradientStream.from_tensors(G.mT.contiguous())
    assert torch.allclose(
        ks.approx.get("one-sided").fit(tall).to_dense(), torch.kron(torch.eye(4).double(), L) / 4, atol=1e-12
    )


_IMPORT = """
import json, os, sys, time
start = time.process_time()
import torch
torch_seconds = time.process_time() - start
before = set(sys.modules)

def timed():
    start = time.process_time()
    import kronscope
    return time.process_time() - start

# beside torch itself. Processor time: on a busy machine it is longer too, and so is torch's own
# (about a quarter of which it takes)
allowed = max(1.0, 0.4 * torch_seconds)
# a process that has imported torch and nothing else can be had again by forking it: the best of four counts
took = []
while hasattr(os, "fork") and len(took) < 3 and min(took, default=allowed) >= allowed:
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, json.dumps(timed()).encode())
        os._exit(0)
    os.wait()
    took.append(json.loads(os.read(reading, 100)))
took.append(timed())
import kronscope
import kronscope.figures, kronscope.report, kronscope.advising, kronscope.watching
kronscope.integrations.unwrap
heavy = (
    "matplotlib", "transformers", "sklearn", "pandas", "PIL", "scipy", "typer", "torchvision", "torch._dynamo",
    "rich", "lightning", "timm", "wandb", "accelerate", "peft",
)
found = [name for name in heavy if name in set(sys.modules) - before]
print(json.dumps({"seconds": min(took), "allowed": allowed, "heavy": found}))
"""


def test_importing_is_light_and_takes_no_package_that_may_be_missing() -> None:
    shown = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True)
    found = json.loads(shown.stdout)
    assert found["heavy"] == []
    assert found["seconds"] < found["allowed"], found
