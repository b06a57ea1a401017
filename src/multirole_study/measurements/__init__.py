"""Measurements of training that only the study makes."""
