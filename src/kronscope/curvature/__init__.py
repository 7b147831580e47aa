"""Second-moment matrices of gradients: Gauss–Newton, empirical Fisher, Adagrad."""

from __future__ import annotations

from kronscope.curvature.forms import FormPlan, plan_form
from kronscope.curvature.second_moment import SecondMoment

__all__ = ["FormPlan", "SecondMoment", "plan_form"]
