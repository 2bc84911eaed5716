"""Bands and label sets with the habits of scikit-learn, by the extra ``sklearn``.

from ffcp.sklearn import BandRegressor

bands = BandRegressor(RandomForestRegressor()).fit(x, y)
bands.predict_interval(x_new, alpha=0.1)
"""

from ffcp.sklearn.estimators import BandRegressor, SetClassifier

__all__ = ["BandRegressor", "SetClassifier"]
