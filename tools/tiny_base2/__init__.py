"""The second generation of embedded bases, for scale tiny-r: habits of which none is best everywhere, and judges who compare.

What is the same as in the first generation (training loop, row type, model card helpers) is imported from `tiny_base`.
"""
