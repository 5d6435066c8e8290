"""A run with `renderer`: the library `renderers` reads the calls and makes the inserted ids, and every proof passes."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
from caller import make_walker, multiply
from datasets import Dataset
from methods import logs
from tokenizers import AddedToken

from lockstep import GRPOConfig, GRPOTrainer
from lockstep.tokens.arrays import Ids
from lockstep.tokens.conversation.family_renderer import FamilyRenderer

sys.path.insert(0, str(Path(__file__).parents[1] / "tokens"))
from families import make_tokenizer
from renderer_families import RENDERED, needs_renderers

OPEN, CLOSE, END = "<minimax:tool_call>", "</minimax:tool_call>", "[e~["
CALLS = [
    f'<invoke name="multiply">\n<parameter name="a">{a}</parameter>\n<parameter name="b">4</parameter>\n</invoke>\n'
    for a in (2, 3)
]
# What may follow a token. The prompt ends with a line break, inside the thinking.
STEPS = {
    "\n": {"12": 1.0},
    "12": {"</think>": 1.0},
    "</think>": {OPEN: 0.7, END: 0.3},
    OPEN: {CALLS[0]: 0.45, CALLS[1]: 0.45, CLOSE: 0.1},
    **{call: {CLOSE: 1.0} for call in CALLS},
    CLOSE: {END: 1.0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = copy.deepcopy(make_tokenizer(RENDERED["minimax-m2"].family))
    tokenizer.add_tokens([AddedToken(call, normalized=False) for call in CALLS])
    model = make_walker(tokenizer, STEPS)
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    made = tmp_path_factory.mktemp("minimax")
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    return str(made)


@needs_renderers
def test_a_run_with_a_renderer_learns_and_every_proof_passes(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, inserted = FamilyRenderer.inserted, []

    def watched(*args: Any) -> Ids | None:
        inserted.append(real(*args))
        return inserted[-1]

    monkeypatch.setattr(FamilyRenderer, "inserted", watched)

    def by_products(completions: list[Any], **_: Any) -> list[float]:
        results = [[m["content"] for m in messages if m["role"] == "tool"] for messages in completions]
        return [float(sum(result in ("8", "12") for result in found)) for found in results]

    config = GRPOConfig(
        output_dir=str(tmp_path),
        renderer="minimax-m2",
        max_tool_calling_iterations=2,
        max_completion_length=300,
        per_device_train_batch_size=8,
        num_generations=8,
        max_steps=2,
        logging_steps=1,
        save_strategy="no",
        use_vllm=False,
        bf16=False,
        learning_rate=1e-3,
        report_to=[],
        seed=3,
    )
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"what is {i} + {i}"}]} for i in range(4)])
    run = GRPOTrainer(folder, reward_funcs=by_products, args=config, train_dataset=rows, tools=[multiply])
    inserted.clear()
    run.train()
    run.close()
    assert len([ids for ids in inserted if ids is not None]) > 4
    for line in logs(run):
        assert line["tools/call_frequency"] > 0.5
        assert line["reward"] > 0
        assert line["grad_norm"] > 0
        assert line["parity/max_abs_gap"] < 1e-3
