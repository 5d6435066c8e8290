"""A sharded policy trains as a whole one does: gradients, curves, proofs, memory, checkpoints, and errors.

FSDP2 and DeepSpeed ZeRO-3 shard it, over gloo. What both share (`shards/model.py`, `shards/passes.py`) is tested more
with FSDP2. The ranks of one size do all the work in one group of processes (`sharded.py`), because starting them
takes longer than the work. CI has two ranks. Four ranks run the same code, and are tested before a release.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accounts import difference
from portions import portion
from sharded_works import ADAPTED, ALONE, FOUR, METHODS, OTHERS, SETTINGS, TWO, ZERO
from test_two_ranks import check_entries, run_ranks, same_logs

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).parent / "sharded.py"
Found = Callable[..., Any]
RANKS = portion((2, 4), lambda ranks: ranks == 2)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


# In CI, `tests/server/test_two_ranks_on_a_server.py` trains with DeepSpeed.
@pytest.fixture(scope="module", params=["fsdp", pytest.param("deepspeed", marks=pytest.mark.release)])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "deepspeed":
        pytest.importorskip("deepspeed")
    return str(request.param)


@pytest.fixture(scope="module")
def folder(root: Path, kind: str) -> Path:
    return root / kind


@pytest.fixture(scope="module")
def start(untied_dir: str, root: Path) -> Callable[[str, int, bool], Path]:
    """Does all the work of one group of ranks once, and returns its folder. 0 ranks: the kind is "alone"."""

    @functools.cache
    def started(kind: str, ranks: int, others: bool) -> Path:
        if kind == "deepspeed":
            # It goes on from a checkpoint of FSDP2.
            started("fsdp", 2, False)
        logs = root / kind / f"logs-{ranks}-{others}"
        logs.mkdir(parents=True)
        works = (
            OTHERS
            if others
            else {"alone": {0: ALONE}, "fsdp": {2: TWO, 4: FOUR}, "deepspeed": ZERO}[kind][ranks]
        )
        names = [str(rank) for rank in range(max(ranks, 1))]
        words = [kind, str(ranks), untied_dir, str(root / kind), *works]
        run_ranks([sys.executable, str(SCRIPT)], words, logs, [0] * len(names), names)
        return root / kind

    return started


@pytest.fixture(scope="module")
def found(start: Callable[[str, int, bool], Path], kind: str) -> Found:
    """The results of a piece of work on one of `ranks` ranks, or in a single process without shards (0 ranks)."""

    @functools.cache
    def of(name: str, rank: int = 0, ranks: int = 2) -> Any:
        if kind == "deepspeed" and ranks and name not in ZERO[ranks]:
            pytest.skip("with FSDP2 only")
        place = start(kind if ranks else "alone", ranks, name in OTHERS)
        return torch.load(place / f"{name.replace(':', '-')}.{rank}-{ranks}.pt")

    return of


def same_run(one: dict[str, Any], other: dict[str, Any], limit: float = 1e-6) -> None:
    for expected, got in zip(one["gradients"], other["gradients"], strict=True):
        assert difference(expected, got) <= limit
    assert difference(one["weights"], other["weights"]) <= 1e-6
    assert one["tokens"] == other["tokens"]
    same_logs(*(_curves(run) for run in (one, other)))


def _curves(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The logs of a run without its proofs' figures: they have other packs' rounding, or shards lack the proof."""
    return [
        {n: v for n, v in log.items() if not n.startswith(("parity/", "checked/"))} for log in run["logs"]
    ]


@pytest.mark.parametrize("case", portion([*METHODS, *OTHERS, *ADAPTED], lambda case: case not in OTHERS))
def test_two_ranks_with_a_sharded_model_take_the_steps_of_one_without(found: Found, case: str) -> None:
    for rank in (0, 1):
        # Adapters are float32, also on these float64 models.
        own = found(case, rank)
        same_run(found(case, ranks=0), own, 1e-5 if case in ADAPTED else 1e-6)


@pytest.mark.parametrize("setting", SETTINGS)
def test_they_do_with_filters_evaluations_interrupted_thinking_and_generations_ahead(
    found: Found, folder: Path, setting: str
) -> None:
    ranks = [found(setting, rank) for rank in (0, 1)]
    alone = found(setting, ranks=0)
    for own in ranks:
        same_run(alone, own)
    if setting == "evaluated":
        assert sum("eval_reward" in log for log in alone["logs"]) == 2
    if setting == "ahead":
        assert any(log.get("staleness/max", 0) > 0 for log in alone["logs"])


@pytest.mark.release
def test_four_ranks_do_too(found: Found) -> None:
    for rank in range(4):
        same_run(found("grpo-grpo", ranks=0), found("grpo-grpo", rank, 4))


def test_gradient_checkpointing_changes_no_step(found: Found) -> None:
    for rank in (0, 1):
        same_run(found("grpo-grpo", ranks=0), found("checkpointed", rank))


def test_a_rank_with_fewer_packs_plays_the_rest(found: Found) -> None:
    assert found("uneven", 0)["played"] > found("uneven", 1)["played"]
    for rank in (0, 1):
        same_run(found("grpo-grpo", ranks=0), found("uneven", rank))


def test_in_float32_a_sharded_model_takes_the_steps_of_ranks_that_each_hold_the_whole(found: Found) -> None:
    for rank in (0, 1):
        whole, own = (found("float32", rank)[kind] for kind in ("whole", "sharded"))
        assert difference(whole["gradients"][0], own["gradients"][0]) <= 1e-6
        assert difference(whole["weights"], own["weights"]) <= 1e-6
        same_logs(*(_curves(run) for run in (whole, own)))


def test_the_curves_are_of_sampled_tokens_that_both_sides_score_alike(found: Found, folder: Path) -> None:
    for log in found("grpo-grpo")["logs"][:2]:
        assert log["parity/checked_tokens"] > 0
        assert log["grad_norm"] > 0.05
    entries = check_entries(folder / "grpo-grpo")
    assert [entry["kind"] for entry in entries] == ["start", "step", "unproven"]


def test_a_rank_plays_the_forwards_of_the_others_without_weight(found: Found) -> None:
    # The canary is the owner's alone, so that the other rank has no forward of its own for it.
    assert found("grpo-grpo", 1)["played"] > found("grpo-grpo", 0)["played"]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("part", ["weights", "gradients", "moments"])
def test_each_rank_holds_its_share_of_weights_gradients_and_moments(
    found: Found, part: str, ranks: int
) -> None:
    alone = found("memory", ranks=0)[part]
    held = [found("memory", rank, ranks)[part] for rank in range(ranks)]
    assert sum(held) == alone
    # Tensors with few rows cannot be cut evenly.
    assert max(held) <= 1.02 * alone / ranks


@pytest.mark.parametrize("ranks", RANKS)
def test_a_checkpoint_of_two_ranks_goes_on_to_the_bit(found: Found, folder: Path, ranks: int) -> None:
    saved, own = found("saved"), found("resumed", ranks=ranks)
    exported = _exported(folder / "saved-2" / "checkpoint-2")
    for name, tensor in own["loaded"].items():
        assert torch.equal(tensor, exported[name]), name
    # Four ranks add up gradients in another order.
    allowed = 0.0 if ranks == 2 else 1e-6
    assert difference(saved["weights"], own["weights"]) <= allowed
    assert difference(saved["critic"], own["critic"]) <= allowed


def test_a_checkpoint_of_fsdp_goes_on_with_deepspeed(root: Path, found: Found, kind: str) -> None:
    if kind == "fsdp":
        pytest.skip("it is the source")
    for rank in (0, 1):
        own = found("crossed", rank)
        saved = torch.load(root / "fsdp" / f"saved.{rank}-2.pt")
        assert difference(saved["weights"], own["weights"]) <= 1e-6
        assert difference(saved["critic"], own["critic"]) <= 1e-6


def _exported(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, put together from the files of the ranks by their own headers."""
    from safetensors import safe_open

    parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for path in sorted((checkpoint / "shards").glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():  # noqa: SIM118
                if name.startswith("model.policy."):
                    start = offsets[name]["saved_offsets"][0]
                    parts.setdefault(name.removeprefix("model.policy."), []).append(
                        (start, file.get_tensor(name))
                    )
    return {name: torch.cat([t for _, t in sorted(own, key=lambda p: p[0])]) for name, own in parts.items()}


@pytest.mark.parametrize("place", ["export-2", "saved-2/checkpoint-4"])
def test_the_model_of_a_sharded_run_loads_with_transformers(found: Found, folder: Path, place: str) -> None:
    from transformers import AutoModelForCausalLM

    trained = found("saved")["weights"]
    model = AutoModelForCausalLM.from_pretrained(folder / place, dtype=torch.float32)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert all(torch.equal(p, trained[name]) for name, p in model.named_parameters())


def test_a_model_that_stays_gathered_is_refused_before_the_optimizer(found: Found) -> None:
    for rank in (0, 1):
        assert found("stale", rank)["raised"] == "ProofError"
        assert "proof 'shards' failed" in found("stale", rank)["message"]


@pytest.mark.parametrize("where", ["before", "between"])
def test_a_rank_that_fails_plays_its_passes_to_the_end(found: Found, where: str) -> None:
    one, other = found(f"fails:{where}", 0), found(f"fails:{where}", 1)
    assert one["raised"] == "LockstepError"
    assert re.search("^rank 1: .*ZeroDivisionError: by design", one["message"])
    # `learn` names what the libraries below it raise.
    assert other["raised"] == ("ZeroDivisionError" if where == "before" else "LockstepError")


def test_a_rank_that_fails_inside_a_forward_is_told_by_the_others_in_bounded_time(found: Found) -> None:
    one, other = found("fails:inside", 0), found("fails:inside", 1)
    assert re.search("^rank 1: .*ZeroDivisionError: by design", one["message"])
    assert other["raised"] == "LockstepError"


def test_what_is_not_supported_is_refused_by_name(found: Found, kind: str) -> None:
    for name, message in found("refused").items():
        assert f"{name}=" in message
        assert f"not supported with {'FSDP' if kind == 'fsdp' else 'DeepSpeed ZeRO-3'} yet" in message
    assert len(found("refused")) == 2
