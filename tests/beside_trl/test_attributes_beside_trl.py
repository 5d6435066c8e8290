"""Every public name of TRL's trainers is there, with its value in TRL; names without a counterpart say why."""

from __future__ import annotations

import ast
import inspect
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
from methods import GROUPS, PAIRS, PROMPTS, by_length, make
from pairs import _loaded, _tokenizer, _trl
from transformers import Trainer

from lockstep.contract.protocol import Engine
from lockstep.run.trainers.trl_names import Absent, TRLNames

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
pytest.importorskip("trl")
METHODS = ("GRPO", "RLOO", "OnlineDPO")
ABSENT = {name: found for name, found in vars(TRLNames).items() if isinstance(found, Absent)}
# Fields with another value than the default, so that an attribute that always returned the default would be seen.
OTHER: dict[str, dict[str, Any]] = {
    "GRPO": {
        **GROUPS, "num_generations_eval": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 30, "repetition_penalty": 1.1,
        "beta": 0.02, "num_iterations": 2, "epsilon": 0.1, "epsilon_high": 0.3, "loss_type": "grpo",
        "importance_sampling_level": "sequence", "scale_rewards": "batch", "mask_truncated_completions": True,
        "off_policy_mask_threshold": 0.4, "top_entropy_quantile": 0.5, "entropy_coef": 0.01,
        "use_adaptive_entropy": True, "log_completions": True, "num_completions_to_print": 2,
        "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 2.0,
        "vllm_importance_sampling_clip_min": 0.5, "vllm_gpu_memory_utilization": 0.2, "shuffle_dataset": False,
        "max_tool_calling_iterations": 3,
    },
    "RLOO": {
        **GROUPS, "beta": 0.03, "epsilon": 0.1, "normalize_advantages": True, "reward_clip_range": [-1.0, 1.0],
        "num_iterations": 2, "mask_truncated_completions": True, "shuffle_dataset": False, "log_completions": True,
    },
    "OnlineDPO": {**PAIRS, "beta": 0.2, "top_k": 20, "vllm_gpu_memory_utilization": 0.4},
}  # fmt: skip
# Names whose value differs, with the reason.
DIFFERENT = {
    "loss_is_scaled_for_ga": "of transformers, not of TRL: here the loss is a share of the step for every method",
    "vllm_mode": "TRL's Online DPO says None where transformers samples",
}


def public_names(kind: type) -> set[str]:
    """What TRL's classes define or set at an instance, on any path of their code."""
    found: set[str] = set()
    for one in kind.__mro__[: kind.__mro__.index(Trainer)]:
        found |= set(vars(one))
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(one)))):
            at_self = (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            )
            if at_self and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return {name for name in found if not name.startswith("_")}


def theirs(method: str, model: str, folder: Path) -> Any:
    config = _trl(f"{method}Config")(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        **OTHER[method],
    )
    return _trl(f"{method}Trainer")(
        model=_loaded(method, model, None),
        reward_funcs=by_length,
        args=config,
        train_dataset=PROMPTS,
        processing_class=_tokenizer(model),
    )


@pytest.mark.parametrize("method", METHODS)
def test_every_public_name_of_trl_is_here_and_has_trls_value(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, method: str
) -> None:
    there = theirs(method, untied_dir, tmp_path / "trl")
    here = make(method, untied_dir, tmp_path, hf_engine, OTHER[method])
    names = public_names(type(there)) | {name for name in vars(there) if not name.startswith("_")}
    missing = {name for name in names if not hasattr(here, name)}
    assert missing <= ABSENT.keys(), "neither an attribute nor a named exception"
    for name in missing:
        with pytest.raises(AttributeError, match=f"has no {name}: it "):
            getattr(here, name)
    own = {name for one in type(here).__mro__ for name in vars(one) if one.__module__.startswith("lockstep")}
    held = (names & own) - missing - DIFFERENT.keys()
    plain = {
        name: value for name in held if hasattr(there, name) and _is_plain(value := getattr(there, name))
    }
    assert len(plain) >= {"GRPO": 35, "RLOO": 22, "OnlineDPO": 15}[method]
    assert {name: getattr(here, name) for name in plain} == plain


def test_every_named_exception_is_a_name_of_trl() -> None:
    known = set().union(*(public_names(_trl(f"{method}Trainer")) for method in METHODS))
    assert ABSENT.keys() <= known


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | list | None) and not callable(value)
