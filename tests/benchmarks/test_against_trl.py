"""The arithmetic of the comparison with TRL: the input of each program, which steps count, and figures from times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

# Imported as a package, because other modules could have the same names.
from benchmarks.against_trl import floors as bounds
from benchmarks.against_trl.figures import check_tokens, growth, learning_halves, measured, whole_steps
from benchmarks.against_trl.plot import drawing
from benchmarks.against_trl.tool_model import TURN, make_tool_model
from benchmarks.against_trl.workloads import (
    WORKLOADS,
    Recorded,
    Workload,
    _of_length,
    prompts,
    read_rollouts,
    reward,
    tool,
    workload,
    write_rollouts,
)

MACHINE = {"flops": {"float32": 1e9, "bfloat16": 4e9}, "bytes": 1e8}
WORK = Workload(2, 3, 5, None, 6, 6)


def step(seconds: float, **changes: Any) -> dict[str, Any]:
    """A step as `play.py` reports it."""
    shares = {
        "generate": 0.4,
        "forward_backward": 0.5,
        "reference": 0.0,
        "verify": 0.0,
        "optimizer": 0.05,
        "sync": 0.0,
    }
    phases = {phase: share * seconds for phase, share in shares.items()}
    said = {
        "step": seconds,
        "rollout": 0.4 * seconds,
        "peak_bytes": 10,
        "phases": phases,
        "sampled_tokens": 30,
    }
    work = {"positions": 100, "still_positions": 0, "all_positions": 100, "still_tokens": 0}
    return {**said, **work, **changes}


# ---- what is given
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
def test_trls_batches_leave_no_completion_over(name: str) -> None:
    found = workload(name)
    assert found.sequences % found.trl_batch == 0
    assert found.sequences % found.trl_learning_batch == 0


@pytest.mark.parametrize("tokens", [1, 2, 17, 512])
def test_prompts_are_exactly_as_long_as_asked_and_their_own(tokens: int) -> None:
    def words(text: str) -> dict[str, list[str]]:
        return {"input_ids": text.replace(".", " .").split()}

    texts = [_of_length(words, tokens, seed) for seed in range(3)]
    assert [len(words(text)["input_ids"]) for text in texts] == [tokens] * 3
    assert tokens < 17 or len(set(texts)) == 3


def test_an_agents_rollout_fills_1024_tokens_of_context(tmp_path: Path) -> None:
    model, work = make_tool_model(tmp_path / "model", "tiny"), workload("agent")
    tokenizer = AutoTokenizer.from_pretrained(model)
    look = tool(work)

    def ids(messages: list[dict[str, Any]], *, ends: bool = False) -> list[int]:
        text = tokenizer.apply_chat_template(
            messages, tools=[look], tokenize=False, add_generation_prompt=not ends
        )
        return tokenizer(text)["input_ids"]

    asked = prompts(work, model)
    assert {len(ids(one)) for one in asked} == {work.prompt_tokens}
    assert len({str(one) for one in asked}) == work.prompts
    # What a result adds: the tool's message and the beginning of the next turn.
    turn = {"role": "assistant", "content": "x"}
    added = len(ids([*asked[0], turn, {"role": "tool", "content": look(1)}])) - len(
        ids([*asked[0], turn], ends=True)
    )
    assert work.inserted == work.calls * added
    assert work.prompt_tokens + work.tokens + work.inserted == 1024
    assert work.tokens == (work.calls + 1) * TURN


def test_rewards_differ_between_completions_and_depend_on_nothing_else() -> None:
    rewards = reward([[1, 2], [2, 2], [101, 3]], prompts=["a", "b", "c"])
    assert rewards == [3 / 101, 4 / 101, 3 / 101]


def test_rollouts_are_read_as_they_were_written(tmp_path: Path) -> None:
    rollouts = [
        Recorded("a prompt", [1, 2], [3], [-0.1234567890123]),
        Recorded("another", [4], [5, 6], [0.0, -1e-9]),
    ]
    write_rollouts(tmp_path / "rollouts", rollouts)
    assert read_rollouts(tmp_path / "rollouts") == rollouts


# ---- floors
# -----------------------------------------------------------------------------------------------------------


def test_the_matrices_counted_are_those_of_the_model() -> None:
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**shape, **heads))
    layers = sum(p.numel() for name, p in model.named_parameters() if name.endswith("proj.weight"))
    assert (layers, model.lm_head.weight.numel()) == (bounds._TRUNK, bounds._HEAD)
    assert sum(p.numel() for p in model.parameters()) == bounds._WEIGHTS


def floors_of(*steps: dict[str, Any], dtype: str = "float32", **machine: Any) -> dict[str, float]:
    return bounds.floors(WORK, dtype, {**MACHINE, **machine}, list(steps))


def test_a_floor_is_of_the_median_step_not_of_the_first() -> None:
    steps = [step(1.0, positions=count, all_positions=count) for count in (400, 100, 110, 90, 100)]
    assert floors_of(*steps) == floors_of(step(1.0))
    assert floors_of(steps[0])["forward_backward"] > floors_of(step(1.0))["forward_backward"]


def test_learning_multiplies_every_position_three_times_and_sampled_tokens_with_the_head() -> None:
    # There are two operations per weight and multiplication; 2 × 3 × 5 tokens are sampled.
    operations = 3 * 2 * (100 * bounds._TRUNK + 30 * bounds._HEAD)
    assert floors_of(step(1.0))["forward_backward"] == pytest.approx(operations / 1e9)
    assert floors_of(step(1.0), dtype="bfloat16")["forward_backward"] == pytest.approx(operations / 4e9)


def test_what_is_only_verified_is_multiplied_once_and_not_learned_from() -> None:
    found = floors_of(step(1.0, positions=60, still_positions=50, still_tokens=10))
    assert found["verify"] == pytest.approx(2 * (50 * bounds._TRUNK + 10 * bounds._HEAD) / 1e9)
    assert found["forward_backward"] == pytest.approx(6 * (60 * bounds._TRUNK + 20 * bounds._HEAD) / 1e9)


def test_a_reference_has_a_floor_where_a_step_has_one() -> None:
    assert floors_of(step(1.0))["reference"] == 0
    phases = {"generate": 0.1, "forward_backward": 0.1, "reference": 0.1}
    found = floors_of(step(1.0, all_positions=80, phases=phases))["reference"]
    assert found == pytest.approx(2 * (80 * bounds._TRUNK + 30 * bounds._HEAD) / 1e9)


def test_generation_is_bound_by_products_or_by_reading_the_weights_a_token() -> None:
    products = 2 * 30 * (bounds._TRUNK + bounds._HEAD) / 1e9
    assert floors_of(step(1.0), bytes=1e12)["generate"] == pytest.approx(products)
    assert floors_of(step(1.0), bytes=1e6)["generate"] == pytest.approx(5 * 4 * bounds._WEIGHTS / 1e6)
    assert floors_of(step(1.0), bytes=1e6, dtype="bfloat16")["generate"] == pytest.approx(
        5 * 2 * bounds._WEIGHTS / 1e6
    )


def test_what_a_tool_inserts_is_multiplied_by_the_trunk_too() -> None:
    work = Workload(2, 3, 5, None, 6, 6, calls=2, result_tokens=17)
    found = bounds.floors(work, "float32", {**MACHINE, "bytes": 1e12}, [step(1.0)])["generate"]
    inserted = 6 * 2 * (17 + 3)
    assert found == pytest.approx(2 * (30 * (bounds._TRUNK + bounds._HEAD) + inserted * bounds._TRUNK) / 1e9)


def test_optimizer_and_push_are_bound_by_bytes() -> None:
    found = floors_of(step(1.0), dtype="bfloat16")
    assert found["optimizer"] == pytest.approx(7 * 4 * bounds._WEIGHTS / 1e8)
    assert found["sync"] == pytest.approx((4 + 2) * bounds._WEIGHTS / 1e8)


# ---- figures
# ----------------------------------------------------------------------------------------------------------


def test_the_first_round_is_left_out_and_no_other() -> None:
    rounds = [{"lockstep": step(10.0 * own), "trl": step(20.0 * own)} for own in (9, 1, 2, 3)]
    found = measured(rounds)
    assert [taken["step"] for taken in found["lockstep"]] == [10, 20, 30]
    assert [taken["step"] for taken in found["trl"]] == [20, 40, 60]


def test_a_whole_step_is_the_median_with_its_smallest_and_largest() -> None:
    own = whole_steps({"lockstep": [step(s) for s in (5.0, 1.0, 2.0, 100.0, 3.0)]}, {})["programs"][
        "lockstep"
    ]
    assert (own["step_s"], own["smallest_step_s"], own["largest_step_s"]) == (3, 1, 100)
    assert own["rollout_s"] == pytest.approx(1.2)
    assert own["rest_s"] == pytest.approx(1.8)


def test_a_rate_is_the_median_of_each_steps_own() -> None:
    steps = [step(1.0, sampled_tokens=30), step(2.0, sampled_tokens=10), step(4.0, sampled_tokens=80)]
    assert whole_steps({"lockstep": steps}, {})["programs"]["lockstep"]["tokens_per_s"] == 20
    assert growth({"length-32": steps})["length-32"]["tokens_per_s"] == 20


def test_programs_that_sampled_other_numbers_of_tokens_are_not_compared() -> None:
    check_tokens({"lockstep": [step(1.0)] * 2, "trl": [step(2.0, sampled_tokens=30.0)]}, 30)
    with pytest.raises(
        SystemExit, match=r"compared, and these sampled \{'lockstep': \{30\}, 'trl': \{29\}\}"
    ):
        check_tokens({"lockstep": [step(1.0)], "trl": [step(2.0, sampled_tokens=29.0)]}, 30)


def test_the_ratio_is_of_medians_and_to_the_fastest_rival() -> None:
    steps = {
        "lockstep": [step(2.0), step(1.0), step(10.0)],
        "trl": [step(9.0), step(8.0), step(900.0)],
        "trl-continuous": [step(6.0), step(50.0), step(50.0)],
    }
    found = whole_steps(steps, {})
    assert (found["rival"], found["ratio"]) == ("trl", 4.5)


def test_phases_are_set_over_their_floors() -> None:
    found = whole_steps({"lockstep": [step(2.0), step(4.0), step(8.0)]}, {"generate": 0.4, "reference": 0.0})[
        "phases"
    ]
    assert found["generate"] == {"seconds": pytest.approx(1.6), "floor_s": 0.4, "times": pytest.approx(4)}
    assert found["reference"] == {"seconds": 0, "floor_s": 0, "times": None}


def test_the_learning_half_leaves_out_the_rollout_and_takes_the_highest_peak() -> None:
    steps = {
        "lockstep": [
            step(3.0, rollout=1.0, peak_bytes=2),
            step(4.0, rollout=3.0, peak_bytes=6),
            step(9.0, rollout=2.0),
        ],
        "trl": [step(8.0, rollout=0.0, peak_bytes=40)] * 3,
    }
    found = learning_halves(steps)
    assert found["programs"]["lockstep"]["rest_s"] == 2
    assert found["ratio"] == 4
    assert found["peak_bytes_ratio"] == 0.25


def test_growth_gives_each_size_a_tokens_time_and_the_share_of_each_phase() -> None:
    found = growth({"length-32": [step(3.0), step(6.0), step(9.0)]})["length-32"]
    assert found["ms_per_token"] == pytest.approx(200)
    assert (found["shares"]["generate"], found["shares"]["forward_backward"]) == pytest.approx((0.4, 0.5))


def test_the_drawing_has_a_bar_a_size_whose_parts_are_the_whole_step() -> None:
    phases = dict.fromkeys(
        ("generate", "forward_backward", "verify", "sync", "optimizer", "reference", "rewards"), 0.1
    )
    sizes = {f"completions-{n}": [step(n / 8, sampled_tokens=n, phases=phases)] for n in (8, 16)}
    drawn = drawing(sizes)
    assert drawn.count("<rect") == 2 * 8 + 8
    # Both sizes take an eighth of a second per token.
    assert drawn.count(">125.0</text>") == 2
