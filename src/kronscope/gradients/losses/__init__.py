r"""Losses, seen from the model's outputs: which vectors to pull back, so that gradients sum up to the wanted matrix.

A sample's loss :math:`\ell_i` is the loss module applied to that sample alone. With :math:`f` the model's output
for it, a mode gives columns :math:`v_{ic}`, and the atoms are the gradients :math:`G_{ic} = J_i^\top v_{ic}`:

========  =====================================================  ==================================================
mode      columns                                                meaning
========  =====================================================  ==================================================
exact     :math:`\sum_c v_{ic}v_{ic}^\top = \nabla_f^2\ell_i`    Gauss–Newton
sampled   one per draw, :math:`E[vv^\top] = \nabla_f^2\ell_i`    Gauss–Newton in expectation (Fisher by sampling)
mixed     the largest exact ones, and ± sums of the others       Gauss–Newton in expectation, with little variance
real      :math:`v_i = \nabla_f\ell_i`                           empirical Fisher
========  =====================================================  ==================================================

With mean reduction over :math:`T_i` terms, :math:`\nabla^2_f` and hence :math:`vv^\top` carry :math:`1/T_i`, so exact
and sampled columns carry :math:`\sqrt{1/T_i}` and real ones :math:`1/T_i`.
"""

from kronscope.gradients.losses.columns import LABEL_MODES, Columns, Draws, OutputLoss
from kronscope.gradients.losses.read import LossFunction, read_loss

__all__ = ["LABEL_MODES", "Columns", "Draws", "LossFunction", "OutputLoss", "read_loss"]
