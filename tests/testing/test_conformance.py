"""Facts: the conformance checks find every broken promise, and say which it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import kronscope as ks
from kronscope.errors import ConformanceError, ConvergenceError
from kronscope.gradients.atoms import DenseAtoms
from kronscope.gradients.stream import GradientStream
from kronscope.kron import Diagonal, Identity, KroneckerProduct, Operator
from kronscope.testing import StreamRecipe, check_approximation, check_operator


class Good(Diagonal):
    """A diagonal operator; the tests break one promise each in a subclass."""

    def __init__(self, values: Tensor | None = None) -> None:
        super().__init__(
            torch.tensor([[1.0, 2.0, 0.5], [3.0, 0.0, 1.5]], dtype=torch.float64) if values is None else values
        )


def broken(**members: Any) -> Operator:
    made: Operator = type("Broken", (Good,), members)()
    return made


def test_a_good_operator_passes() -> None:
    check_operator(Good())


def wrong_dense(self: Good) -> Tensor:
    dense = Good.to_dense(self)
    dense[0, 1] += 0.1
    return dense


def overwriting(self: Good, matrix: Tensor) -> Tensor:
    out = Good.apply(self, matrix)
    matrix.zero_()
    return out


def careless(self: Good, matrix: Tensor) -> Tensor:
    return matrix * 2.0


OPERATORS: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"shape": [2, 3]}, "shape must be a tuple"),
    "size": ({"to_dense": lambda self: torch.eye(5)}, "must be 6 x 6"),
    "symmetric": ({"to_dense": wrong_dense}, "must be symmetric"),
    "finite": ({"to_dense": lambda self: torch.full((6, 6), torch.nan)}, "must be finite"),
    "psd": ({"to_dense": lambda self: -Good.to_dense(self)}, "must be PSD"),
    "apply": ({"apply": careless}, r"apply\(V\) must be to_dense\(\) times V"),
    "overwrites": ({"apply": overwriting}, "apply changed its argument"),
    "dtype": ({"apply": lambda self, V: Good.apply(self, V).double()}, "must keep the dtype"),
    "norm": ({"norm": lambda self: 1.0}, r"norm\(\) is 1.0"),
    "norm type": ({"norm": lambda self: torch.tensor(1.0)}, "must be a float"),
    "trace": ({"trace": lambda self: 1.0}, r"trace\(\) is 1.0"),
    "inner": ({"inner": lambda self, other: 0.0}, r"inner\(itself\) is 0.0"),
    "power": ({"power": lambda self, p: self}, r"power\(-1\) must be the pseudo-inverse"),
    "inverse": ({"power": lambda self, p: Good(self.values.clamp_min(1e-30) ** p)}, "pseudo-inverse"),
    "power one": ({"power": lambda self, p: Good(2 * self.values)}, r"power\(1\) must be the operator itself"),
}


@pytest.mark.parametrize(("members", "text"), OPERATORS.values(), ids=OPERATORS.keys())
def test_a_broken_operator_is_found(members: dict[str, Any], text: str) -> None:
    with pytest.raises(ConformanceError, match=text):
        check_operator(broken(**members))


def test_an_inner_product_that_knows_only_itself_is_found() -> None:
    class Lonely(Good):
        def inner(self, other: Operator) -> float:
            return super().inner(other) if other is self else 0.0

    with pytest.raises(ConformanceError, match="but the dense matrix gives"):
        check_operator(Lonely())


def test_an_operator_that_takes_any_shape_is_found() -> None:
    class Lax(Identity):
        def apply(self, matrix: Tensor) -> Tensor:
            return self.scale * matrix

    with pytest.raises(ConformanceError, match="must raise ShapeError"):
        check_operator(Lax((2, 3)))


def test_something_that_is_no_operator_is_found() -> None:
    with pytest.raises(ConformanceError, match="lacks a member"):
        check_operator(torch.eye(2))  # type: ignore[arg-type]


def test_failures_are_assertion_errors_too() -> None:
    with pytest.raises(AssertionError):
        check_operator(broken(norm=lambda self: 1.0))


@dataclass(frozen=True)
class Custom:
    """A Kronecker product by any rule."""

    rule: Callable[[GradientStream], Operator]
    kronecker: bool = True
    fits_truth: bool = False
    uses_batches: bool = True
    name: ClassVar[str] = "custom"
    title: ClassVar[str] = "Custom"

    def fit(self, stream: GradientStream) -> Operator:
        return self.rule(stream)


def squared(stream: GradientStream, scale: float | None = None) -> KroneckerProduct:
    moment = ks.SecondMoment(stream)
    trace = moment.trace()
    if scale is None:
        scale = 1 / trace if trace > 0 else 0.0
    return KroneckerProduct(moment.left(), moment.right(), scale)


def by_first_chunk(stream: GradientStream) -> Operator:
    return squared(GradientStream.of_chunks(next(iter(stream))))


def by_first_sample(stream: GradientStream) -> Operator:
    chunk = next(iter(stream))
    return squared(GradientStream.of_chunks(chunk.part(0, 1)))


def overwrites(stream: GradientStream) -> Operator:
    fitted = squared(stream)
    for chunk in stream:
        chunk.weights.mul_(2)
    return fitted


class Counter:
    calls = 0

    def __call__(self, stream: GradientStream) -> Operator:
        self.calls += 1
        return squared(stream, scale=1.0 + self.calls)


def too_good(stream: GradientStream) -> Operator:
    return ks.approx.get("soap").fit(stream)


def half_float(stream: GradientStream) -> Operator:
    fitted = squared(stream)
    return KroneckerProduct(fitted.left.matrix, fitted.right.matrix.round(decimals=3), fitted.scale)


def refuses(stream: GradientStream) -> Operator:
    raise ConvergenceError("not today")


def crashes_on_zero(stream: GradientStream) -> Operator:
    if ks.SecondMoment(stream).trace() == 0:
        return Identity(stream.shape)
    return squared(stream)


def unweighted(stream: GradientStream) -> Operator:
    return squared(stream.map(lambda chunk: type(chunk)(**{**vars(chunk), "weights": torch.ones_like(chunk.weights)})))


def dense_only(stream: GradientStream) -> Operator:
    return Identity((1, 1)) if isinstance(next(iter(stream)), DenseAtoms) else squared(stream)


APPROXIMATIONS: dict[str, tuple[Callable[[GradientStream], Operator], str]] = {
    "chunks": (by_first_chunk, "must not depend on chunks"),
    "order": (by_first_sample, "must not depend on the order|must not depend on chunks"),
    "overwrites": (overwrites, "fit changed the stream"),
    "deterministic": (Counter(), "fitting twice must give the same"),
    "degree": (lambda stream: squared(stream, 1.0), "must be 9 times that of G"),
    "homogeneous": (half_float, "must be 9 times|must be that of 3G"),
    "kronecker": (too_good, "a Kronecker product was promised"),
    "weights": (unweighted, "with weights 9w must be that of 3G"),
    "refuses": (refuses, "refused every stream"),
    "zero": (crashes_on_zero, "zero gradients must give the zero operator"),
    "shape": (dense_only, r"must act on \(3, 4\)"),
}


@pytest.mark.parametrize(("rule", "text"), APPROXIMATIONS.values(), ids=APPROXIMATIONS.keys())
def test_a_broken_approximation_is_found(rule: Callable[[GradientStream], Operator], text: str) -> None:
    with pytest.raises(ConformanceError, match=text):
        check_approximation(Custom(rule))  # type: ignore[arg-type]  # the flags are fields here


def test_a_good_one_passes_and_streams_may_be_chosen() -> None:
    check_approximation(Custom(squared))  # type: ignore[arg-type]
    check_approximation(Custom(squared), streams=[StreamRecipe("dense", (2, 2), samples=3).build()])  # type: ignore[arg-type]
    check_approximation(Custom(lambda stream: squared(stream, 1.0)), degree=4.0)  # type: ignore[arg-type]


def test_the_text_names_the_approximation_and_the_stream() -> None:
    with pytest.raises(ConformanceError, match=r"custom on GradientStream\(3x4, 24 samples, 1 columns\)"):
        check_approximation(Custom(by_first_chunk))  # type: ignore[arg-type]


def test_a_name_is_needed() -> None:
    with pytest.raises(ConformanceError, match="needs a name"):
        check_approximation(object())  # type: ignore[arg-type]
