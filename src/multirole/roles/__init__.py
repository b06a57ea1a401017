"""Callbacks that measure what training does to each role."""
