"""Problems of an iteration come in groups of n; every pass is a fresh permutation; a resume sees the same order."""

from datasets import Dataset
from trainers import episodes_of, rows_of

from multirole.inputs.streams import stream_rows
from multirole.options import MultiRoleGRPOConfig
from multirole.update.rows import problem_order
from multirole.workflows import Voting


def test_groups_and_passes():
    order = list(problem_order(n_rows=5, num_generations=3, length=24, seed=0))
    assert len(order) == 24
    groups = [order[i : i + 3] for i in range(0, 24, 3)]
    assert all(len(set(group)) == 1 for group in groups)
    firsts = [group[0] for group in groups]
    assert sorted(firsts[:5]) == [0, 1, 2, 3, 4]  # the first pass sees every problem once
    assert order == list(problem_order(5, 3, 24, 0)) != list(problem_order(5, 3, 24, 1))


def test_passes_differ():
    order = list(problem_order(n_rows=50, num_generations=1, length=100, seed=0))
    assert order[:50] != order[50:] and sorted(order[:50]) == sorted(order[50:])


def test_an_unshuffled_dataset_is_taken_in_its_order():
    assert list(problem_order(3, 2, 10, 0, shuffle=False)) == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1]


def test_the_trainer_draws_a_whole_run(make_library_trainer):
    from multirole.workflows import Single

    trainer = make_library_trainer(Single(), n_prompts=5, max_steps=4)
    order = list(trainer._get_train_sampler())
    assert order == list(problem_order(5, 8, 4 * 16, trainer.args.seed))
    passes = make_library_trainer(Single(), n_prompts=5, max_steps=-1, num_train_epochs=3)
    assert passes.args.max_steps == 6  # 5 problems make two iterations of two in a pass, as TRL rounds down


def test_rows_are_shuffled_anew_in_every_iteration(make_library_trainer):
    """Otherwise each optimizer step of an iteration would have the episodes of other problems, and always the same ones."""
    trainer = make_library_trainer(Voting())
    episodes = episodes_of(trainer.workflow.roles)
    turns = [id(row.turn) for row in rows_of(trainer, episodes)]

    def order(step):
        trainer.state.global_step = step
        return [turns.index(id(row.turn)) for row in trainer.prepare_rows(episodes)]

    first = order(0)
    assert sorted(first) == list(range(len(turns))) != first
    assert first == order(0) != order(1)


def test_rows_are_shuffled_by_the_runs_seed(make_library_trainer):
    episodes = episodes_of(Voting().roles)

    def order(seed):
        return [id(row.turn) for row in make_library_trainer(Voting(), seed=seed).prepare_rows(episodes)]

    first, other = order(0), order(1)
    assert first == order(0) != other and set(first) == set(other)


def test_a_stream_is_shuffled_by_the_runs_seed_and_anew_in_every_pass(tmp_path):
    stream = Dataset.from_dict({"prompt": [str(i) for i in range(40)]}).to_iterable_dataset()

    def order(seed):
        args = MultiRoleGRPOConfig(
            str(tmp_path), use_cpu=True, bf16=False, report_to="none", seed=seed, max_steps=20, generation_batch_size=8,
            num_generations=2,
        )  # fmt: skip
        rows = stream_rows(stream, args, "index")
        return [int(rows[i]["prompt"]) for i in range(len(rows))]

    first = order(0)
    assert len(first) == 80 and sorted(first[:40]) == sorted(first[40:]) == list(range(40))
    assert first[:40] != list(range(40)) and first[:40] != first[40:]
    assert first == order(0) and first[:40] != order(1)[:40]
