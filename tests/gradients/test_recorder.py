"""The recorder: chunks, seeds, forms, plans, progress, and what it refuses."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kronscope.errors import DataError, LabelError, LayerError, ModelError, NonFiniteError, OptionError
from kronscope.gradients import capture
from kronscope.gradients.atoms import DenseAtoms, FactoredAtoms
from kronscope.gradients.capture import Recorder
from kronscope.gradients.matrices import resolve_layers
from kronscope.gradients.stream import GradientStream
from tests.gradients import zoo
from tests.gradients.naive import batches, close, matrices, plain_call, stream_matrices

CE = nn.CrossEntropyLoss()


def _dense(stream: GradientStream) -> Tensor:
    return torch.cat([chunk.dense().grads for chunk in stream])


def _mlp(samples: int = 6) -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    return model, zoo.images(samples, 5), torch.randint(0, 4, (samples,))


LOSSES: dict[str, Callable[[str], tuple[nn.Module, Callable[[Tensor], Tensor]]]] = {
    "cross-entropy": lambda r: (nn.CrossEntropyLoss(reduction=r), lambda out: out.argmax(1).roll(1)),
    "squared error": lambda r: (nn.MSELoss(reduction=r), lambda out: out.roll(1)),
    "binary": lambda r: (nn.BCEWithLogitsLoss(reduction=r), lambda out: (out.roll(1) > 0).double()),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("backend", ["hooks", "func"])
def test_every_loss_and_label_mode(name: str, reduction: str, backend: str) -> None:
    model, inputs, _ = _mlp()
    loss, make = LOSSES[name](reduction)
    targets = make(model(inputs).detach())
    specs = resolve_layers(model)
    recorder = Recorder(model, loss, batches(inputs, targets, [4, 2]), specs, backend=backend)
    truth = {spec: matrices(model, plain_call, loss, inputs, targets, spec, "exact") for spec in specs}
    exact, real = recorder.streams("exact"), recorder.streams("real")
    for spec in specs:
        assert close(stream_matrices(exact[spec.name]), truth[spec])
        labelled = matrices(model, plain_call, loss, inputs, targets, spec, "real")
        assert close(stream_matrices(real[spec.name]), labelled)
    sampled = recorder.streams("sampled", draws=500)
    for spec in specs:
        stream = sampled[spec.name]
        assert (stream.columns, stream.draws) == (500, True)
        assert close(stream_matrices(stream), truth[spec], 0.25)


@settings(max_examples=25)
@given(
    cuts=st.sampled_from([[7], [1] * 7, [3, 4], [2, 1, 4], [6, 1]]),
    chunk_bytes=st.integers(1, 20_000),
    labels=st.sampled_from(["exact", "sampled", "real"]),
    cache=st.booleans(),
    backend=st.sampled_from(["hooks", "func"]),
)
def test_chunks_and_batches_change_nothing(
    cuts: list[int], chunk_bytes: int, labels: str, cache: bool, backend: str
) -> None:
    torch.manual_seed(0)
    model, inputs, targets = _mlp(7)
    specs = resolve_layers(model)
    whole = Recorder(model, CE, [(inputs, targets)], specs).streams(labels, draws=3)
    data = batches(inputs, targets, cuts)
    parts = Recorder(model, CE, data, specs, chunk_bytes=chunk_bytes, backend=backend).streams(
        labels, draws=3, cache=cache
    )
    for spec in specs:
        assert torch.allclose(_dense(parts[spec.name]), _dense(whole[spec.name]), rtol=1e-10, atol=1e-14)


def test_draws_are_seeded_and_the_first_draws_of_many_are_the_few() -> None:
    model, inputs, targets = _mlp()
    specs = resolve_layers(model, ["0"])
    recorder = Recorder(model, CE, [(inputs, targets)], specs, seed=4)
    few = _dense(recorder.streams("sampled", draws=2)["0.weight"]) * 2**0.5
    many = _dense(recorder.streams("sampled", draws=8)["0.weight"]) * 8**0.5
    assert torch.allclose(few, many[:, :2])
    assert not torch.allclose(few, _dense(recorder.streams("sampled", draws=2, seed=5)["0.weight"]) * 2**0.5)
    again = Recorder(model, CE, [(inputs, targets)], specs, seed=5).streams("sampled", draws=2)
    assert torch.equal(_dense(again["0.weight"]), _dense(recorder.streams("sampled", draws=2, seed=5)["0.weight"]))


def test_padding_costs_no_columns_and_changes_nothing() -> None:
    model = zoo.TiedLanguageModel().double()
    tokens, targets = torch.randint(0, 5, (3, 5)), torch.full((3, 5), -100)
    targets[0, 1] = targets[1, 0] = targets[1, 4] = 2
    recorder = Recorder(model, CE, [(tokens, targets)], resolve_layers(model, ["hidden"]))
    assert recorder.exact_columns == 2 * 4
    assert recorder.classes == 5
    stream = recorder.streams()["hidden.weight"]
    truth = matrices(model, plain_call, CE, tokens[:2], targets[:2], resolve_layers(model, ["hidden"])[0], "exact")
    assert close(stream_matrices(stream)[:2], truth)
    # A sample without any token that counts has no loss.
    assert bool((stream_matrices(stream)[2] == 0).all())


def test_an_uncached_stream_can_be_iterated_again_and_layers_are_captured_alone() -> None:
    model, inputs, targets = _mlp()
    calls = []
    recorder = Recorder(
        model, CE, batches(inputs, targets, [4, 2]), resolve_layers(model), progress=lambda *c: calls.append(c)
    )
    stream = recorder.streams(cache=False, names=["2.weight"])["2.weight"]
    assert calls == []
    first, second = _dense(stream), _dense(stream)
    assert torch.equal(first, second)
    assert calls == [(4, 6), (6, 6)] * 2
    assert not stream.in_memory


def test_a_cached_sweep_runs_once_for_all_layers() -> None:
    model, inputs, targets = _mlp()
    calls = []
    recorder = Recorder(model, CE, [(inputs, targets)], resolve_layers(model), progress=lambda *c: calls.append(c))
    streams = recorder.streams()
    for stream in streams.values():
        _dense(stream)
        assert stream.in_memory
    assert calls == [(6, 6)]


def test_plans_know_the_sizes_before_capturing() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 5)).double()
    inputs, targets = zoo.images(4, 3, 4, 4), torch.randint(0, 5, (4,))
    recorder = Recorder(model, CE, [(inputs, targets)], resolve_layers(model))
    for labels, draws in (("exact", 1), ("sampled", 7), ("real", 1)):
        for form, kind in (("factored", FactoredAtoms), ("dense", DenseAtoms)):
            streams = recorder.streams(labels, draws, form=form)
            for plan in recorder.plan(labels, draws, form=form):
                (chunk,) = streams[plan.name]
                assert isinstance(chunk, kind)
                assert plan.bytes == chunk.nbytes // 4
                assert plan.columns == chunk.columns == streams[plan.name].columns
                assert plan.form == form
                assert plan.positions == (4 if plan.name == "0.weight" else 1)
    text = str(recorder.plan()[0])
    assert all(word in text for word in ("0.weight (4x27)", "hooks", "4 columns", "4 positions", "uses are seen"))


def test_factors_that_would_be_huge_are_multiplied_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(6, 6, 3, groups=6), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    data = [(zoo.images(3, 6, 8, 8), torch.randint(0, 6, (3,)))]
    recorder = Recorder(model, CE, data, resolve_layers(model))
    assert recorder.plan()[0].form == "factored"
    monkeypatch.setattr(capture, "_BLOWN_UP_BYTES", 1000)
    (plan,) = recorder.plan()
    assert plan.form == "dense"
    assert plan.bytes == plan.dense_bytes
    assert "much larger" in plan.reason
    factored = recorder.streams(form="factored")["0.weight"]
    assert torch.allclose(_dense(recorder.streams()["0.weight"]), _dense(factored))
    assert all(isinstance(chunk, DenseAtoms) for chunk in recorder.streams()["0.weight"])


def test_chunks_stay_below_their_limit() -> None:
    model, inputs, targets = _mlp(20)
    limit = 1000
    recorder = Recorder(model, CE, [(inputs, targets)], resolve_layers(model), chunk_bytes=limit)
    for stream in recorder.streams(cache=False).values():
        assert all(chunk.nbytes <= limit for chunk in stream)
        assert len(list(stream)) > 1


def test_windows_and_interleaved_samples_are_told_apart() -> None:
    class Windows(nn.Module):
        """Samples cut into windows that go to the first dimension, sample-major or window-major."""

        def __init__(self, interleaved: bool) -> None:
            super().__init__()
            self.inner, self.outer, self.interleaved = nn.Linear(3, 4), nn.Linear(4, 3), interleaved

        def forward(self, x: Tensor) -> Any:
            n = len(x)
            w = x.unflatten(1, (4, 2))
            w = (w.transpose(0, 1) if self.interleaved else w).reshape(4 * n, 2, 3)
            w = self.inner(w).tanh()
            w = w.unflatten(0, (4, n)).transpose(0, 1) if self.interleaved else w.unflatten(0, (n, 4))
            return self.outer(w.sum((1, 2)))

    for interleaved in (False, True):
        model = Windows(interleaved).double()
        inputs, targets = zoo.images(5, 8, 3), torch.randint(0, 3, (5,))
        (spec,) = resolve_layers(model, ["inner"])
        recorder = Recorder(model, CE, batches(inputs, targets, [4, 1]), [spec])
        assert recorder.plan()[0].backend == "hooks"
        truth = matrices(model, plain_call, CE, inputs, targets, spec, "exact")
        assert close(stream_matrices(recorder.streams()[spec.name]), truth)


def test_checkpointed_blocks() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Any:
            out: Tensor = self.outer(checkpoint(lambda z: self.inner(z).tanh(), x, use_reentrant=False))
            return out

    model = Checkpointed().double()
    inputs, targets = zoo.images(4, 5), torch.randint(0, 3, (4,))
    specs = resolve_layers(model)
    streams = Recorder(model, CE, [(inputs, targets)], specs).streams()
    for spec in specs:
        assert close(
            stream_matrices(streams[spec.name]), matrices(model, plain_call, CE, inputs, targets, spec, "exact")
        )


def test_a_scripted_model_is_measured_sample_by_sample() -> None:
    model, inputs, targets = _mlp()
    with warnings.catch_warnings():
        # newer versions of torch deprecate it
        warnings.filterwarnings("ignore", ".*jit.*")  # deprecated in different words by different versions
        traced = torch.jit.trace(model, inputs[:1])
    specs = resolve_layers(traced)
    recorder = Recorder(traced, CE, [(inputs, targets)], specs)
    assert {plan.backend for plan in recorder.plan()} <= {"func", "loop"}
    for spec in specs:
        truth = matrices(model, plain_call, CE, inputs, targets, spec, "exact")
        assert close(stream_matrices(recorder.streams()[spec.name]), truth)


def test_a_branch_that_only_later_samples_take_is_not_called_unreached() -> None:
    model = zoo.Routed().double()
    inputs = zoo.images(6, 5)
    inputs[:, 0] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, -1.0])
    targets = torch.randint(0, 3, (6,))
    specs = resolve_layers(model)
    recorder = Recorder(model, CE, batches(inputs, targets, [5, 1]), specs)
    plan = {plan.name: plan for plan in recorder.plan()}["right.weight"]
    assert (plan.backend, plan.reason) == ("loop", "only some samples reach it")
    for spec in specs:
        truth = matrices(model, plain_call, CE, inputs, targets, spec, "exact")
        assert close(stream_matrices(recorder.streams()[spec.name]), truth)


def test_sparse_and_renormalised_tables() -> None:
    for options in ({"sparse": True}, {"max_norm": 0.5}, {"scale_grad_by_freq": True}):
        model = nn.Sequential(nn.Embedding(5, 3, **options), nn.Flatten(), nn.Linear(9, 3)).double()
        tokens, targets = torch.randint(0, 5, (4, 3)), torch.randint(0, 3, (4,))
        (spec,) = resolve_layers(model, ["0"])
        recorder = Recorder(model, CE, [(tokens, targets)], [spec])
        assert (recorder.plan()[0].backend == "hooks") == ("scale_grad_by_freq" not in options)
        if "sparse" not in options:
            stream = recorder.streams()["0.weight"]
            assert close(stream_matrices(stream), matrices(model, plain_call, CE, tokens, targets, spec, "exact"))


def test_a_model_that_takes_derivatives_itself() -> None:
    class Field(nn.Module):
        """Outputs are derivatives of a potential by its input; the weights also act in the backward pass inside."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Any:
            x = x.detach().requires_grad_()
            potential = self.outer(self.inner(x).tanh()).sum()
            return torch.autograd.grad(potential, x, create_graph=True)[0]

    model = Field().double()
    inputs, targets = zoo.images(4, 3), zoo.images(4, 3)
    specs = resolve_layers(model)
    recorder = Recorder(model, nn.MSELoss(), [(inputs, targets)], specs)
    assert {plan.backend for plan in recorder.plan()} == {"loop"}
    for spec in specs:
        truth = matrices(model, plain_call, nn.MSELoss(), inputs, targets, spec, "exact")
        assert close(stream_matrices(recorder.streams()[spec.name]), truth)


# ---- what is refused ----


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Any:
        out = self.fc(x)
        return out - out.mean(0)


class Random(Mixing):
    def forward(self, x: Tensor) -> Any:
        return self.fc(F.dropout(x))


class Unused(Mixing):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.spare(x)
        return self.fc(x)


class Breaking(Mixing):
    """Not a number once an input is large."""

    def forward(self, x: Tensor) -> Any:
        return self.fc(x) + torch.where(x.sum(1, keepdim=True) > 50, torch.inf, 0.0)


class BreakingInside(Mixing):
    """Outputs stay finite, the input of the layer does not."""

    def forward(self, x: Tensor) -> Any:
        return self.fc(torch.where(x > 50, torch.inf, x)).nan_to_num(0, 0, 0)


def _model_with(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), layer).double()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Mixing(), "mixes the samples"),
        (_model_with(nn.BatchNorm1d(4, track_running_stats=False)), r"1 \(BatchNorm1d without running statistics\)"),
        (Random(), "random in eval mode"),
        (nn.Sequential(nn.Linear(5, 4), nn.Flatten(0)), "outputs with samples first, got"),
        (nn.LSTM(5, 4), "returned a tuple in which no logits"),
    ],
)
def test_models_that_are_refused(model: nn.Module, words: str) -> None:
    model = model.double()
    data = [(zoo.images(4, 5), torch.randint(0, 4, (4,)))]
    with pytest.raises(ModelError, match=words):
        Recorder(model, CE, data, resolve_layers(model, ["*weight*"]))


def test_a_model_may_mix_if_every_batch_has_one_sample() -> None:
    # Nothing to mix with: the sample alone is what is measured.
    model = Mixing().double()
    data = [(zoo.images(1, 5), torch.tensor([1])) for _ in range(3)]
    assert Recorder(model, CE, data, resolve_layers(model)).num_samples == 3


def test_layers_that_the_loss_does_not_reach() -> None:
    model = Unused().double()
    data = [(zoo.images(4, 5), torch.randint(0, 4, (4,)))]
    with pytest.raises(LayerError, match=r"does not depend on 'spare.weight'"):
        Recorder(model, CE, data, resolve_layers(model))
    recorder = Recorder(model, CE, data, resolve_layers(model), skip_unreached=True)
    assert recorder.unreached == ("spare.weight",)
    assert list(recorder.streams()) == ["fc.weight"]
    with pytest.raises(LayerError, match="none of the layers"):
        Recorder(model, CE, data, resolve_layers(model, ["spare"]), skip_unreached=True)


@pytest.mark.parametrize("backend", ["auto", "func"])
def test_outputs_without_any_gradient(backend: str) -> None:
    model = Unused().double()
    data = [(zoo.images(4, 5), torch.randint(0, 4, (4,)))]
    with pytest.raises(LayerError, match=r"does not depend on 'fc.weight', 'spare.weight'"):
        Recorder(model, CE, data, resolve_layers(model), lambda m, x: m(x).detach(), backend=backend)


@pytest.mark.parametrize("position", [0, 5])
def test_non_finite_outputs_name_the_samples(position: int) -> None:
    model = Breaking().double()
    inputs, targets = zoo.images(6, 5), torch.randint(0, 4, (6,))
    inputs[position] = 100
    with pytest.raises(NonFiniteError, match="first samples" if position == 0 else "samples 4 to 5"):
        Recorder(model, CE, batches(inputs, targets, [4, 2]), resolve_layers(model)).streams()


@pytest.mark.parametrize("backend", ["hooks", "func"])
def test_non_finite_activations_name_layer_and_samples(backend: str) -> None:
    model = BreakingInside().double()
    inputs, targets = zoo.images(6, 5), torch.randint(0, 4, (6,))
    inputs[5] = 100
    recorder = Recorder(model, CE, batches(inputs, targets, [4, 2]), resolve_layers(model), backend=backend)
    with pytest.raises(NonFiniteError, match=r"layer 'fc.weight' for samples 4 to 5"):
        recorder.streams()


def test_wrong_labels_are_named_before_autograd_fails() -> None:
    model, inputs, targets = _mlp()
    targets[5] = 4
    with pytest.raises(LabelError, match=r"0..3 .* got 4"):
        Recorder(model, CE, [(inputs, targets)], resolve_layers(model))
    recorder = Recorder(model, CE, batches(inputs, targets, [4, 2]), resolve_layers(model))
    with pytest.raises(LabelError, match=r"0..3 .* got 4"):
        recorder.streams()


def test_data_that_changes_between_sweeps() -> None:
    model, inputs, targets = _mlp()
    recorder = Recorder(model, CE, [(inputs, targets)], resolve_layers(model))
    inputs.add_(1)
    with pytest.raises(DataError, match="Batch 0 differs"):
        recorder.streams()


class Branching(nn.Module):
    """Puts the samples second once an input is large, or when told to."""

    def __init__(self, looking: bool) -> None:
        super().__init__()
        self.inner, self.outer, self.looking, self.second = nn.Linear(3, 4), nn.Linear(4, 3), looking, False

    def forward(self, x: Tensor) -> Any:
        if self.second or (self.looking and bool((x > 50).any())):
            return self.outer(self.inner(x.transpose(0, 1)).tanh().mean(0))
        return self.outer(self.inner(x).tanh().mean(1))


def test_a_layout_that_depends_on_the_data_is_noticed_and_gone_around() -> None:
    model = Branching(looking=True).double()
    inputs, targets = zoo.images(8, 4, 3), torch.randint(0, 3, (8,))
    inputs[5, 0, 0] = 100
    (spec,) = resolve_layers(model, ["inner"])
    recorder = Recorder(model, CE, batches(inputs, targets, [4, 4]), [spec])
    assert recorder.plan()[0].backend == "hooks"
    stream = GradientStream(lambda: recorder.streams(cache=False)["inner.weight"], spec.shape, 8, 2)
    assert [type(chunk) for chunk in stream] == [FactoredAtoms, DenseAtoms]
    assert close(stream_matrices(stream), matrices(model, plain_call, CE, inputs, targets, spec, "exact"))


def test_a_model_that_changes_after_the_probe_is_noticed() -> None:
    model = Branching(looking=False).double()
    data = [(zoo.images(4, 4, 3), torch.randint(0, 3, (4,)))]
    recorder = Recorder(model, CE, data, resolve_layers(model, ["inner"]))
    model.second = True
    with pytest.raises(ModelError, match=r"'inner.weight' for samples 0 to 3 .* computes something else now"):
        recorder.streams()


@pytest.mark.parametrize("options", [{"backend": "magic"}, {"chunk_bytes": 0}, {"max_samples": 0}])
def test_wrong_options_of_the_recorder(options: dict[str, Any]) -> None:
    model, inputs, targets = _mlp()
    with pytest.raises(OptionError, match=next(iter(options))):
        Recorder(model, CE, [(inputs, targets)], resolve_layers(model), **options)


@pytest.mark.parametrize("options", [{"labels": "true"}, {"draws": 0}, {"form": "sparse"}])
def test_wrong_options_of_streams(options: dict[str, Any]) -> None:
    model, inputs, targets = _mlp()
    recorder = Recorder(model, CE, [(inputs, targets)], resolve_layers(model))
    with pytest.raises(OptionError, match=next(iter(options))):
        recorder.streams(**options)
    with pytest.raises(LayerError, match=r"not among the recorded ones: 0.weight, 2.weight"):
        recorder.streams(names=["1.weight"])


def test_hooks_can_be_demanded() -> None:
    model = zoo.Hidden().double()
    data = [(zoo.images(4, 5), torch.randint(0, 3, (4,)))]
    with pytest.raises(ModelError, match="backend='hooks' cannot capture layer 'a'"):
        Recorder(model, CE, data, resolve_layers(model, ["a"]), backend="hooks")
