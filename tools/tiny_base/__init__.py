"""How the embedded bases were made: tokenizers, scripted dialogues of every role, training, and model cards of what was measured.

`math_*` is about the base of tiny_chain (tiny-r) and `code_*` about that of tiny_pipe (tiny-r-code); the rest is what they share.
"""
