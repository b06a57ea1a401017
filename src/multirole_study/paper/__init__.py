"""Build the paper's tables, figures and claims from the committed results of a grid (`multirole paper`).

Nothing here trains or samples: every number is read from `results/<scale>/` (`results`), with intervals (`statistics`).
"""
