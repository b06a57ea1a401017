"""The embedded scales: their tokenizer, the dialogues they learned from, and the training that made them."""
