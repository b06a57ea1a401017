"""GRPO of a base folder, with what moves: python probe.py BASE --workflow single --iters 60 --lr 2e-3"""
import argparse, json, sys, tempfile, time, warnings, logging
from collections import Counter, defaultdict
from pathlib import Path
from statistics import fmean
warnings.filterwarnings("ignore")
import torch
torch.set_num_threads(1)
from multirole.experiment import run as R
from multirole.experiment.cell import Cell
from multirole.core.hooks import MultiRoleCallback
from multirole.tasks.tiny_chain import kind_of
import json

def habit(t):
    if t.startswith("hmm"): return "wait"
    if t.startswith("```"): return "program"
    if "\\boxed" not in t: return "no_box"
    if t.startswith("=="): return "double"
    if t.startswith(">"): return "split"
    if t.startswith("="): return "direct"
    if t.startswith("\\boxed"): return "guess"
    return "other"

class Watch(MultiRoleCallback):
    def __init__(self, out): self.out, self.ratios, self.t0, self.n = out, [], time.process_time(), 0
    def on_micro_batch(self, trainer, rows, batch, logps, entropies):
        old = batch.get("old_per_token_logps")
        if old is not None:
            m = batch["completion_mask"].bool()
            d = (logps.detach() - old)[m]
            self.ratios.append((float((d.abs() > 0.2).float().mean()), float(entropies.detach()[m].mean())))
    def on_iteration_end(self, trainer, it):
        groups = defaultdict(list)
        for e in it.episodes: groups[e.problem.id].append(e.reward.value)
        hab = defaultdict(list); lens = defaultdict(list)
        for e in it.episodes:
            for t in e.turns:
                lens[t.role].append(len(t.completion_ids))
                if t.role in ("generator", "worker") and t.round == 0 :
                    hab[habit(t.text)].append(t)
        acc = {}
        for h, ts in hab.items():
            pass
        row = {"it": it.number, "acc": round(fmean(e.reward.value > 0.5 for e in it.episodes), 3),
               "var": round(fmean(len(set(g)) > 1 for g in groups.values()), 2),
               "gn": round(fmean(s.grad_norm for s in it.steps), 4), "steps": len(it.steps), "lr": it.steps[0].lr if it.steps else 0,
               "off": round(fmean(r[0] for r in self.ratios), 4) if self.ratios else None,
               "H": round(fmean(r[1] for r in self.ratios), 3) if self.ratios else None,
               "cpu": round(time.process_time() - self.t0, 1),
               "len": {r: round(fmean(v), 1) for r, v in lens.items()},
               "derive": {r: round(fmean(t.text[:1] in "=>" for e in it.episodes for t in e.turns if t.role == r), 3) for r in lens if r != "generator"}}
        n = sum(len(v) for v in hab.values())
        row["hab"] = {h: round(len(v) / n, 3) for h, v in sorted(hab.items())}
        if trainer.state and len(next(iter(it.episodes)).turns) == 1:
            a = defaultdict(list)
            for e in it.episodes: a[habit(e.turns[0].text)].append(e.reward.value > 0.5)
            row["hacc"] = {h: round(fmean(v), 2) for h, v in sorted(a.items())}
        self.ratios = []
        self.emit(row)
    def on_episodes_evaluated(self, trainer, episodes, metrics):
        row = {"eval": trainer.state.global_step, "acc": round(fmean(e.reward.value > 0.5 for e in episodes), 4), "n": len(episodes), "cpu": round(time.process_time() - self.t0, 1)}
        a = defaultdict(list); 
        for e in episodes:
            for t in e.turns:
                if t.role in ("generator", "worker") and t.round == 0: a[habit(t.text)].append(e.reward.value > .5)
        n = sum(map(len, a.values()))
        row["hab"] = {h: round(len(v) / n, 3) for h, v in sorted(a.items())}
        row["hacc"] = {h: round(fmean(v), 2) for h, v in sorted(a.items())}
        row["derive"] = {r: round(fmean(t.text[:1] in "=>" for e in episodes for t in e.turns if t.role == r), 3) for r in {t.role for e in episodes for t in e.turns} if r != "generator"}
        row["out"] = {r: dict(Counter(str(t.outcome) for e in episodes for t in e.turns if t.role == r)) for r in ("aggregator", "evaluator") if any(t.role == r for e in episodes for t in e.turns)}
        self.emit(row)
    def emit(self, row):
        with open(self.out, "a") as f: f.write(json.dumps(row) + "\n")

p = argparse.ArgumentParser()
p.add_argument("base", type=Path); p.add_argument("--out", required=True)
p.add_argument("--workflow", default="single"); p.add_argument("--policy", default="sp")
p.add_argument("--iters", type=int, default=60); p.add_argument("--lr", type=float, default=2e-3)
p.add_argument("--seed", type=int, default=0); p.add_argument("--nval", type=int, default=256); p.add_argument("--every", type=int, default=10)
p.add_argument("--set", nargs="*", default=[]); p.add_argument("--diag", action="store_true"); p.add_argument("--adapter")
o = p.parse_args()
Path(o.out).unlink(missing_ok=True)
R.locate = lambda cell, *a, **k: o.base
extra = {s.split("=")[0]: json.loads(s.split("=")[1]) for s in o.set}
cell = Cell(workflow=o.workflow, policy=o.policy, task="math", scale="tiny-r", seed=o.seed, iterations=o.iters, learning_rate=o.lr,
            n_validation=o.nval, eval_every=o.every, save_every=10**6, diagnostics=o.diag, **extra)
logging.disable(logging.INFO)
with tempfile.TemporaryDirectory() as d:
    tr = R.make_trainer(cell, d, callbacks=[Watch(o.out)])
    tr.evaluate()
    tr.train()
    if o.adapter: tr.save_model(o.adapter)
