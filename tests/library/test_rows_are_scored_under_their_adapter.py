"""Log-probs of rows are those of their role's adapter, whichever adapter is active before."""

import torch
from trainers import episodes_of, rows_of

from multirole.workflows import Voting


def test_an_adapter_that_was_activated_elsewhere_does_not_score_the_rows(make_library_trainer):
    trainer = make_library_trainer(Voting(), policy="ip")
    for name, parameter in trainer.peft_model.named_parameters():
        if "lora_B.aggregator" in name:  # all adapters of the fixture start equal
            parameter.data.neg_()
    rows = {role: [] for role in trainer.policy}
    for row in rows_of(trainer, episodes_of(trainer.workflow.roles)):
        rows[row.turn.role].append(row)
    expected = torch.cat(trainer.logprobs_of(rows["generator"]))
    trainer.peft_model.set_adapter("aggregator")
    assert torch.equal(torch.cat(trainer.logprobs_of(rows["generator"])), expected)
    twice = trainer.logprobs_of([*rows["generator"], *rows["generator"]])  # as of a callback that trains rows twice
    assert torch.equal(torch.cat(twice), expected.repeat(2))
    for row in rows["generator"]:
        row.adapter = "aggregator"
    assert (torch.cat(trainer.logprobs_of(rows["generator"])) - expected).abs().max() > 0.1
