"""Online DPO on conversational prompts beside TRL's: the same ids, calls of the reward function, and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import start
from methods import PROMPTS
from pairs import PAIRS, SAMPLERS, Sampled, assert_same_gradients, both, decided

pytest.importorskip("trl", reason="TRL is not installed here")


def test_online_dpo_on_messages_is_trls_and_gives_its_reward_function_what_trl_gives_it(
    untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = PROMPTS["prompt"]
    seen: list[dict[str, Any]] = []
    plain = SAMPLERS["OnlineDPO"]

    def templated(trainer: Any, sampled: Sampled) -> None:
        """TRL's own conversion of messages to ids, before it gets the completions that our trainer sampled."""
        from trl.data_utils import maybe_apply_chat_template

        plain(trainer, sampled)
        generate = trainer._generate

        def from_messages(model: Any, prompts: list[Any], images: None) -> Any:
            rows = [maybe_apply_chat_template({"prompt": p}, trainer.processing_class) for p in prompts]
            return generate(model, [row["prompt"] for row in rows], images)

        trainer._generate = from_messages

    def watching(completion_ids: list[list[int]], **given: Any) -> list[float]:
        seen.append({**given, "completion_ids": completion_ids})
        return decided(completion_ids)

    monkeypatch.setitem(SAMPLERS, "OnlineDPO", templated)
    data = PROMPTS.from_dict(
        {"prompt": [[{"role": "user", "content": t}] for t in texts], "hint": [f"h{t}" for t in texts]}
    )
    fields = {**PAIRS, "max_steps": 1}
    mine, other = both(
        "OnlineDPO",
        untied_dir,
        tmp_path,
        start("transformers", untied_dir),
        fields,
        reward_funcs=watching,
        train_dataset=data,
    )
    assert mine.logs[0]["pairs/undecided"] == 0
    assert_same_gradients(mine, other)
    first, second = seen
    assert first.keys() - second.keys() == {"log_metric", "log_extra"}
    assert second.keys() <= first.keys()
    columns = ("prompts", "completions", "hint")
    rows = [sorted(zip(*(call[c] for c in columns), strict=True), key=repr) for call in seen]
    assert rows[0] == rows[1]
