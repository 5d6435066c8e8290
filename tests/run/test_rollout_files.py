"""The rollouts that a run keeps: every value as the trainer had it, within a limit, whole after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, load_dataset
from tiny import CONTEXT

import lockstep.run.files.rollouts as writer
from lockstep import GRPOConfig, GRPOTrainer
from lockstep.cli.main import main
from lockstep.contract.protocol import Completion, Engine, RequestKey
from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.errors import InputError
from lockstep.learn.generation import Generation
from lockstep.learn.sequence import TrainingSequence
from lockstep.report.kept_rollouts import KeptRollout, read_facts, read_file, read_rollouts, rollout_files
from lockstep.rollouts.group import Prompt, Rollout, RolloutGroup, TurnEnd
from lockstep.run.files.rollouts import keep_rollouts, remove_after, thin_out
from lockstep.tokens.chat import load_tokenizer
from lockstep.watch.plain_forward import sampled_logps

PROMPTS = Dataset.from_dict({"prompt": [f"what is {i} + {i}" for i in range(8)]})


def by_length(completion_ids: list[list[int]], log_extra: Any, **_: Any) -> list[float | None]:
    log_extra("first", [ids[0] for ids in completion_ids])
    return [None if ids[0] % 7 == 0 else float(len(ids) + ids[0] % 7) for ids in completion_ids]


@pytest.fixture(scope="module")
def engine(untied_dir: str) -> Engine:
    return TransformersEngine(
        untied_dir, load_tokenizer(untied_dir), dtype=torch.float32, max_model_len=CONTEXT
    )


def trainer(model: str, folder: Path, engine: Engine, **fields: Any) -> GRPOTrainer:
    base: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
    }
    base |= {
        "max_steps": 3,
        "logging_steps": 1,
        "save_steps": 1,
        "bf16": False,
        "learning_rate": 1e-3,
        "report_to": "none",
    }
    base |= {"temperature": 0.75, "recheck_rewards": False}
    return GRPOTrainer(
        model, by_length, GRPOConfig(str(folder), **{**base, **fields}), PROMPTS, engine=engine
    )


@pytest.fixture(scope="module")
def run(untied_dir: str, tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> GRPOTrainer:
    made = trainer(untied_dir, tmp_path_factory.mktemp("run"), engine)
    made.train()
    return made


def same(one: KeptRollout, other: KeptRollout) -> bool:
    values = [[getattr(r, name) for name in KeptRollout.__slots__] for r in (one, other)]
    return all(
        np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in zip(*values, strict=True)
    )


def test_each_step_is_a_file_with_every_value_of_its_generation(run: GRPOTrainer) -> None:
    folder = Path(run.args.output_dir)
    assert [step for step, _ in rollout_files(folder)] == [1, 2, 3]
    assert [r.step for r in read_rollouts(folder)] == [1] * 8 + [2] * 8 + [3] * 8
    generation, kept = run.loop.generation, list(read_rollouts(folder, [3]))
    assert generation is not None
    advantages = {s.name: s.advantages for batch in generation.micro_batches for s in batch}
    rollouts = [(group, r) for group in generation.groups for r in group.rollouts]
    for (group, rollout), found in zip(rollouts, kept, strict=True):
        branch = rollout.completion
        assert found.name == str(rollout.key)
        assert (found.prompt, found.completion) == (group.prompt.source, rollout.text)
        for name, value in {
            "prompt_ids": branch.prompt_ids,
            "completion_ids": branch.token_ids,
            "logprobs": branch.logprobs,
            "weight_versions": branch.weight_versions,
            "advantages": advantages[found.name],
        }.items():
            assert np.array_equal(getattr(found, name), value), name
        assert found.sampled.all()
        assert found.scores == dict(rollout.scores)
        assert found.reward == (rollout.reward if rollout.scored else None)
        assert found.extra == {"first": branch.token_ids[0]}
        assert (found.finish_reason, list(found.finish_reasons)) == (
            branch.finish_reason,
            list(rollout.finish_reasons),
        )
        assert found.advantage == pytest.approx(float(advantages[found.name].mean()))
    assert {found.reward is None for found in kept} == {True, False}


def test_the_trainers_log_probs_are_those_of_the_weights_that_sampled(
    run: GRPOTrainer, untied_dir: str, engine: Engine
) -> None:
    kept = [r for r in read_rollouts(Path(run.args.output_dir), [1]) if r.policy_logprobs is not None]
    assert len(kept) >= 4
    start = trainer(untied_dir, Path(run.args.output_dir) / "other", engine)
    for found in kept:
        completion = Completion(
            RequestKey(found.prompt_id, found.sample), found.prompt_ids, found.completion_ids, found.logprobs,
            found.weight_versions, "stop",
        )  # fmt: skip
        own = sampled_logps(
            start.model, completion, start.proofs.distribution, start.config.precision
        ).numpy()
        assert np.abs(own - found.policy_logprobs).max() < 1e-5
        assert found.gaps is not None
        assert 0 < np.abs(found.gaps).max() < 1e-4


def test_the_facts_say_how_the_tokens_were_sampled(run: GRPOTrainer) -> None:
    facts = read_facts(rollout_files(Path(run.args.output_dir))[1].path)
    assert (facts["format"], facts["step"], facts["version"], facts["method"]) == (1, 2, 1, "GRPO")
    assert (facts["sampling"]["temperature"], facts["sampling"]["max_tokens"]) == (0.75, 8)


def test_datasets_reads_all_files_as_one_table(run: GRPOTrainer, tmp_path: Path) -> None:
    files = str(Path(run.args.output_dir) / "rollouts" / "*.parquet")
    table = load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path))
    assert len(table) == 24
    assert {"prompt", "completion", "completion_ids", "logprobs", "rewards/by_length", "advantage"} <= set(
        table.column_names
    )
    assert (
        table[0]["completion_ids"] == next(read_rollouts(Path(run.args.output_dir))).completion_ids.tolist()
    )


def test_a_resumed_run_keeps_the_same_rollouts(
    run: GRPOTrainer, untied_dir: str, tmp_path: Path, engine: Engine
) -> None:
    first = trainer(untied_dir, tmp_path, engine)
    first.train()
    (tmp_path / "rollouts" / ".rollouts_000009.parquet.new").write_bytes(b"half a file")
    again = trainer(untied_dir, tmp_path, engine)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert len(list((tmp_path / "rollouts").iterdir())) == 3
    pairs = zip(read_rollouts(Path(run.args.output_dir)), read_rollouts(tmp_path), strict=True)
    assert all(same(one, other) for one, other in pairs)


def test_none_are_kept_where_the_limit_is_zero(untied_dir: str, tmp_path: Path, engine: Engine) -> None:
    trainer(untied_dir, tmp_path, engine, rollouts_size_limit=0, max_steps=1).train()
    assert not (tmp_path / "rollouts").exists()


def test_the_command_pages_through_kept_rollouts(
    run: GRPOTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(run.args.output_dir)
    kept = [r for r in read_rollouts(Path(folder), [2]) if r.reward is not None]
    best = max(kept, key=lambda r: r.reward or 0.0)
    assert main(["rollouts", folder, "--step", "2", "--best"]) == 0
    first, *_ = capsys.readouterr().out.split("\n\n── ")
    assert first.startswith(f"── 1/{len(kept)}   step 2, ")
    assert f"reward {best.reward:.4g} ──\n\n{best.prompt}\n\n→ " in first
    assert f"score by_length: {best.reward:.4g}\nfirst: " in first
    assert "parity gap: " in first
    assert main(["rollouts", folder, "--step", "9"]) == 2
    assert "has no rollouts of step 9" in capsys.readouterr().err


# ---- without a run
# ------------------------------------------------------------------------------------------------------


def conversation() -> Generation:
    """A rollout of two branches. Its first branch has two turns, with an inserted id between them."""
    key = RequestKey("p", 0)
    first = Completion(key, [1, 2], [5, 6, 7], [-1.0, 0.0, -2.0], [3, 3, 4], "stop", [True, False, True])
    second = Completion(RequestKey("p", 0, 2), [1, 2, 9], [8], [-3.0], [4], "length")
    turns = (TurnEnd(0, 1, "stop"), TurnEnd(0, 3, "stop"), TurnEnd(1, 1, "length"))
    notes = {"messages": [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]}
    rollout = Rollout(first, "said", {"f": 1.0, "g": None}, 1.0, {}, (second,), turns, notes)
    failed = Rollout(
        Completion(RequestKey("p", 1), [1, 2], [], [], [], "stop"),
        "",
        {"f": None, "g": None},
        notes={"failed": "why"},
    )
    sequences = (
        TrainingSequence(
            str(first.key),
            [1, 2],
            [5, 6, 7],
            [-1.0, -2.0],
            [0.5, -0.5],
            sampled=[True, False, True],
            rollout="p#0",
        ),
        TrainingSequence(str(second.key), [1, 2, 9], [8], [-3.0], [2.0], rollout="p#0"),
    )
    source = [
        {"role": "user", "content": [{"type": "image", "image": object()}, {"type": "text", "text": "what?"}]}
    ]
    return Generation(4, (RolloutGroup(Prompt("p", [1, 2], source), (rollout, failed)),), (sequences,))


def test_inserted_ids_have_zeros_and_each_branch_has_its_own_turns(tmp_path: Path) -> None:
    path = keep_rollouts(tmp_path, conversation(), {"p#0": np.float32([-1.5, -2.25])}, {"sampling": {}}, 1.0)
    first, second, failed = read_file(path)
    assert (first.step, second.branch, second.sample) == (5, 1, 0)
    assert first.sampled.tolist() == [True, False, True]
    assert first.advantages is not None
    assert first.policy_logprobs is not None
    assert first.gaps is not None
    assert first.advantages.tolist() == [0.5, 0.0, -0.5]
    assert first.policy_logprobs.tolist() == [-1.5, 0.0, -2.25]
    assert first.gaps.tolist() == [0.5, 0.0, 0.25]
    assert (list(first.turn_ends), list(second.turn_ends), list(second.finish_reasons)) == (
        [1, 3],
        [1],
        ["length"],
    )
    assert first.advantage == second.advantage == pytest.approx(2 / 3)
    assert second.policy_logprobs is None
    assert first.messages == [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]
    assert first.prompt[0]["content"] == [
        {"type": "image", "image": "<object>"},
        {"type": "text", "text": "what?"},
    ]
    assert (failed.failed, failed.reward, failed.advantages, failed.advantage) == ("why", None, None, None)
    assert first.scores == {"f": 1.0, "g": None}
    assert first.extra == {}, "no function logged anything"


def test_the_command_shows_conversations_branches_and_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_rollouts(tmp_path, conversation(), {}, {}, 1.0)
    assert main(["rollouts", str(tmp_path)]) == 0
    pages = capsys.readouterr().out
    for text in (
        "[user] <image>what?",
        "[assistant] a\n[tool] b",
        "── 2/3   step 5, p#0, branch 1   reward 1 ──",
        "2 sampled tokens, ended by stop\nscore f: 1\nscore g: none\nadvantage: +0.667",
        "── 3/3   step 5, p#1   no reward ──",
        "failed: why",
    ):
        assert text in pages, text


def test_a_write_that_fails_leaves_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_rollouts(tmp_path, conversation(), {}, {}, 1.0)
    before = rollout_files(tmp_path)[0].path.read_bytes()

    def full(table: Any, file: Any, **_: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer.pq, "write_table", full)
    with pytest.raises(OSError, match=r"rollouts_000005\.parquet"):
        keep_rollouts(tmp_path, conversation(), {}, {}, 1.0)
    assert [path.read_bytes() for path in (tmp_path / "rollouts").iterdir()] == [before]


def files_of(folder: Path, sizes: dict[int, int]) -> None:
    (folder / "rollouts").mkdir()
    for step, size in sizes.items():
        (folder / "rollouts" / f"rollouts_{step:06d}.parquet").write_bytes(bytes(size))


def test_over_the_limit_the_first_the_last_and_evenly_spread_files_stay(tmp_path: Path) -> None:
    files_of(tmp_path, dict.fromkeys(range(1, 18), 1000))
    thin_out(tmp_path, 5e-6)
    steps = [step for step, _ in rollout_files(tmp_path)]
    assert (len(steps), steps[0], steps[-1]) == (5, 1, 17)
    assert max(np.diff(steps)) <= 2 * min(np.diff(steps))
    thin_out(tmp_path, 1e-9)
    assert [step for step, _ in rollout_files(tmp_path)] == [17]


def test_later_steps_are_removed_and_earlier_ones_stay(tmp_path: Path) -> None:
    files_of(tmp_path, {2: 1, 4: 1, 6: 1})
    remove_after(tmp_path, 4)
    assert [step for step, _ in rollout_files(tmp_path)] == [2, 4]
    remove_after(tmp_path / "none", 4)


def test_a_damaged_or_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    files_of(tmp_path, {2: 10})
    with pytest.raises(InputError, match=r"rollouts_000002\.parquet cannot be read"):
        list(read_rollouts(tmp_path))
    with pytest.raises(InputError, match="no rollouts of step 7; it has those of 1 steps, 2 to 2"):
        list(read_rollouts(tmp_path, [7]))


@pytest.mark.parametrize("prompt", ["0", "false", '["a"]', "{}"])
def test_a_prompt_that_is_no_prompt_is_one_clear_error(tmp_path: Path, prompt: str) -> None:
    path = keep_rollouts(tmp_path, conversation(), {}, {"sampling": {}}, 1.0)
    table = pq.read_table(path)
    changed = pa.array([prompt] * len(table), table["prompt"].type)
    pq.write_table(table.set_column(table.column_names.index("prompt"), "prompt", changed), path)
    with pytest.raises(InputError, match=r"is not a file of rollouts that this version can read .*prompt is"):
        list(read_file(path))
