r"""The update of a block, twice: readable for one block, and fast for a stack of them; tested equal.

With the gradient :math:`G`, factors :math:`A_k` (``L`` and ``R`` for a matrix), exponents :math:`e_k` and the
bias-corrected mean :math:`M` of the gradients, a Shampoo update is

.. math:: U = s \cdot A_1^{e_1} \times_1 \cdots A_q^{e_q} \times_q M ,

where :math:`s` is 1, the trace scale, or what gives :math:`U` a graft's or a fixed length. A side without a factor
stands for :math:`(\operatorname{tr} A / d) I`, which makes ``L ⊗ R / tr L`` the one-sided ``L ⊗ I / n``. KL-Shampoo
differs in its factors; SOAP keeps eigenbases :math:`Q_k` and a second moment in them instead of roots.
"""

from __future__ import annotations

from kronscope.optim.batched import batched_update
from kronscope.optim.pieces import new_state
from kronscope.optim.reference import reference_update

__all__ = ["batched_update", "new_state", "reference_update"]
