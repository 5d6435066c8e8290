"""Log-probs, entropies and gradients under every filter are those of whole logits that are filtered by the book."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draws import hold
from filters import VOCABULARY, allowed_by, by_the_book, draw, processed, rules_of
from hypothesis import strategies as st
from tiny import make_model
from transformers import PreTrainedModel

from lockstep import GRPOConfig
from lockstep.contract.sampling import Grammar, Sampling
from lockstep.definitions.sampling import user_settings
from lockstep.errors import InputError, ProofError
from lockstep.learn.attention.tree import adopt_tree_attention
from lockstep.learn.pack import pack_rows, pack_sequences
from lockstep.learn.scoring import score_pack
from lockstep.learn.sequence import TrainingSequence
from lockstep.learn.update import hidden_states
from lockstep.tokens.arrays import KeptIds, joined_kept_ids
from lockstep.watch.evidence import DrawnRows
from lockstep.watch.kept_sets import KeptSetProof
from lockstep.watch.plain_forward import OWN_DTYPE
from lockstep.watch.settings import SettingsProof
from lockstep.watch.tolerances import tolerance

REGEX = Grammar("regex", r"[a-m]+( [0-9]{2})*")
# The second prompt is the first one and more, so that a completion of the first may share nodes with the second.
PROMPTS = ([5, 9, 9, 40], [5, 9, 9, 40, 7], [300, 2])
ALONE: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": -0.9},
    "logit_bias": {"logit_bias": ((3, 4.0), (17, -2.5))},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(0, VOCABULARY, 7))},
    "bad_words": {"bad_words": ((4,), (7, 7), (14, 21, 7)), "allowed_token_ids": (4, 7, 14, 21)},
    "min_tokens": {"min_tokens": 4, "logit_bias": ((0, 6.0),)},
    "grammar": {"grammar": REGEX},
    "nothing": {},
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    made = make_model(scale=0.2).double()
    with torch.no_grad():
        # A flat distribution over many ids would be a weak test of the penalties.
        made.lm_head.weight *= 3
    adopt_tree_attention(made)
    return made


def scores_of(
    model: PreTrainedModel, sequences: list[TrainingSequence], sampling: Sampling, rows: bool, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies, in the order of the sequences. Short rows come first in a pack of rows."""
    packs = list((pack_rows if rows else pack_sequences)(sequences, 40))
    found = [
        score_pack(model, p, sampling.temperature, chunk, entropy_gradient=True, rules=rules_of(sampling))
        for p in packs
    ]
    by_name: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for pack, scores in zip(packs, found, strict=True):
        lengths = pack.sizes
        parts = zip(scores.logps.split(lengths), scores.entropies.split(lengths), strict=True)
        by_name |= {s.name: part for s, part in zip(pack.sequences, parts, strict=True)}
    logps, entropies = zip(*(by_name[s.name] for s in sequences), strict=True)
    return torch.cat(logps), torch.cat(entropies)


def check(
    model: PreTrainedModel, sampling: Sampling, rows: bool, chunk: int, seed: int, ragged: bool = False
) -> None:
    sequences = draw(model, PROMPTS, (6, 3, 6), sampling, seed)
    if ragged:
        sequences = [_smaller(s, seed) for s in sequences]
    of_logps = torch.randn(
        sum(s.length for s in sequences), generator=torch.Generator().manual_seed(seed)
    ).double()
    results = []
    for logps, entropies in (
        scores_of(model, sequences, sampling, rows, chunk),
        by_the_book(model, sequences, sampling),
    ):
        loss = (logps * of_logps).sum() + (entropies * of_logps.flip(0)).sum()
        results.append(
            [logps.detach(), entropies.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
        )
    for found, expected in zip(*results, strict=True):
        # The model's norms compute in float32, whatever its dtype is.
        assert torch.isfinite(found).all()
        assert float((found - expected).norm()) <= 3e-6 * float(expected.norm()) + 1e-12


def _smaller(sequence: TrainingSequence, seed: int) -> TrainingSequence:
    """The sequence with sets from which random ids are missing, so that tokens that share a row have different sets."""
    kept, token = sequence.kept_ids, sequence.sampled_ids
    if kept is None:
        return sequence
    stays = np.random.default_rng([seed, int(sequence.name[-1])]).random(len(kept.ids)) < 0.7
    stays |= kept.ids == token[kept.tokens]
    sizes = np.bincount(kept.tokens[stays], minlength=len(kept))
    return replace(sequence, kept_ids=KeptIds(kept.ids[stays], np.cumsum(sizes)))


@pytest.mark.parametrize("name", list(ALONE))
@pytest.mark.parametrize("rows", [False, True], ids=["tree", "rows"])
def test_each_filter_alone_gives_the_scores_and_gradients_of_the_book(
    model: PreTrainedModel, name: str, rows: bool
) -> None:
    check(model, Sampling(8, temperature=0.8, **ALONE[name]), rows, chunk=5, seed=3)


@pytest.mark.parametrize("base", ["whole rows", "kept ids"])
def test_filters_together_give_the_scores_and_gradients_of_the_book(
    model: PreTrainedModel, base: str
) -> None:
    def together(
        names: set[str], temperature: float, rows: bool, chunk: int, seed: int, ragged: bool
    ) -> None:
        fields: dict[str, Any] = {}
        for name in sorted(names):
            fields |= ALONE[name]
        check(model, Sampling(8, temperature=temperature, **fields), rows, chunk, seed, ragged)

    filters = {"top_k", "top_p", "min_p"}
    of_ids = st.sets(
        st.sampled_from(sorted({*ALONE} - filters - {"allowed_token_ids", "bad_words"})), max_size=4
    )
    of_logits = st.sets(st.sampled_from(sorted(filters)), min_size=1)
    both = st.tuples(of_ids, of_logits).map(lambda x: x[0] | x[1])
    hold(
        base,
        10,
        together,
        names=of_ids if base == "whole rows" else both,
        temperature=st.sampled_from([1.0, 0.6, 1.7]),
        rows=st.booleans(),
        chunk=st.sampled_from([1, 4, 512]),
        seed=st.integers(0, 99),
        ragged=st.booleans(),
    )


def test_branches_of_two_prompts_that_share_a_node_keep_their_own_counts(model: PreTrainedModel) -> None:
    sampling = Sampling(8, presence_penalty=2.0, frequency_penalty=0.5, min_tokens=2)
    zeros = np.zeros(3, np.float32)
    sequences = [
        TrainingSequence("long", [5, 9, 9, 40], [7, 7, 30], zeros),
        TrainingSequence("short", [5, 9, 9, 40, 7], [7, 30, 7], zeros),
    ]
    (pack,) = pack_sequences(sequences, 100)
    assert pack.input_ids.numel() == 7
    expected = by_the_book(model, sequences, sampling)
    scores = score_pack(model, pack, 1.0, 4, rules=rules_of(sampling))
    torch.testing.assert_close((scores.logps, scores.entropies), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["top_p", "grammar", "nothing"])
def test_the_support_of_each_token_is_counted(model: PreTrainedModel, name: str) -> None:
    sampling = Sampling(8, **ALONE[name])
    sequences = draw(model, PROMPTS[:1], (6, 6), sampling, 2)
    (pack,) = pack_sequences(sequences, 100)
    found = score_pack(model, pack, 1.0, 4, rules=rules_of(sampling))
    if name == "nothing":
        assert found.support is None
        return
    assert found.support is not None
    if name == "top_p":
        assert found.support.tolist() == [size for s in sequences for size in s.kept_ids.sizes]  # type: ignore[union-attr]
    else:
        allowed = allowed_by(REGEX)
        ids = [s.completion_ids.tolist() for s in sequences]
        assert found.support.tolist() == [int(allowed(own[:t]).sum()) for own in ids for t in range(len(own))]


def test_the_kept_mass_is_what_the_policy_gives_to_the_kept_ids_before_the_filters(
    model: PreTrainedModel,
) -> None:
    sampling = Sampling(8, temperature=0.8, top_k=5, repetition_penalty=1.3)
    sequences = draw(model, PROMPTS[:1], (4,), sampling, 2)
    (pack,) = pack_sequences(sequences, 100)
    rules = rules_of(sampling)
    rows = DrawnRows(
        None, KeptSetProof(rules.distribution, tolerance(torch.float32, torch.float32)), OWN_DTYPE
    )
    with hidden_states(model) as seen:
        scores = score_pack(model, pack, 0.8, 4, rules=rules)
    rows.add(pack, scores.logps.detach(), seen[-1], before_steps=False)
    found = rows.check_with(model, fp32_head=False, single=True)
    (s,), expected = sequences, []
    logits = model(input_ids=torch.tensor([[*PROMPTS[0], *s.completion_ids.tolist()]])).logits[0, 3:].detach()
    for t in range(s.length):
        scores = processed(
            logits[t].double(), sampling, PROMPTS[0], s.completion_ids.tolist()[:t], allowed_by(None)
        )
        expected.append(scores.softmax(-1)[torch.tensor(s.kept_ids.part(t, t + 1).ids.tolist())].sum())  # type: ignore[union-attr]
    assert (found.measured, found.tokens) == (s.length, 0)
    assert found.mass == pytest.approx(float(torch.stack(expected).sum()), rel=1e-5)


def test_a_token_outside_its_set_is_refused(model: PreTrainedModel) -> None:
    (sequence,) = draw(model, PROMPTS[:1], (4,), Sampling(8, top_k=5), 2)
    other = sorted({*range(5)} - {int(sequence.completion_ids[2])})
    kept = joined_kept_ids(
        [KeptIds(other, [len(other)]) if t == 2 else sequence.kept_ids.part(t, t + 1) for t in range(4)]
    )  # type: ignore[union-attr]
    (pack,) = pack_sequences([replace(sequence, kept_ids=kept)], 100)
    with pytest.raises(ProofError, match="token 2 of 4 is not among the ids"):
        score_pack(model, pack, 1.0, 4, rules=rules_of(Sampling(8, top_k=5)))


def test_a_completion_without_sets_is_refused(model: PreTrainedModel) -> None:
    (sequence,) = draw(model, PROMPTS[:1], (4,), Sampling(8), 2)
    (pack,) = pack_sequences([sequence], 100)
    with pytest.raises(ValueError, match="has no kept ids for each of its tokens"):
        score_pack(model, pack, 1.0, 4, rules=rules_of(Sampling(8, top_k=5)))


def test_the_log_prob_of_a_banned_token_is_minus_infinity(model: PreTrainedModel) -> None:
    (sequence,) = draw(model, PROMPTS[:1], (4,), Sampling(8, temperature=2.0), 2)
    banned = int(sequence.completion_ids[1])
    rules = rules_of(Sampling(8, temperature=2.0, bad_words=((banned,),)))
    (pack,) = pack_sequences([sequence], 100)
    logps = score_pack(model, pack, 2.0, 4, rules=rules).logps
    assert logps.isneginf().tolist() == [token == banned for token in sequence.completion_ids]


def test_the_grammar_of_another_request_is_refused(model: PreTrainedModel) -> None:
    (sequence,) = draw(model, PROMPTS[:1], (4,), Sampling(8, grammar=REGEX), 2)
    (pack,) = pack_sequences([sequence], 100)
    with pytest.raises(ProofError, match="grammar"):
        score_pack(model, pack, 1.0, 4, rules=rules_of(Sampling(8, grammar=Grammar("choice", '["zebra"]'))))


def test_the_repetition_penalty_counts_inserted_ids_like_the_prompt(model: PreTrainedModel) -> None:
    """The second turn's tokens get the log-probs that they have after a prompt that holds everything before them."""
    # The ids before a token are a good part of all ids.
    sampling = Sampling(
        8, repetition_penalty=1.6, top_k=20, allowed_token_ids=(5, 9, *range(40, 62)), temperature=2.0
    )
    (whole,) = draw(model, PROMPTS[:1], (6,), sampling, 2)
    assert whole.kept_ids is not None
    turns = np.array([True, True, False, False, True, True])
    own = whole.kept_ids.where(turns)
    two = replace(whole, sampled=turns, behaviour_logps=np.zeros(4), kept_ids=own)
    ids = whole.completion_ids
    second = replace(
        whole,
        prompt_ids=[*whole.prompt_ids, *ids[:4]],
        completion_ids=ids[4:],
        behaviour_logps=np.zeros(2),
        kept_ids=own.part(2, 4),
    )
    for made in (sampling, replace(sampling, top_k=0)):
        parts = [s if made.is_filtered else replace(s, kept_ids=None) for s in (two, second)]
        with torch.no_grad():
            found, alone = (scores_of(model, [part], made, False, 5)[0] for part in parts)
            plain = scores_of(model, [parts[1]], replace(made, repetition_penalty=1.0), False, 5)[0]
        torch.testing.assert_close(found[2:], alone)
        assert float((plain - alone).abs().max()) > 1e-3


def test_the_definition_counts_inserted_ids_like_the_prompt(model: PreTrainedModel, tmp_path: Path) -> None:
    fields = {"repetition_penalty": 1.6, "allowed_token_ids": [5, 9, *range(40, 62)], "temperature": 2.0}
    sampling = Sampling(8, **{**fields, "allowed_token_ids": tuple(fields["allowed_token_ids"])})
    (whole,) = draw(model, PROMPTS[:1], (6,), sampling, 2)
    # What is inserted is sampled again afterwards, so that its penalty is seen.
    ids, turns = [41, 42, 50, 51, 50, 51], np.array([True, True, False, False, True, True])
    two = replace(whole, completion_ids=ids, sampled=turns, behaviour_logps=np.zeros(4), kept_ids=None)
    (pack,) = pack_sequences([two], 100)
    wanted = user_settings(vars(GRPOConfig(str(tmp_path), use_cpu=True, **fields)))
    rows = DrawnRows(SettingsProof(wanted, lambda text: []), None, OWN_DTYPE)
    with torch.no_grad(), hidden_states(model) as seen:
        scores = score_pack(model, pack, 2.0, 4, rules=rules_of(sampling))
    rows.add(pack, scores.logps, seen[-1], before_steps=False)
    rows.check_with(model, fp32_head=False, single=True)


@pytest.mark.parametrize("name", ["frequency_penalty", "min_tokens", "grammar", "logit_bias"])
def test_rules_that_count_sampled_tokens_refuse_inserted_ones(model: PreTrainedModel, name: str) -> None:
    sampling = Sampling(8, **ALONE[name])
    (sequence,) = draw(model, PROMPTS[:1], (4,), Sampling(8), 2)
    marked = replace(
        sequence, sampled=[True, False, True, True], behaviour_logps=sequence.behaviour_logps[:3]
    )
    (pack,) = pack_sequences([marked], 100)
    if name == "logit_bias":
        assert score_pack(model, pack, 1.0, 4, rules=rules_of(sampling)).logps.isfinite().all()
    else:
        with pytest.raises(InputError, match="ids that were not sampled"):
            score_pack(model, pack, 1.0, 4, rules=rules_of(sampling))
