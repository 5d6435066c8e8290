"""Pictures in later turns, on the transformers engine: results of tools, and what environments say.

Every turn is proven.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from looking import gaps, look, other_pixels
from PIL import Image
from seeing import mixed_rows, picture
from seeing_caller import draw, save_seeing_caller

from lockstep.contract.protocol import Completion
from lockstep.engines import transformers_engine
from lockstep.errors import LockstepError, ProofError
from lockstep.images.packs import model_inputs
from lockstep.images.prompts import ImagePrompts
from lockstep.rollouts.conversation import Conversation
from lockstep.rollouts.group import Rollout
from lockstep.run.trainers.methods import GRPOTrainer

LIMIT = 1e-3
# One family with patches and one with tiles, and the others of each kind. In CI, `test_families_on_vllm.py` has
# Qwen2-VL's turns.
FAMILIES = [
    "qwen2_5_vl",
    "smolvlm",
    *(pytest.param(family, marks=pytest.mark.long) for family in ("qwen3_vl", "idefics3")),
    pytest.param("qwen2_vl", marks=pytest.mark.release),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_seeing_caller(tmp_path_factory.mktemp("models") / "caller")


def play(folder: Any, tmp_path: Path, rows: Any = None, **given: Any) -> GRPOTrainer:
    """A finished run of two steps whose rollouts have turns."""
    base = {
        "use_vllm": False,
        "max_completion_length": 120,
        "tools": [draw],
        "max_tool_calling_iterations": 3,
    }
    base |= {"per_device_train_batch_size": 16, "num_generations": 4}
    trainer = look(folder, tmp_path, rows, **{**base, **given})
    trainer.train()
    return trainer


def rollouts_of(trainer: GRPOTrainer) -> list[Rollout]:
    """The rollouts of the last generation that was learned from."""
    assert trainer.loop.generation is not None
    return [rollout for group in trainer.loop.generation.groups for rollout in group.rollouts]


def count(rollout: Rollout) -> int:
    """Number of pictures that the last turn of a rollout has seen."""
    shown = rollout.branches[-1].pictures
    return len(shown.pictures)


def check_ids(trainer: GRPOTrainer, completion: Completion) -> None:
    """Each picture stands in the ids with the ids of its own, and was not sampled.

    Positions are those of the model's function.
    """
    shown, first = completion.pictures, len(completion.prompt_ids)
    ids = np.concatenate([completion.prompt_ids, completion.token_ids])
    sampled = np.ones(len(completion.token_ids), bool) if completion.sampled is None else completion.sampled
    if not shown:
        return
    for own, place in zip(shown.pictures, shown.places_of_each, strict=True):
        start = int(place[0]) - int(np.flatnonzero(own.ids == shown.placeholder)[0])
        assert (ids[start : start + len(own.ids)] == own.ids).all()
        assert not sampled[max(start - first, 0) : max(start - first + len(own.ids), 0)].any()
    assert not (completion.token_ids[sampled] == shown.placeholder).any()
    if shown.positions is not None:
        end = first + int(np.flatnonzero(sampled)[-1])
        row = torch.tensor(ids[:end])[None]
        grids = torch.stack([p.grid for p in shown.pictures])
        marks = (row == shown.placeholder).int()
        due, _ = trainer.model.model.get_rope_index(row, mm_token_type_ids=marks, image_grid_thw=grids)
        assert (shown.positions_of(end) == due[:, 0].numpy()).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_results_with_pictures_are_proven_turn_by_turn(family: str, folder: str, tmp_path: Path) -> None:
    own = folder if family == "qwen2_5_vl" else save_seeing_caller(tmp_path / "model", family)
    trainer = play(own, tmp_path)
    assert len(gaps(trainer)) == 2
    assert max(gaps(trainer)) < LIMIT
    found = rollouts_of(trainer)
    before = {g.prompt.prompt_id: g.prompt.pictures for g in trainer.loop.generation.groups}
    later = [r for r in found if count(r) > len(before[r.key.prompt_id].pictures)]
    assert later, "no rollout has a picture in a later turn"
    assert any(count(r) > 1 for r in later)
    completions = [c for r in found for c in r.branches]
    for completion in completions:
        check_ids(trainer, completion)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    counted = lines[-1]["parity/checked_tokens"] + lines[-1]["parity/aside_tokens"]
    assert counted == sum(len(c.sampled_places) for c in completions)
    # The budget counts the ids of pictures.
    assert max(len(r.token_ids) for r in found) <= 120


def test_an_unreadable_picture_and_a_placeholder_in_a_text_cost_no_step(folder: str, tmp_path: Path) -> None:
    said: list[Any] = []

    def noted(a: int) -> Any:
        found = draw(a)
        said.append(found)
        return found

    noted.__name__, noted.__doc__ = "draw", draw.__doc__
    trainer = play(folder, tmp_path, tools=[noted])
    assert max(gaps(trainer)) < LIMIT
    messages = [m for r in rollouts_of(trainer) for m in r.notes["messages"] if m["role"] == "tool"]
    texts = [m["content"] for m in messages if isinstance(m["content"], str)]
    assert any("a picture cannot be read" in text and text.startswith('{"error"') for text in texts)
    assert any(text.startswith("<|image_pad|> <image> ") for text in texts)
    assert any(isinstance(m["content"], list) for m in messages)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert 0 < lines[-1]["tools/failure_frequency"] < 1
    for completion in (c for r in rollouts_of(trainer) for c in r.branches):
        check_ids(trainer, completion)


def test_a_picture_that_does_not_fit_is_dropped_with_its_ids(folder: str, tmp_path: Path) -> None:
    def large(a: int) -> Image.Image:
        return picture(a, 32, 32)

    large.__name__, large.__doc__ = "draw", draw.__doc__
    # A picture has 16 ids, and a call about 6.
    trainer = play(folder, tmp_path, tools=[large], max_completion_length=22)
    found = rollouts_of(trainer)
    cut = [
        r
        for r in found
        if r.notes["tool_calls"] and not any(m["role"] == "tool" for m in r.notes["messages"])
    ]
    assert cut
    assert {r.finish_reason for r in cut} == {"length"}
    assert all(len(r.token_ids) <= 22 for r in found)
    assert max(gaps(trainer)) < LIMIT


def test_a_result_with_more_pictures_than_the_limit_is_an_error_for_the_model(
    folder: str, tmp_path: Path
) -> None:
    """The pictures of the row count too. A conversation that has reached the limit goes on."""
    trainer = play(folder, tmp_path, mixed_rows(), limit_mm_per_prompt={"image": 2})
    found = rollouts_of(trainer)
    assert max(map(count, found)) == 2
    said = {
        r.key: [
            m["content"]
            for m in r.notes["messages"]
            if m["role"] == "tool" and "limit_mm" in str(m["content"])
        ]
        for r in found
    }
    refused = [r for r in found if said[r.key]]
    assert refused
    assert {count(r) for r in refused} == {2}
    assert all(
        text.startswith('{"error": "3 pictures, and limit_mm') for r in refused for text in said[r.key]
    )
    assert any(len(r.turns) > len(said[r.key]) for r in refused)
    assert max(gaps(trainer)) < LIMIT


class Gallery:
    """An environment that begins with a picture and shows another one as the user."""

    def reset(self, n: int = 0, **row: Any) -> Any:
        self.left = 2
        return [{"type": "text", "text": " see"}, {"type": "image", "image": picture(100 + n, 16, 16)}]

    def next_user_message(self, answer: str) -> Any:
        self.left -= 1
        if self.left < 0:
            return None
        return [{"type": "image", "image": picture(200 + self.left)}, {"type": "text", "text": "and now"}]

    def get_reward(self) -> float:
        return float(self.left)


def test_environments_show_pictures_and_rewards_get_them(tmp_path: Path) -> None:
    folder = save_seeing_caller(tmp_path / "model", calls=0.2)
    seen: list[Any] = []

    def reward(prompts: Any, completions: Any, **_: Any) -> list[float]:
        seen.extend(zip(prompts, completions, strict=True))
        return [float(len(messages)) for messages in completions]

    rows = [{**row, "n": n} for n, row in enumerate(mixed_rows())]
    trainer = play(
        folder,
        tmp_path,
        rows,
        tools=None,
        environment_factory=Gallery,
        reward_funcs=reward,
        rehearse_rewards=False,
    )
    assert max(gaps(trainer)) < LIMIT
    # The rows have up to two pictures, `reset` adds one, and each message of the user another.
    assert max(map(count, rollouts_of(trainer))) > 3
    images = {
        p["image"].tobytes()
        for prompt, _ in seen
        for p in prompt[-1]["content"]
        if p["type"] == "image" and "image" in p
    }
    assert images >= {picture(100 + n, 16, 16).tobytes() for n in range(4)}
    spoken = [m for _, messages in seen for m in messages if m["role"] == "user"]
    assert {m["content"][0]["image"].tobytes() for m in spoken} == {
        picture(200 + n).tobytes() for n in range(2)
    }


@pytest.mark.parametrize(("limit", "method"), [(2, "reset"), (3, "next_user_message")])
def test_an_environment_with_more_pictures_than_the_limit_costs_its_rollout(
    limit: int, method: str, tmp_path: Path
) -> None:
    folder = save_seeing_caller(tmp_path / "model", calls=0.2)
    fields: dict[str, Any] = {"tools": None, "environment_factory": Gallery, "rehearse_rewards": False}
    trainer = play(
        folder, tmp_path, mixed_rows(), limit_mm_per_prompt={"image": limit}, max_steps=1, **fields
    )
    failed = {r.failed for r in rollouts_of(trainer) if r.failed}
    said = f"{limit + 1} pictures, and limit_mm_per_prompt allows {limit} per conversation"
    assert f"environment Gallery: {method}: {said}: raise it, or show fewer" in failed
    assert max(map(count, rollouts_of(trainer))) <= limit


def test_a_prompt_with_pictures_goes_on_with_text_and_after_an_interruption(
    folder: str, tmp_path: Path
) -> None:
    def text(a: int) -> int:
        return 7 * a

    text.__name__, text.__doc__ = "draw", draw.__doc__
    trainer = play(folder, tmp_path / "tools", tools=[text])
    assert max(gaps(trainer)) < LIMIT
    assert any(len(r.turns) > 1 and count(r) for r in rollouts_of(trainer))
    thinking = {"max_thinking_length": 4, "end_of_thinking": "+", "interruption": "+"}
    trainer = look(folder, tmp_path / "thinking", use_vllm=False, **thinking)
    trainer.train()
    assert max(gaps(trainer)) < LIMIT
    assert any(c.sampled is not None and count(r) for r in rollouts_of(trainer) for c in r.branches)


def broken(folder: str, tmp_path: Path, **given: Any) -> str:
    with pytest.raises(ProofError) as found:
        play(folder, tmp_path, **given)
    return found.value.check


def test_other_pixels_of_a_later_picture_are_found_by_the_gap(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows have no pictures: nothing but the results is swapped."""

    def swapped(shown: Any, ids: torch.Tensor) -> Any:
        return model_inputs([other_pixels(pictures) for pictures in shown], ids)

    monkeypatch.setattr(transformers_engine, "model_inputs", swapped)
    rows = [{"prompt": [{"role": "user", "content": f"what is {i}"}]} for i in range(4)]
    assert broken(folder, tmp_path, rows=rows) == "gap"


def test_positions_that_stop_at_the_first_prompt_are_found_by_the_gap(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = ImagePrompts.placed

    def counted_on(self: Any, ids: Any, pictures: Any) -> Any:
        found = placed(self, ids, pictures)
        if len(pictures) < 2:
            return found
        first = placed(self, ids[: int(found.starts[1])], pictures[:1])
        return replace(found, positions=first.positions, delta=first.delta)

    monkeypatch.setattr(ImagePrompts, "placed", counted_on)
    assert broken(folder, tmp_path) == "gap"


def test_a_rollout_with_another_picture_than_the_engine_was_sent_is_found(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids, log-probs and grids are the same. The record of what the engine was asked has the digests."""
    whole = Conversation.rollout

    def exchanged(self: Conversation) -> Rollout:
        rollout = whole(self)
        shown = rollout.completion.pictures
        if not shown:
            return rollout
        pictures = tuple(replace(p, pixel_values=p.pixel_values.flip(0)) for p in shown.pictures)
        return replace(
            rollout, completion=replace(rollout.completion, pictures=replace(shown, pictures=pictures))
        )

    monkeypatch.setattr(Conversation, "rollout", exchanged)
    assert broken(folder, tmp_path) == "turns"


def test_a_branch_without_the_pictures_of_its_ids_is_refused(folder: str, tmp_path: Path) -> None:
    async def forgets(conversation: Conversation) -> None:
        conversation.branch(conversation.ids)
        await conversation.sample()

    trainer = look(folder, tmp_path, use_vllm=False)
    trainer.source.program = forgets
    with pytest.raises(LockstepError, match="a branch has placeholders, and its pictures are not given"):
        trainer.train()


def test_a_model_of_text_reads_an_error_instead_of_a_picture(caller_dir: str, tmp_path: Path) -> None:
    def multiply(a: int, b: int) -> Image.Image:
        """Shows two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return picture(a + b)

    rows = [{"prompt": [{"role": "user", "content": f"what is {i} + {i}"}]} for i in range(4)]
    trainer = play(
        caller_dir, tmp_path, rows, tools=[multiply], num_generations=16, per_device_train_batch_size=64
    )
    texts = [m["content"] for r in rollouts_of(trainer) for m in r.notes["messages"] if m["role"] == "tool"]
    assert any("this run shows no images to the model" in text for text in texts)
