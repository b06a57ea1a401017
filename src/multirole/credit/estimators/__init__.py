"""Credit estimators, one in each module."""
