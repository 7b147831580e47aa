"""How a layer's gradients are captured, to be printed and to be counted with."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LayerPlan"]


@dataclass(frozen=True)
class LayerPlan:
    """How the gradients of one layer will be captured, and how much memory they take.

    Attributes:
        name: The layer's name.
        shape: Its rows and columns.
        backend: ``"hooks"`` (from the layer's inputs and output gradients), ``"func"`` (``torch.func``), or ``"loop"``
            (one sample after the other).
        reason: Why this way was chosen.
        form: ``"factored"`` or ``"dense"``: the form that is chosen when ``form="auto"``.
        columns: Columns of each sample: backward passes that one sample needs.
        positions: Positions of each sample in factored form; 0 if the layer has no such form.
        factored_bytes: Bytes of a sample in factored form; None if there is none.
        dense_bytes: Bytes of a sample in dense form.

    >>> print(LayerPlan("fc.weight", (10, 64), "hooks", "a linear layer", "factored", 9, 1, 616, 23040))
    fc.weight (10x64): hooks, factored, 9 columns, 1 positions, 616 bytes per sample; a linear layer
    """

    name: str
    shape: tuple[int, int]
    backend: str
    reason: str
    form: str
    columns: int
    positions: int
    factored_bytes: int | None
    dense_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes per sample in the form chosen."""
        return self.dense_bytes if self.form == "dense" or self.factored_bytes is None else self.factored_bytes

    def __str__(self) -> str:
        """One line to print."""
        m, n = self.shape
        return (
            f"{self.name} ({m}x{n}): {self.backend}, {self.form}, {self.columns} columns, {self.positions} positions, "
            f"{self.bytes} bytes per sample; {self.reason}"
        )
