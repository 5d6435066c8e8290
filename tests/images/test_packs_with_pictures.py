"""Packs with pictures: scores and gradients equal those of a plain row per sequence, by the model's own forward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from seeing import IN_VLLM, make_seeing, make_seeing_tokenizer, mixed_rows, picture, save_seeing
from transformers import PreTrainedModel

from lockstep.contract.sampling import Sampling
from lockstep.images.packs import model_inputs
from lockstep.images.pictures import PromptPictures
from lockstep.images.prompts import ImagePrompts
from lockstep.learn.attention.tree import adopt_tree_attention
from lockstep.learn.pack import Pack, pack_rows, pack_sequences
from lockstep.learn.scoring import score_pack
from lockstep.learn.sequence import TrainingSequence
from lockstep.watch.plain_forward import completion_logps


@pytest.fixture(scope="module", params=list(IN_VLLM))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reader(family: str, tmp_path_factory: pytest.TempPathFactory) -> ImagePrompts:
    folder = save_seeing(tmp_path_factory.mktemp("models") / "seeing", family)
    return ImagePrompts(make_seeing(family), make_seeing_tokenizer(family), folder)


@pytest.fixture(scope="module")
def sequences(reader: ImagePrompts) -> list[TrainingSequence]:
    return sequences_of(reader)


def sequences_of(reader: ImagePrompts) -> list[TrainingSequence]:
    """Two completions of each row; rows have 0, 1, 2 and 1 pictures."""
    rng, made = np.random.default_rng(0), []
    for row, columns in enumerate(mixed_rows()):
        ids, pictures = reader.read(columns)
        for sample in range(2):
            completion = rng.integers(4, 300, 4 + row + sample)
            logps = np.zeros(len(completion))
            made.append(TrainingSequence(f"{row}#{sample}", ids, completion, logps, pictures=pictures))
    return made


def plain_logps(model: PreTrainedModel, sequence: TrainingSequence) -> torch.Tensor:
    """The reference: the whole row through the model alone, with pixels, and without any code of packs."""
    row = torch.tensor(np.concatenate([sequence.prompt_ids, sequence.completion_ids]))[None]
    shown = model_inputs([sequence.pictures], row)
    logits = model(input_ids=row, **shown, use_cache=False).logits[0]
    first = len(sequence.prompt_ids)
    targets = torch.tensor(sequence.completion_ids)
    logps = logits[first - 1 : -1].log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return logps if sequence.sampled is None else logps[torch.tensor(sequence.sampled)]


def scored(model: PreTrainedModel, pack: Pack) -> dict[str, torch.Tensor]:
    logps = score_pack(model, pack, 1.0, 64).logps
    return dict(
        zip([s.name for s in pack.sequences], logps.split([s.length for s in pack.sequences]), strict=True)
    )


@pytest.mark.parametrize("shape", ["tree", "rows", "small packs"])
def test_packs_score_and_learn_like_plain_rows(
    shape: str, family: str, sequences: list[TrainingSequence]
) -> None:
    packed, plain = make_seeing(family), make_seeing(family)
    adopt_tree_attention(packed)
    packed.train()
    cut = pack_rows if shape == "rows" else pack_sequences
    packs = list(cut(sequences, 60 if shape == "small packs" else 4096))
    assert len(packs) > 1 if shape == "small packs" else len(packs) == 1
    check_packs(packed, plain, packs, sequences)


def check_packs(
    packed: PreTrainedModel, plain: PreTrainedModel, packs: list[Pack], sequences: list[TrainingSequence]
) -> None:
    weights = {s.name: torch.linspace(-1.0, 1.0, s.length) for s in sequences}
    found: dict[str, torch.Tensor] = {}
    for pack in packs:
        own = scored(packed, pack)
        sum((weights[name] * logps).sum() for name, logps in own.items()).backward()
        found |= own
    for sequence in sequences:
        due = plain_logps(plain, sequence)
        (weights[sequence.name] * due).sum().backward()
        torch.testing.assert_close(found[sequence.name], due, atol=3e-5, rtol=1e-4)
    theirs = {name: p.grad for name, p in plain.named_parameters()}
    sizes = {name: float(grad.abs().max()) for name, grad in theirs.items()}
    for name, parameter in packed.named_parameters():
        assert parameter.grad is not None, name
        assert sizes[name] > 0, name
        # A bias of keys changes no attention weight: its gradient is rounding alone.
        rounding = 1e-6 * max(sizes.values())
        assert float((parameter.grad - theirs[name]).abs().max()) < 1e-4 * sizes[name] + rounding, name


@pytest.fixture(scope="module")
def later(reader: ImagePrompts) -> list[TrainingSequence]:
    """Sequences with pictures in later turns: after one prompt, two results with the same ids and different pictures;
    a branch whose prompt has what another sequence has in its completion; and a result after a prompt without
    pictures."""
    rng, rows = np.random.default_rng(1), mixed_rows()
    texts = [rng.integers(4, 300, 5) for _ in range(3)]

    def made(name: str, row: int, seed: int, *, branch: bool = False) -> TrainingSequence:
        ids, first = reader.read(rows[row])
        shown = reader.picture(picture(seed))
        parts = [texts[0], shown.ids, texts[1], shown.ids, texts[2]]
        whole = np.concatenate([ids, *parts])
        pictures = reader.placed(whole, [*first.pictures, shown, shown])
        sampled = np.concatenate([np.full(len(p), i in (0, 2, 4)) for i, p in enumerate(parts)])
        start = len(ids) + (len(texts[0]) + len(shown.ids) if branch else 0)
        completion, mask = whole[start:], sampled[start - len(ids) :]
        return TrainingSequence(
            name, whole[:start], completion, np.zeros(mask.sum()), sampled=mask, pictures=pictures
        )

    return [made("a", 1, 7), made("b", 1, 8), made("branch", 1, 7, branch=True), made("text", 0, 7)]


def test_packs_with_pictures_in_completions_score_and_learn_like_plain_rows(
    family: str, later: list[TrainingSequence]
) -> None:
    packed, plain = make_seeing(family), make_seeing(family)
    adopt_tree_attention(packed)
    packed.train()
    packs = list(pack_sequences(later, 4096))
    check_packs(packed, plain, packs, later)
    (pack,) = packs
    assert pack.pictures
    # One picture of the prompt and two of the results, whatever sequences and turns show them.
    assert len(pack.pictures.pictures) == 3
    # The branch adds no position to the tree.
    assert (
        pack.input_ids.numel() == next(pack_sequences([later[0], later[1], later[3]], 4096)).input_ids.numel()
    )


@pytest.mark.parametrize("banned", [(), ((5,),)])
def test_a_single_row_is_scored_with_its_pictures(
    banned: tuple[tuple[int, ...], ...], family: str, sequences: list[TrainingSequence]
) -> None:
    """Also at settings that change nothing but the temperature, which are computed in another way."""
    model, sampling = make_seeing(family), Sampling(9, bad_words=banned)
    for sequence in sequences[2:4]:
        with torch.no_grad():
            due = plain_logps(model, sequence)
        assert not (sequence.completion_ids == 5).any()
        given = (sequence.prompt_ids, sequence.completion_ids, sampling)
        found = completion_logps(model, *given, pictures=sequence.pictures)
        # The ban takes away the probability of one token.
        torch.testing.assert_close(found, due, atol=1e-5 if not banned else 0.5, rtol=1e-4)
        assert float((completion_logps(model, *given) - due).abs().max()) > 0.5


def test_a_tree_shares_a_prompt_and_computes_its_pictures_once(
    family: str, sequences: list[TrainingSequence]
) -> None:
    (pack,) = pack_sequences(sequences, 4096)
    assert pack.pictures
    assert len(pack.pictures.pictures) == 4
    prompts = {s.name[0]: len(s.prompt_ids) for s in sequences}
    assert pack.input_ids.numel() < sum(prompts.values()) + sum(len(s.completion_ids) for s in sequences)
    axes = (3,) if "qwen" in family else ()
    assert pack.position_ids.shape == (*axes, 1, pack.input_ids.numel())


def swapped(sequence: TrainingSequence, other: TrainingSequence) -> TrainingSequence:
    """The sequence with the picture of another one. Both pictures have the same grid, so that the ids stay the same."""
    assert sequence.pictures
    assert other.pictures
    pictures: PromptPictures = replace(sequence.pictures, pictures=other.pictures.pictures)
    return replace(sequence, name="swapped", pictures=pictures)


def test_equal_ids_with_other_pictures_are_other_nodes(
    family: str, sequences: list[TrainingSequence]
) -> None:
    """By ids alone both prompts would be one path of the tree, and one would be scored with the other's picture."""
    one, other = sequences[2], swapped(sequences[2], sequences[6])
    assert one.pictures
    model = make_seeing(family)
    adopt_tree_attention(model)
    with torch.no_grad():
        (pack,) = pack_sequences([one, other], 4096)
        found = scored(model, pack)
        for sequence in (one, other):
            torch.testing.assert_close(
                found[sequence.name], plain_logps(model, sequence), atol=3e-5, rtol=1e-4
            )
    assert (found["swapped"] - found[one.name]).abs().max() > 0.1


def test_a_pack_of_text_alone_is_what_it_was_before_pictures(sequences: list[TrainingSequence]) -> None:
    (text,) = pack_sequences(sequences[:2], 4096)
    assert not text.pictures
    assert text.position_ids.shape == text.input_ids.shape
    small = list(pack_sequences(sequences, 60))
    assert not small[0].pictures
    assert small[0].position_ids.dim() == 2
