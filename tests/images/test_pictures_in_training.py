"""GRPO on rows with pictures, with the transformers engine: two proven steps, faults, and what is refused.

The other methods whose forwards are those of GRPO and of PPO are tested before a release.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import start
from datasets import Dataset
from looking import IN_THE_TRAINER, gaps, look, other_pixels, same_grid_rows, wrong_order
from methods import FIELDS, make, parameters
from portions import portion
from seeing import make_seeing, make_seeing_tokenizer, mixed_rows, picture, save_seeing
from transformers import AutoModelForImageTextToText, PreTrainedModel

import lockstep
from lockstep.contract.inbox import Inbox
from lockstep.contract.protocol import Completion
from lockstep.engines import transformers_engine
from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.errors import InputError, ProofError
from lockstep.images.packs import model_inputs
from lockstep.images.prompts import ImagePrompts
from lockstep.rollouts.group import Prompt
from lockstep.run.data.prompts import digest_of_prompts
from lockstep.run.trainers.methods import GRPOTrainer
from lockstep.watch.rewards import count_seen

LIMIT = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_seeing(tmp_path_factory.mktemp("models") / "seeing")


def train(folder: Any, tmp_path: Path, *rows: Any, **given: Any) -> GRPOTrainer:
    trainer = look(folder, tmp_path, *rows, use_vllm=False, **given)
    trainer.train()
    return trainer


def likes_placeholders(folder: str) -> PreTrainedModel:
    """A policy that would sample the placeholder of pictures nearly always."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    hidden: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda head, given, made: hidden.append(given[0][0]))
    with torch.no_grad():
        model(input_ids=torch.arange(4, 300)[None])
        hook.remove()
        # The head's row points to where most hidden states are.
        model.lm_head.weight[model.config.image_token_id] = 3.0 * hidden[0].mean(0)
        model.model.language_model.norm.weight.abs_()
    return model


def test_two_steps_on_mixed_rows_are_proven_and_the_tower_learns(folder: str, tmp_path: Path) -> None:
    """With a reference model, whose scores of a drawn completion are computed again as a plain row."""
    before = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    trainer = train(folder, tmp_path, beta=0.1)
    assert len(gaps(trainer)) == 2
    assert max(gaps(trainer)) < LIMIT
    own = parameters(trainer.model)
    assert all(not torch.equal(p, own[name]) for name, p in before.named_parameters() if "visual" in name)
    # The engine holds what was learned, the tower included, after the next push.
    shown = {len(g.prompt.pictures.pictures) if g.prompt.pictures else 0 for g in trainer.rollouts()}
    assert shown == {0, 1, 2}
    engine = trainer.engine
    assert isinstance(engine, TransformersEngine)
    theirs = dict(engine.model.named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in trainer.model.named_parameters())


@pytest.mark.long
@pytest.mark.parametrize(
    "method", portion(["OnlineDPO", "PPO", "ReinforcePP", "RLOO"], lambda m: m in ("OnlineDPO", "PPO"))
)
def test_the_other_methods_learn_from_pictures_too(method: str, folder: str, tmp_path: Path) -> None:
    engine = start("transformers", folder)
    data = Dataset.from_list(mixed_rows())
    run = make(method, folder, tmp_path, engine, {**FIELDS[method], "max_steps": 2}, train_dataset=data)
    before = parameters(run.model)
    run.train()
    assert len(gaps(run)) == 2
    assert max(gaps(run)) < LIMIT
    assert any(
        "visual" in name and not torch.equal(p, before[name]) for name, p in parameters(run.model).items()
    )


@pytest.mark.parametrize("fault", sorted(IN_THE_TRAINER))
def test_a_fault_of_the_trainer_is_found_by_the_gap(
    fault: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    IN_THE_TRAINER[fault](monkeypatch)
    with pytest.raises(ProofError) as found:
        train(folder, tmp_path)
    assert found.value.check == "gap"
    # The plain forward has the pictures and the positions, so that the error names the packed one.
    assert "pack" in str(found.value)


@pytest.mark.parametrize("wrong", [other_pixels, wrong_order])
def test_pictures_of_the_same_grid_or_in_another_order_are_found_by_the_gap(
    wrong: Any, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped(shown: Any, ids: torch.Tensor) -> Any:
        return model_inputs([wrong(pictures) for pictures in shown], ids)

    monkeypatch.setattr(transformers_engine, "model_inputs", swapped)
    with pytest.raises(ProofError) as found:
        train(folder, tmp_path, same_grid_rows(pictures=2))
    assert found.value.check == "gap"
    assert "pictures that one side did not see" in str(found.value)


def test_an_answer_after_the_pictures_of_another_request_is_refused(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows have equal ids: nothing but the digests tells the requests apart."""
    whole, seen = Inbox.answer, []

    def exchanged(inbox: Inbox, completion: Completion, *more: Any) -> None:
        seen.append(completion.pictures)
        whole(inbox, replace(completion, pictures=seen[0]), *more)

    monkeypatch.setattr(Inbox, "answer", exchanged)
    with pytest.raises(ProofError, match="pictures") as found:
        train(folder, tmp_path, same_grid_rows())
    assert found.value.check == "echo"


def test_placeholders_are_banned_on_both_sides(folder: str, tmp_path: Path) -> None:
    model = likes_placeholders(folder)
    placeholder = model.config.image_token_id
    trainer = train(model, tmp_path, max_steps=1)
    completions = [c for g in trainer.rollouts() for r in g.rollouts for c in r.branches]
    assert not any((c.token_ids == placeholder).any() for c in completions)
    assert max(gaps(trainer)) < LIMIT


def test_a_placeholder_that_an_engine_samples_all_the_same_is_found(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = transformers_engine.processed_logprobs

    def without_bans(logits: Any, sampling: Any, *given: Any, **more: Any) -> Any:
        return whole(logits, replace(sampling, bad_words=()), *given, **more)

    monkeypatch.setattr(transformers_engine, "processed_logprobs", without_bans)
    with pytest.raises(ProofError) as found:
        train(likes_placeholders(folder), tmp_path)
    assert found.value.check == "placeholder"


def test_a_model_of_text_refuses_pictures(untied_dir: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="column 'images': images are not supported for this model"):
        look(untied_dir, tmp_path, same_grid_rows(), use_vllm=False)


def test_pictures_that_come_later_than_the_run_are_refused(folder: str, tmp_path: Path) -> None:
    """An evaluation on rows with images, in a run that began without: its requests do not ban placeholders."""
    trainer = look(folder, tmp_path, [{"prompt": f"{i} is"} for i in range(4)], use_vllm=False)
    with pytest.raises(InputError, match="column 'images': images are not supported here"):
        trainer.evaluate(Dataset.from_list(same_grid_rows()))


def test_a_row_whose_picture_cannot_be_read_is_named(folder: str, tmp_path: Path) -> None:
    rows = [{"prompt": "<|image_pad|>", "image": "there is no such file.png"}] * 8
    with pytest.raises(InputError, match=r"prompt train/0: a picture cannot be read: .*no such file"):
        look(folder, tmp_path, rows, use_vllm=False)


def test_rewards_get_the_pictures_of_their_row(folder: str, tmp_path: Path) -> None:
    seen: list[Any] = []

    def noted(completion_ids: Any, image: Any, **_: Any) -> list[float]:
        seen.extend(image)
        return [float(len(ids)) for ids in completion_ids]

    base = {
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 4,
    }
    config = lockstep.GRPOConfig(
        output_dir=str(tmp_path),
        bf16=False,
        use_vllm=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **base,
    )
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": "see"}], "image": picture(i)} for i in range(2)]
    )
    lockstep.GRPOTrainer(folder, reward_funcs=noted, args=config, train_dataset=data).train()
    assert {image.tobytes() for image in seen} == {picture(i).tobytes() for i in range(2)}


def test_a_question_on_another_picture_is_held_out(folder: str) -> None:
    def prompts(rows: list[dict[str, Any]], name: str) -> list[Prompt]:
        read = [reader.read(row) for row in rows]
        return [Prompt(f"{name}/{i}", ids, "", {}, pictures) for i, (ids, pictures) in enumerate(read)]

    reader = ImagePrompts(make_seeing(), make_seeing_tokenizer(), folder)
    rows = same_grid_rows()
    train, held_out = prompts(rows[:2], "train"), prompts(rows[1:], "eval")
    assert len({p.ids.tobytes() for p in [*train, *held_out]}) == 1
    # One of the three questions is on a picture of a training prompt.
    assert count_seen(train, held_out, tell=False) == 1


def test_ranks_that_read_other_pixels_have_other_prompts(folder: str) -> None:
    """Their ids are equal."""
    reader = ImagePrompts(make_seeing(), make_seeing_tokenizer(), folder)

    def digest(seed: int) -> list[Any]:
        read = [reader.read(row) for row in same_grid_rows(seed=seed)]
        return digest_of_prompts(
            [Prompt(f"train/{i}", ids, "", {}, shown) for i, (ids, shown) in enumerate(read)]
        )

    assert digest(0) == digest(0)
    assert digest(0) != digest(1)


def test_the_receipt_depends_on_the_pixels(folder: str, tmp_path: Path) -> None:
    def digest(rows: list[dict[str, Any]], name: str) -> Any:
        return look(folder, tmp_path / name, rows, use_vllm=False).inputs["data"]["train data"]

    rows = same_grid_rows()
    assert digest(rows, "one") == digest(same_grid_rows(), "two")
    assert digest(rows, "one") != digest([*rows[1:], rows[0]], "three")
    assert digest(mixed_rows(), "four") != digest(mixed_rows(9), "five")
