"""A user's `rollout_func` in a run with images gets them in the prompts, and may show more in later turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from looking import gaps, look
from seeing import mixed_rows, picture, save_seeing

from lockstep.errors import InputError
from lockstep.images.reading import has_images
from lockstep.run.programs import generate_rollout_completions

LIMIT = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_seeing(tmp_path_factory.mktemp("models") / "seeing")


def one_turn(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    answers = generate_rollout_completions(trainer, prompts)
    names = ("prompt_ids", "completion_ids", "logprobs")
    return {name: [answer[name] for answer in answers] for name in names}


def images_in(prompt: Any) -> list[Any]:
    parts = [part for m in prompt for part in (m["content"] if isinstance(m["content"], list) else [])]
    return [part["image"] for part in parts if part["type"] == "image"]


def test_the_images_of_the_rows_are_in_the_prompts(folder: str, tmp_path: Path) -> None:
    seen: list[Any] = []

    def noted(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        seen.extend(prompts)
        return one_turn(prompts, trainer)

    trainer = look(folder, tmp_path, use_vllm=False, rollout_func=noted)
    trainer.train()
    assert len(gaps(trainer)) == 2
    assert max(gaps(trainer)) < LIMIT
    assert {len(images_in(prompt)) for prompt in seen} == {0, 1, 2}
    due = {image.tobytes() for row in mixed_rows() for image in row["images"]}
    assert {image.tobytes() for prompt in seen for image in images_in(prompt)} == due
    assert any(has_images({"prompt": prompt}) for prompt in seen)


def two_turns(prompts: list[Any], trainer: Any, *, named: bool) -> dict[str, Any]:
    """A second image is shown after the first turn."""
    more = picture(50, 16, 16)
    ids = trainer.source.rollout_function.reader.picture(more).ids.tolist()
    first = generate_rollout_completions(trainer, prompts, max_tokens=3)
    shown = [[*images_in(prompt), more] for prompt in prompts]
    before = [a["prompt_ids"] + a["completion_ids"] + [5] + ids + [6] for a in first]
    second = generate_rollout_completions(trainer, before, max_tokens=3, images=shown)
    gap = len(ids) + 2
    found: dict[str, Any] = {
        "prompt_ids": [a["prompt_ids"] for a in first],
        "completion_ids": [
            a["completion_ids"] + [5] + ids + [6] + b["completion_ids"]
            for a, b in zip(first, second, strict=True)
        ],
        "logprobs": [a["logprobs"] + [0.0] * gap + b["logprobs"] for a, b in zip(first, second, strict=True)],
        "env_mask": [
            [1] * len(a["logprobs"]) + [0] * gap + [1] * len(b["logprobs"])
            for a, b in zip(first, second, strict=True)
        ],
    }
    return found | ({"images": shown} if named else {})


def test_images_of_later_turns_are_named_in_a_column(folder: str, tmp_path: Path) -> None:
    trainer = look(
        folder,
        tmp_path,
        use_vllm=False,
        max_completion_length=24,
        rollout_func=lambda p, t: two_turns(p, t, named=True),
    )
    trainer.train()
    assert max(gaps(trainer)) < LIMIT
    assert trainer.loop.generation is not None
    groups = trainer.loop.generation.groups
    assert {len(r.completion.pictures.pictures) for g in groups for r in g.rollouts} == {1, 2, 3}


def test_images_that_are_not_named_are_asked_for(folder: str, tmp_path: Path) -> None:
    trainer = look(
        folder,
        tmp_path,
        use_vllm=False,
        max_completion_length=24,
        rollout_func=lambda p, t: two_turns(p, t, named=False),
    )
    with pytest.raises(InputError, match=r"row 0 .*return in 'images' the images whose ids are in"):
        trainer.train()


@pytest.mark.parametrize("named", [True, False])
def test_more_images_than_the_limit_are_refused(named: bool, folder: str, tmp_path: Path) -> None:
    def more(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return two_turns(prompts, trainer, named=True) if named else {"images": generate(prompts, trainer)}

    def generate(prompts: list[Any], trainer: Any) -> list[Any]:
        ids = trainer.source.rollout_function.reader.picture(picture(50, 16, 16)).ids.tolist()
        shown = [[picture(50 + i, 16, 16) for i in range(3)] for _ in prompts]
        return generate_rollout_completions(
            trainer, [[5, *ids, 5, *ids, 5, *ids]] * len(prompts), images=shown
        )

    fields: dict[str, Any] = {"max_completion_length": 24, "limit_mm_per_prompt": {"image": 2}}
    trainer = look(folder, tmp_path, use_vllm=False, rollout_func=more, **fields)
    with pytest.raises(InputError, match="3 pictures, and limit_mm_per_prompt allows 2 per conversation"):
        trainer.train()


def test_ids_without_their_images_are_not_sampled_after(folder: str, tmp_path: Path) -> None:
    def forgets(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        first = generate_rollout_completions(trainer, prompts, max_tokens=2)
        generate_rollout_completions(trainer, [a["prompt_ids"] for a in first])
        return {}

    trainer = look(folder, tmp_path, use_vllm=False, rollout_func=forgets)
    with pytest.raises(InputError, match="give the images of each prompt of ids in `images`"):
        trainer.train()


@pytest.mark.parametrize("named", [True, False])
def test_a_model_of_text_refuses_images_that_it_would_not_see(
    named: bool, untied_dir: str, tmp_path: Path
) -> None:
    def gives(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        shown = [[picture(50, 16, 16)] for _ in prompts]
        if named:
            return one_turn(prompts, trainer) | {"images": shown}
        generate_rollout_completions(trainer, prompts, images=shown)
        return {}

    rows = [{"prompt": f"hello {i}"} for i in range(4)]
    trainer = look(untied_dir, tmp_path, rows, use_vllm=False, rollout_func=gives)
    with pytest.raises(InputError, match="this run shows no images to the model; give text"):
        trainer.train()
