"""Second-moment matrices of gradients: Gauss–Newton, empirical Fisher, Adagrad."""

from __future__ import annotations

from kronscope.curvature.forms import FormPlan, plan_form
from kronscope.curvature.middles import Matrix, Spanned
from kronscope.curvature.second_moment import SecondMoment

__all__ = ["FormPlan", "Matrix", "SecondMoment", "Spanned", "plan_form"]
