"""Advantages of rows: the paper's outcome reward, and other estimators."""
