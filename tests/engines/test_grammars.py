"""The masks of a whole completion, made in one call, equal the masks that are made token by token."""

from __future__ import annotations

import pytest
import torch
from tiny import make_tokenizer

from lockstep.contract.sampling import Grammar, GrammarCompiler
from lockstep.errors import ProofError

GRAMMARS = [
    Grammar("regex", r"[0-9]+( \+ [0-9]+)*"),
    Grammar("json", '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}'),
    Grammar("choice", '["quick", "quiet", "the \\"lazy\\" dog"]'),
    Grammar("grammar", 'root ::= "a" root "b" | "x"'),
]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(make_tokenizer(), 384, [0])


def walk(compiler: GrammarCompiler, grammar: Grammar, seed: int) -> tuple[list[int], torch.Tensor]:
    """Up to 30 ids that follow a grammar, drawn at random, and their masks one by one."""
    generator, state = torch.Generator().manual_seed(seed), compiler.start(grammar)
    ids: list[int] = []
    masks = []
    while len(ids) < 30 and 0 not in ids:
        masks.append(state.mask().clone())
        allowed = [i for i in range(384) if int(masks[-1][0, i // 32]) >> (i % 32) & 1]
        ids.append(allowed[int(torch.randint(len(allowed), (), generator=generator))])
        state.accept(ids[-1])
    return ids, torch.cat(masks)


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_masks_of_a_completion_are_those_of_its_tokens(compiler: GrammarCompiler, grammar: Grammar) -> None:
    ended = 0
    for seed in range(5):
        ids, masks = walk(compiler, grammar, seed)
        assert torch.equal(compiler.masks(grammar, ids), masks)
        ended += ids[-1] == 0
    assert ended or grammar.kind == "json"


@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_token_that_the_grammar_forbids_is_found_at_every_position(
    compiler: GrammarCompiler, place: int
) -> None:
    grammar = GRAMMARS[2]
    ids, _ = walk(compiler, grammar, 1)
    ids[place] = next(i for i in range(4, 384) if i not in ids)
    with pytest.raises(ProofError, match=f"token {ids[place]} was sampled where the grammar"):
        compiler.masks(grammar, ids)


def test_a_completion_without_tokens_has_no_masks(compiler: GrammarCompiler) -> None:
    assert compiler.masks(GRAMMARS[0], []).shape == (0, 12)
