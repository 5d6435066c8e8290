"""Online DPO on conversational prompts: the arguments of a reward function and a judge, and the pairs' contents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from methods import PAIRS, logs, make
from transformers import AutoTokenizer

from lockstep.contract.protocol import Engine
from lockstep.rollouts.group import RolloutGroup

Messages = list[dict[str, str]]
SYSTEM = {"role": "system", "content": "hello world"}
# Conversations of several shapes: with a system message, with a history, and with an answer that is continued.
CHATS: list[Messages] = [
    [{"role": "user", "content": "what is 12 + 34"}],
    [SYSTEM, {"role": "user", "content": "the quick brown fox"}],
    [
        {"role": "user", "content": "what is 1 + 1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "what is 2 + 2"},
    ],
    [{"role": "user", "content": "what is 5 + 5"}, {"role": "assistant", "content": "the answer is "}],
]
# The texts that the tiny tokenizer's chat template makes.
WRITTEN = [
    "<|user|>what is 12 + 34<|end|><|assistant|>",
    "<|system|>hello world<|end|><|user|>the quick brown fox<|end|><|assistant|>",
    "<|user|>what is 1 + 1<|end|><|assistant|>2<|end|><|user|>what is 2 + 2<|end|><|assistant|>",
    "<|user|>what is 5 + 5<|end|><|assistant|>the answer is ",
]
SHOWN = [
    "User: what is 12 + 34",
    "System: hello world\n\nUser: the quick brown fox",
    "User: what is 1 + 1\n\nAssistant: 2\n\nUser: what is 2 + 2",
    "User: what is 5 + 5\n\nAssistant: the answer is ",
]
DATA = Dataset.from_dict({"prompt": CHATS, "topic": ["sum", "fox", "sums", "open"]})
FIELDS = {
    **PAIRS,
    "per_device_train_batch_size": 4,
    "max_steps": 2,
    "rehearse_rewards": False,
    "recheck_rewards": False,
}


class Generations:
    """The groups of each generation of a run, and the sign that each completion was learned with."""

    def __init__(self, trainer: Any) -> None:
        self.groups: list[list[RolloutGroup]] = []
        self.signs: list[dict[str, float]] = []
        prepared = trainer.watch.prepared

        def kept(generation: Any, *args: Any) -> None:
            prepared(generation, *args)
            self.groups.append(list(generation.groups))
            self.signs.append({s.name: s.advantages[0] for batch in generation.micro_batches for s in batch})

        trainer.watch.prepared = kept

    def assert_asked_as_written(self, model: str) -> None:
        """Every pair belongs to one prompt with the ids of the chat template, and its texts are the decoded ids."""
        tokenizer = AutoTokenizer.from_pretrained(model)
        for groups in self.groups:
            assert sorted(CHATS.index(group.prompt.source) for group in groups) == [0, 1, 2, 3]
            for group in groups:
                written = WRITTEN[CHATS.index(group.prompt.source)]
                assert group.prompt.ids.tolist() == tokenizer(written)["input_ids"]
                assert len(group.rollouts) == 2
                for rollout in group.rollouts:
                    assert rollout.completion.prompt_ids.tolist() == group.prompt.ids.tolist()
                    said = tokenizer.decode(rollout.completion.token_ids, skip_special_tokens=True)
                    assert rollout.text == said


def sign(generation: dict[str, float], group: RolloutGroup) -> list[float]:
    return [generation[str(rollout.completion.key)] for rollout in group.rollouts]


def test_a_reward_function_is_given_messages_and_the_better_of_each_prompts_two_answers_is_chosen(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    calls: list[dict[str, Any]] = []

    def letters(prompts: list[Messages], completions: list[Messages], **given: Any) -> list[float]:
        calls.append({"prompts": prompts, "completions": completions, **given})
        return [float(sum(map(ord, answer["content"])) % 101) for (answer,) in completions]

    run = make("OnlineDPO", untied_dir, tmp_path, hf_engine, FIELDS, reward_funcs=letters, train_dataset=DATA)
    seen = Generations(run)
    run.train()
    seen.assert_asked_as_written(untied_dir)
    assert len(calls) == len(seen.groups) == 2
    for call, groups, signs, log in zip(calls, seen.groups, seen.signs, logs(run), strict=True):
        rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
        assert call["prompts"] == [group.prompt.source for group, _ in rollouts]
        assert call["completions"] == [
            [{"role": "assistant", "content": rollout.text}] for _, rollout in rollouts
        ]
        assert call["completion_ids"] == [rollout.completion.token_ids.tolist() for _, rollout in rollouts]
        assert call["topic"] == [DATA["topic"][CHATS.index(prompt)] for prompt in call["prompts"]]
        for group in groups:
            first, second = (float(sum(map(ord, rollout.text)) % 101) for rollout in group.rollouts)
            assert list(group.rewards) == [first, second]
            better = 0.0 if first == second else 1.0 if first > second else -1.0
            assert sign(signs, group) == [better, -better]
        assert log["reward"] == pytest.approx(sum(sum(group.rewards) for group in groups) / 8)
    assert any(value == 1.0 for signs in seen.signs for value in signs.values())


def test_a_judge_is_shown_the_conversation_and_both_answers_as_text_and_its_verdict_is_the_pair(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    class Reader:
        """No verdict on an answer that is continued; the second answer after a history, and the first one otherwise."""

        def __init__(self) -> None:
            self.calls: list[tuple[list[str], list[list[str]], bool]] = []

        def judge(
            self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True
        ) -> list[int]:
            self.calls.append((prompts, completions, shuffle_order))
            return [-1 if p == SHOWN[3] else int(p == SHOWN[2]) for p in prompts]

    judge = Reader()
    run = make(
        "OnlineDPO",
        untied_dir,
        tmp_path,
        hf_engine,
        FIELDS,
        reward_funcs=None,
        judge=judge,
        train_dataset=DATA,
    )
    seen = Generations(run)
    run.train()
    seen.assert_asked_as_written(untied_dir)
    assert len(judge.calls) == len(seen.groups) == 2
    verdicts = {0: [1.0, -1.0], 1: [1.0, -1.0], 2: [-1.0, 1.0], 3: [0.0, 0.0]}
    for (prompts, completions, shuffled), groups, signs in zip(
        judge.calls, seen.groups, seen.signs, strict=True
    ):
        places = [CHATS.index(group.prompt.source) for group in groups]
        assert prompts == [SHOWN[place] for place in places]
        assert completions == [[rollout.text for rollout in group.rollouts] for group in groups]
        assert shuffled
        assert [[abs(s) for s in sign(signs, g)] for g in groups] == [
            [abs(v) for v in verdicts[p]] for p in places
        ]
        assert [sign(signs, group) for group in groups] == [verdicts[place] for place in places]
    assert [log["pairs/undecided"] for log in logs(run)] == [0.25, 0.25]
    assert all(log["grad_norm"] > 0 for log in logs(run))
