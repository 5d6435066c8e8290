"""The script of TRL's issue 6228, Online DPO on a server, as users run it: every prompt is answered twice, and pairs are pairs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from conftest import VLLM
from servers import KEY, Server

from lockstep.rollouts.group import RolloutGroup
from lockstep.server.keys import KEY_VARIABLE
from lockstep.training.online_dpo import OnlineDPOObjective
from lockstep.training.packing import TrainingSequence

pytestmark = VLLM
STEPS, BATCH = 3, 4


def script() -> Any:
    path = Path(__file__).parents[2] / "examples" / "online_dpo.py"
    spec = importlib.util.spec_from_file_location("online_dpo_script", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("cap", [10**6, 14], ids=["lengths differ", "many ties"])
def test_every_prompt_is_answered_twice_and_the_longer_answer_is_chosen_within_it(
    server: Server, untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cap: int
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.setattr("lockstep.training.config.has_fast_bf16", lambda: False)
    module = script()
    asked: list[tuple[str, str]] = []
    learned: list[tuple[list[RolloutGroup], list[TrainingSequence]]] = []
    length, advise = module.longer, OnlineDPOObjective.advise

    def recorded(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        asked.extend(zip(prompts, completions, strict=True))
        return [min(value, float(cap)) for value in length(completions, **columns)]

    def watched(objective: Any, groups: Any, sequences: Any) -> Any:
        found = advise(objective, groups, sequences)
        learned.append((list(groups), found))
        return found

    monkeypatch.setattr(module, "longer", recorded)
    monkeypatch.setattr(OnlineDPOObjective, "advise", watched)
    words = [untied_dir, "--server", server.url, "--output_dir", str(tmp_path), "--max_steps", str(STEPS)]
    run = module.main([*words, "--max_new_tokens", "10"])

    assert run.state.global_step == STEPS == len(learned)
    assert len(asked) == STEPS * BATCH * 2
    decided = ties = 0
    for step, (groups, sequences) in enumerate(learned):
        part = asked[step * BATCH * 2 : (step + 1) * BATCH * 2]
        assert len(groups) == len({group.prompt.prompt_id for group in groups}) == BATCH
        assert [prompt for prompt, _ in part] == [group.prompt.source for group in groups for _ in range(2)]
        assert [text for _, text in part] == [r.text for group in groups for r in group.rollouts]
        by_name = {s.name: s for s in sequences}
        assert len(by_name) == BATCH * 2
        for group in groups:
            pair = [by_name[str(r.completion.key)] for r in group.rollouts]
            assert {s.prompt_ids for s in pair} == {group.prompt.ids}
            assert {s.unit for s in pair} == {group.prompt.prompt_id}
            assert [s.completion_ids for s in pair] == [r.completion.token_ids for r in group.rollouts]
            lengths = [min(len(r.text), cap) for r in group.rollouts]
            signs = [set(s.advantages) for s in pair]
            if lengths[0] == lengths[1]:
                ties += 1
                assert signs == [{0.0}, {0.0}]
            else:
                decided += 1
                assert signs == ([{1.0}, {-1.0}] if lengths[0] > lengths[1] else [{-1.0}, {1.0}])
    assert decided if cap > 100 else ties
    undecided = [log["pairs/undecided"] for log in run.state.log_history if "loss" in log]
    assert sum(undecided) * BATCH == pytest.approx(ties)
    logged = [log for log in run.state.log_history if "loss" in log]
    assert all(log["parity/max_abs_gap"] < 1e-3 for log in logged)
