"""The auxiliary loss of experts is the padded reference's for every cut of a step, and is added or refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accounts import difference, gradients, shifted_engine
from accounts import make as make_case
from blocks import small_blocks
from conftest import start
from draws import draws
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from methods import FIELDS, make, parameters
from model_families import make_family, save_family
from reference import reference_loss, sampled_places
from test_packing import assert_same_gradients, config, policy_of, steps, weighted
from test_packing import gradients as taken
from transformers import AutoModelForCausalLM, DogeConfig, PreTrainedModel
from transformers.models.mixtral import modeling_mixtral

from lockstep.errors import InputError
from lockstep.extras.verify.logprob_checks import Unwatched
from lockstep.learn.attention.tree import adopt_tree_attention
from lockstep.learn.experts import check_routers
from lockstep.learn.methods.grpo import GRPOObjective
from lockstep.learn.pack import pack_rows, pack_sequences
from lockstep.learn.scoring import route_pack, score_pack
from lockstep.learn.sequence import TrainingSequence
from lockstep.learn.update import StepSums, learn, router_loss
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.ranks import Ranks
from lockstep.watch.evidence import TokenEvidence

KINDS = ("mixtral", "olmoe", "qwen3_moe")
# In double precision a difference is a mistake and not rounding. The usual kernel of experts does not take it.
EXACT = {kind: make_family(kind, experts_implementation="eager").double() for kind in KINDS}
DOUBLE = {"dtype": torch.float64, "experts_implementation": "eager"}
RANKS = Ranks(60.0)


@pytest.fixture(autouse=True, scope="module")
def trees() -> Iterator[None]:
    for model in EXACT.values():
        adopt_tree_attention(model)
    with small_blocks():
        yield


def padded_balance(model: PreTrainedModel, sequences: list[TrainingSequence]) -> torch.Tensor:
    """The model's own auxiliary loss of one padded row per sequence. The last sampled id is no input of the model."""
    rows = [[*s.prompt_ids.tolist(), *s.completion_ids[: sampled_places(s)[-1]].tolist()] for s in sequences]
    ids, mask = torch.zeros(2, len(rows), max(map(len, rows)), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
    loss: torch.Tensor = model(input_ids=ids, attention_mask=mask, output_router_logits=True).aux_loss
    return loss


@draws(20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    sequences=steps(),
    kind=st.sampled_from(KINDS),
    budget=st.integers(1, 200),
    parts=st.integers(1, 3),
    plain_rows=st.booleans(),
)
def test_loss_and_gradients_equal_the_padded_reference(
    sequences: list[TrainingSequence], kind: str, budget: int, parts: int, plain_rows: bool
) -> None:
    model, run = EXACT[kind], config(token_budget=budget)
    model.zero_grad()
    sequences = weighted(sequences, run)
    balance = padded_balance(model, sequences)
    loss = reference_loss(model, sequences, run) + 0.5 * balance
    loss.backward()
    expected = taken(model)
    objective, sums, policy = (
        GRPOObjective(run),
        StepSums(TokenEvidence()),
        policy_of(model, plain_rows=plain_rows),
    )
    objective.router_coefficient = 0.5
    size = -(-len(sequences) // parts)
    batches = [sequences[i : i + size] for i in range(0, len(sequences), size)]
    router = router_loss(objective, policy, batches, RANKS)
    for batch in batches:
        learn(policy, batch, objective, PhaseClock(), sums, Unwatched(), router)
    assert sums.loss == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    assert sums.tally.figures()["aux_loss"] == pytest.approx(balance.item(), rel=1e-6)
    assert_same_gradients(taken(model), expected, 1e-5, floor=1e-6)


@draws(60)
@given(steps(), st.integers(1, 200))
def test_every_position_counts_once_per_sequence_and_padding_counts_nothing(
    sequences: list[TrainingSequence], budget: int
) -> None:
    paths = [(*s.prompt_ids, *s.completion_ids[: sampled_places(s)[-1]]) for s in sequences]
    for cut in (pack_sequences, pack_rows):
        packs = list(cut(sequences, budget))
        assert sum(int(pack.copies.sum()) for pack in packs) == sum(map(len, paths))
        for token in {t for path in paths for t in path}:
            counted = sum(int(pack.copies[pack.input_ids.flatten() == token].sum()) for pack in packs)
            assert counted == sum(path.count(token) for path in paths)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_family("mixtral", tmp_path_factory.mktemp("mixtral"), router_aux_loss_coef=0.02)


def test_the_cut_of_a_step_does_not_change_a_gradient_or_the_logged_loss(
    mixtral: str, tmp_path: Path
) -> None:
    engine = shifted_engine(mixtral)
    fields: dict[str, Any] = {"router_aux_loss_coef": 0.5, "model_init_kwargs": DOUBLE}
    whole = make_case("grpo-grpo", mixtral, tmp_path / "whole", engine=engine, **fields)
    cut = make_case("grpo-grpo", mixtral, tmp_path / "cut", engine=engine, size=2, token_budget=24, **fields)
    fields["router_aux_loss_coef"] = 0.0
    without = make_case("grpo-grpo", mixtral, tmp_path / "without", engine=engine, **fields)
    expected, found = gradients(whole), gradients(cut)
    assert len(found) == 2
    # The norms of this model round to float32.
    assert max(difference(*step) for step in zip(expected, found, strict=True)) < 1e-5
    assert difference(expected[0], gradients(without)[0]) > 1e-3
    losses = [[log["aux_loss"] for log in run.state.log_history if "loss" in log] for run in (whole, cut)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert not any("aux_loss" in log for log in without.state.log_history)


def equal(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


@pytest.mark.parametrize("method", ["GRPO", "RLOO", "ReinforcePP"])
def test_the_models_own_loss_is_added_where_the_rewards_teach_nothing(
    mixtral: str, tmp_path: Path, method: str
) -> None:
    fields = {**FIELDS[method], "model_init_kwargs": {"router_aux_loss_coef": 0.5}, "beta": 0.0}
    engine = start("transformers", mixtral)
    run = make(method, mixtral, tmp_path, engine, fields, reward_funcs=equal)
    run.train()
    losses = [log["aux_loss"] for log in run.state.log_history if "loss" in log]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.05
    for log in run.state.log_history[:1]:
        assert log["loss"] == pytest.approx(0.5 * log["aux_loss"], abs=2e-4)


@pytest.mark.parametrize("method", ["OnlineDPO", "PPO"])
def test_methods_without_such_a_loss_in_trl_add_it_too(mixtral: str, tmp_path: Path, method: str) -> None:
    fields = {**FIELDS[method], "max_steps": 1}
    engine = start("transformers", mixtral)
    with_loss = make(method, mixtral, tmp_path / "with", engine, {**fields, "router_aux_loss_coef": 0.5})
    without = make(method, mixtral, tmp_path / "without", engine, {**fields, "router_aux_loss_coef": 0.0})
    expected, found = gradients(without), gradients(with_loss)
    assert difference(expected[0], found[0]) > 1e-3
    (log,) = [log for log in with_loss.state.log_history if "loss" in log]
    (other,) = [log for log in without.state.log_history if "loss" in log]
    assert log["loss"] == pytest.approx(other["loss"] + 0.5 * log["aux_loss"], abs=1e-3)


def test_with_0_nothing_is_added(mixtral: str, tmp_path: Path) -> None:
    fields = {**FIELDS["GRPO"], "router_aux_loss_coef": 0.0, "max_steps": 1}
    run = make("GRPO", mixtral, tmp_path, start("transformers", mixtral), fields, reward_funcs=equal)
    before = parameters(run.model)
    run.train()
    assert all(torch.equal(before[name], p) for name, p in parameters(run.model).items())


def test_output_router_logits_of_the_users_config_is_taken(mixtral: str, tmp_path: Path) -> None:
    own = {"output_router_logits": True, "router_aux_loss_coef": 0.25}
    fields = {**FIELDS["GRPO"], "model_init_kwargs": own, "max_steps": 1}
    run = make("GRPO", mixtral, tmp_path, start("transformers", mixtral), fields)
    run.train()
    assert run.model.config.output_router_logits
    assert run.objective.router_coefficient == 0.25
    assert run.state.log_history[0]["aux_loss"] > 1.0


def test_a_weight_for_a_model_without_experts_is_refused(untied_dir: str, tmp_path: Path) -> None:
    fields = {**FIELDS["GRPO"], "router_aux_loss_coef": 0.1}
    with pytest.raises(
        InputError, match=r"router_aux_loss_coef=0\.1, and Qwen2ForCausalLM is no mixture of experts"
    ):
        make("GRPO", untied_dir, tmp_path, start("transformers", untied_dir), fields)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_each_family_is_the_usual_one_also_in_bf16(kind: str) -> None:
    check_routers(make_family(kind))
    check_routers(make_family(kind).bfloat16())


def test_a_family_with_another_loss_is_refused(
    mixtral: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = modeling_mixtral.load_balancing_loss_func
    engine = start("transformers", mixtral)
    # A mean over the losses of the layers, as some papers define it.
    monkeypatch.setattr(
        modeling_mixtral,
        "load_balancing_loss_func",
        lambda logits, *given: sum(usual((layer,), *given) for layer in logits) / len(logits),
    )
    with pytest.raises(
        InputError, match=r"loss of MixtralForCausalLM's routers is not the usual one.*_coef=0 to train"
    ):
        make("GRPO", mixtral, tmp_path, engine, FIELDS["GRPO"])
    make("GRPO", mixtral, tmp_path, engine, {**FIELDS["GRPO"], "router_aux_loss_coef": 0.0})


def test_a_family_whose_routers_have_other_rows_is_refused() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = DogeConfig(**sizes, vocab_size=384, is_moe=True, num_experts=16, num_experts_per_tok=2)
    with pytest.raises(InputError, match="DogeForCausalLM's routers is not the usual one"):
        check_routers(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_with_gradient_checkpointing_routers_get_their_gradient_or_the_run_is_refused(
    mixtral: str, tmp_path: Path, reentrant: bool
) -> None:
    engine: Any = shifted_engine(mixtral)
    fields: dict[str, Any] = {"router_aux_loss_coef": 0.5, "max_steps": 1, "model_init_kwargs": DOUBLE}
    saving = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    run = make_case("grpo-grpo", mixtral, tmp_path / "saving", engine=engine, **fields, **saving)
    if reentrant:
        with pytest.raises(InputError, match=r"reaches no router.*use_reentrant"):
            run.train()
        return
    plain = make_case("grpo-grpo", mixtral, tmp_path / "plain", engine=engine, **fields)
    assert difference(gradients(plain)[0], gradients(run)[0]) < 1e-6


def test_a_layer_that_is_computed_twice_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_family("mixtral").train()
    adopt_tree_attention(model)
    layer = model.model.layers[1].self_attn.o_proj
    product = layer.forward
    # A product that is changed in place cannot be kept for the backward, so that the layer is computed again.
    monkeypatch.setattr(layer, "forward", lambda hidden: product(hidden).mul_(1.0))
    sequence = TrainingSequence("a#0", (5, 6, 7), (8, 9, 10), (-1.0,) * 3, (1.0,) * 3, 1.0)
    (pack,) = pack_sequences([sequence], 100)
    found, counted = score_pack(model, pack, 1.0, 64, routing=True).routing, route_pack(model, pack)
    assert found is not None
    assert found.rows == counted.rows == 2 * 5
    assert torch.equal(found.chosen, counted.chosen)
    assert int(found.chosen.sum()) == 2 * 2 * 5
