"""Estimators of scikit-learn with prediction intervals and sets (extra ``sklearn``).

Examples
--------
>>> from sklearn.datasets import load_diabetes
>>> from sklearn.linear_model import LinearRegression
>>> x, y = load_diabetes(return_X_y=True)
>>> regressor = ConformalRegressor(LinearRegression(), random_state=0).fit(x, y)
>>> regressor.predict_interval(x[:5], alpha=0.1).shape
(5, 2)
"""

from ffcp.extras import needed

needed("sklearn", "sklearn", "ffcp.sklearn")

from ffcp.sklearn.estimators import (  # noqa: E402 - after saying what is missing
    ConformalClassifier,
    ConformalRegressor,
)

__all__ = ["ConformalClassifier", "ConformalRegressor"]
