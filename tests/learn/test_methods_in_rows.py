"""Every method with a model of one row per completion: loss and gradients of the padded reference; proven runs.

Old log-probs, reference, pairs, critic and adapter work with plain rows as they do with trees.

A loss gets the same columns from rows as from trees. CI therefore runs the first variant of each method, and the
variants that use what a pack has beside the log-probs of its tokens: entropies, and sums over whole completions. The
others are run before a release.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import check, config, shapes
from draws import hold
from hypothesis import strategies as st
from method_variants import FIRST, VARIANTS, fit, sizes_of
from methods import FIELDS, logs, lora, make, parameters
from portions import portion
from subjects import ROWS, in_double
from tiny import make_model, make_stateful, save

from lockstep.learn.scoring import why_plain_rows
from lockstep.models.adapters import causal_model

SUBJECTS = {kind: in_double(kind) for kind in ROWS}


OF_PACKS = {
    "GRPO: dapo, KL, entropy, quantile",
    "GRPO: GSPO",
    "GRPO: geometric mask",
    "GRPO: ScaleRL",
    "ReinforcePP: {'beta': 0.2, 'baseline': 'group', 'mask_truncated_completions': True}",
}


@pytest.mark.parametrize("name", portion(VARIANTS, lambda name: name in FIRST or name in OF_PACKS))
def test_loss_and_gradients_equal_the_padded_reference(name: str) -> None:
    variant = VARIANTS[name]

    def same(drawn: dict[str, Any], kind: str) -> None:
        # The shortest of these sequences has 4 ids.
        assert why_plain_rows(causal_model(SUBJECTS[kind].model), 4) is not None
        shape = fit(variant, drawn)
        run = config(variant.config, shape, **variant.fields)
        check(SUBJECTS[kind], variant.objective(run), shape, variant.reference(run))

    hold(
        name,
        2,
        same,
        drawn=shapes(sizes_of(variant), trees=True),
        kind=st.sampled_from(sorted(SUBJECTS)),
    )


BUILDS = {"sliding": lambda: make_model("mistral", sliding_window=6), "stateful": make_stateful}
RUNS = [("sliding", method, False) for method in FIELDS]
RUNS += [
    ("sliding", "GRPO", True),
    ("sliding", "OnlineDPO", True),
    ("stateful", "OnlineDPO", False),
    ("stateful", "PPO", False),
]


@pytest.mark.parametrize(("kind", "method", "adapter"), RUNS)
def test_a_run_is_proven_and_diverges_from_its_reference_by_nothing_at_first(
    tmp_path: Path, kind: str, method: str, adapter: bool
) -> None:
    fields = FIELDS[method] | ({} if method == "OnlineDPO" else {"beta": 0.1})
    fields |= {"max_steps": 3, "use_vllm": False, "vllm_max_model_length": 100}
    path = str(save(BUILDS[kind](), tmp_path / "model"))
    run = make(method, path, tmp_path / "run", None, fields, peft_config=lora() if adapter else None)
    before = parameters(run.model)
    try:
        run.train()
    finally:
        run.close()
    assert run.loop.policy().plain_rows
    assert any(not torch.equal(value, before[name]) for name, value in parameters(run.model).items())
    assert all(log["parity/checked_tokens"] > 0 and log["parity/max_abs_gap"] < 1e-3 for log in logs(run))
    name = "objective/kl" if method == "OnlineDPO" else "kl"
    first, *later = [log[name] for log in logs(run) if name in log]
    assert abs(first) < 1e-4
    assert any(abs(value) > 1e-4 for value in later)
