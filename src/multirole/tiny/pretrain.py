"""Build one embedded base: `python -m multirole.tiny.pretrain --scale tiny-s`."""

import argparse
import logging
import random
from pathlib import Path

import torch

from multirole.tiny.dialogues import AUTHORS, make_rows, synthetic
from multirole.tiny.tokenizer import build_tokenizer
from multirole.tiny.train import ROWS_PER_POOL, build_model, train

PHASE_1 = {
    "generator": 24, "refiner": 8, "evaluator": 26, "aggregator": 20, "orchestrator": 2, "worker": 9, "synthesizer": 9,
}  # fmt: skip

if __name__ == "__main__":
    a = argparse.ArgumentParser()
    a.add_argument("--scale", default="tiny-s")
    a.add_argument("--out")
    a.add_argument("--budget", type=float)
    a.add_argument("--lr", type=float, default=5e-3)
    a = a.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO)
    tok = build_tokenizer()
    model = build_model(a.scale, tok, 0)
    print(model.num_parameters())
    rng = random.Random(1)
    S = [synthetic(t, rng) for t in AUTHORS]
    train(model, tok, lambda: make_rows(PHASE_1, ROWS_PER_POOL, rng, S), int(a.budget), a.lr, Path(a.out), "dialogues")
