"""How a layer's gradients are captured, to be printed and to be counted with."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LayerPlan"]


@dataclass(frozen=True)
class LayerPlan:
    """How a layer will be captured, and how large its atoms are.

    Attributes:
        name: The layer.
        shape: Its rows and columns.
        backend: ``"hooks"``, ``"func"`` or ``"loop"``.
        reason: Why this back end.
        form: ``"factored"`` or ``"dense"``: what ``form="auto"`` gives.
        columns: Columns c per sample.
        positions: Positions t per sample of the factored form, 0 if there is none.
        factored_bytes: Bytes per sample in factored form, ``None`` if there is none.
        dense_bytes: Bytes per sample in dense form.
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
