"""Build the embedded bases: tokenizers, scripted dialogues of every role, training, and model cards with measurements.

`math_*` is for the bases of tiny_chain (tiny-r, tiny-r-vain) and `code_*` for that of tiny_pipe (tiny-r-code); both use the other modules.
"""
