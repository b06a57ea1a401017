"""What the notebooks need to compute the paper's tables, figures and claims from packed results: selections, intervals, renderers.

The cells of `notebooks/` say what is computed; `multirole paper` runs them. Nothing here trains or samples: every number is read from
`results/<scale>/` (`results`), with intervals (`statistics`).
"""
