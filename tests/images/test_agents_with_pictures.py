"""Pictures through the gateway: those of the row, and those that an agent shows. The agents use OpenAI's SDK."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from looking import gaps, look, same_grid_rows
from openai import OpenAI
from seeing import mixed_rows, picture, save_seeing

from lockstep.images.urls import to_data_url
from lockstep.run.trainers.methods import GRPOTrainer

CLIENT = OpenAI(base_url="http://127.0.0.1:1", api_key="none", timeout=60, max_retries=0)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "smolvlm"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_seeing(tmp_path_factory.mktemp("models") / "seeing", request.param)


def part(seed: int, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": to_data_url(picture(seed, 16, 16)), **fields}}


def ask(url: str, messages: list[Any]) -> dict[str, Any]:
    found = CLIENT.with_options(base_url=url).chat.completions.create(
        model="any", messages=messages, max_tokens=4
    )
    return found.choices[0].message.to_dict()


def run(
    agent: Callable[..., Any], folder: str, tmp_path: Path, rows: Any = None, **fields: Any
) -> GRPOTrainer:
    """A finished run of one step whose rollouts this agent made."""
    base = {"use_vllm": False, "max_steps": 1, "max_completion_length": 96, "rehearse_rewards": False}
    trainer = look(folder, tmp_path, rows, agent=agent, **{**base, "reward_funcs": None, **fields})
    trainer.train()
    return trainer


def rollouts_of(trainer: GRPOTrainer) -> list[Any]:
    assert trainer.loop.generation is not None
    return [rollout for group in trainer.loop.generation.groups for rollout in group.rollouts]


def test_an_unchanged_script_shows_the_rows_pictures_and_its_own_and_every_turn_is_proven(
    folder: str, tmp_path: Path
) -> None:
    """The second turn extends the first.

    The third call has the ids of the second and another picture: it is a branch.
    """
    seen: list[Any] = []

    def agent(base_url: str, api_key: str, row: Any) -> float:
        before = [*row["prompt"], ask(base_url, row["prompt"])]
        for seed in (50, 51):
            text = {"type": "text", "text": "and"}
            answer = ask(base_url, [*before, {"role": "user", "content": [part(seed, detail="auto"), text]}])
        response = CLIENT.with_options(base_url=base_url).responses.create(
            model="any",
            max_output_tokens=4,
            input=[
                {
                    "role": "user",
                    "content": [{"type": "input_image", "image_url": part(52)["image_url"]["url"]}],
                }
            ],
        )
        return float(len(answer["content"] or "") + len(response.output_text) % 5)

    def noted(prompts: Any, completions: Any, **_: Any) -> list[float]:
        seen.extend(zip(prompts, completions, strict=True))
        return [0.0] * len(prompts)

    trainer = run(agent, folder, tmp_path, reward_funcs=noted)
    assert len(gaps(trainer)) == 1
    assert max(gaps(trainer)) < 1e-3
    given = {row["images"][0].tobytes() if row["images"] else b"" for row in mixed_rows()}
    for rollout in rollouts_of(trainer):
        assert rollout.failed is None
        assert rollout.notes["agent"]["answered"] == 4
        first, second, third = rollout.branches
        own = len(
            getattr(trainer.loop.prompts[int(rollout.key.prompt_id.split("/")[1])].pictures, "pictures", ())
        )
        assert [len(b.pictures.pictures) for b in (first, second, third)] == [own + 1, own + 1, 1]
        assert first.pictures.digests[:-1] == second.pictures.digests[:-1]
        assert first.pictures.digests[-1] != second.pictures.digests[-1]
        # The pictures stand in the ids, and only there.
        for branch in (first, second, third):
            ids = np.concatenate([branch.prompt_ids, branch.token_ids])
            assert (ids == branch.pictures.placeholder).sum() == len(branch.pictures.places)
    shown = {
        p["image"].tobytes() for prompt, _ in seen for p in prompt[-1]["content"] if p["type"] == "image"
    }
    assert shown == {picture(52, 16, 16).tobytes()}
    assert given


REFUSED: dict[str, tuple[Any, str]] = {
    "a file of this machine": (
        {"type": "image_url", "image_url": {"url": "/etc/hostname"}},
        "without a data: URL",
    ),
    "a URL": (
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png?key=secret"}},
        "http://127.0.0.1:1/a.png is not fetched: image_urls allows no URLs",
    ),
    "a size": (part(0, detail="low"), "asks for detail='low'; the run sets the sizes of images"),
    "no picture": (
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        "a picture cannot be read",
    ),
    "sound": ({"type": "input_audio", "input_audio": {}}, "other parts are not supported"),
}


def test_what_cannot_be_shown_is_an_error_for_the_agent(tmp_path: Path, untied_dir: str) -> None:
    folder = save_seeing(tmp_path / "model")
    found: list[tuple[str, str]] = []

    def refused(url: str, name: str, content: Any, role: str = "user") -> None:
        with pytest.raises(openai.BadRequestError) as error:
            ask(url, [{"role": role, "content": content}, {"role": "user", "content": "go on"}])
        found.append((name, error.value.message))

    def agent(base_url: str, api_key: str, row: Any) -> float:
        ask(base_url, [{"role": "user", "content": "hello"}])
        for name, (given, _) in REFUSED.items():
            refused(base_url, name, [given])
        refused(base_url, "too many", [part(0), {"type": "text", "text": "and"}, part(1)])
        refused(base_url, "a system's", [part(0)], "system")
        return 0.0

    rows = [{"prompt": [{"role": "user", "content": f"hello {i}"}]} for i in range(4)]
    trainer = run(agent, folder, tmp_path, rows, limit_mm_per_prompt={"image": 1})
    assert [r.failed for r in rollouts_of(trainer)] == [None] * 8
    due = {name: message for name, (_, message) in REFUSED.items()}
    due |= {
        "too many": "2 pictures, and limit_mm_per_prompt allows 1",
        "a system's": "only users and tools may show images",
    }
    assert {name for name, _ in found} == set(due)
    for name, said in found:
        assert due[name] in said
        assert "secret" not in said


def test_a_model_of_text_answers_a_picture_with_an_error(untied_dir: str, tmp_path: Path) -> None:
    said: list[str] = []

    def agent(base_url: str, api_key: str, row: Any) -> float:
        ask(base_url, row["prompt"])
        with pytest.raises(openai.BadRequestError) as error:
            ask(base_url, [{"role": "user", "content": [part(0)]}])
        said.append(error.value.message)
        return 0.0

    run(
        agent,
        untied_dir,
        tmp_path,
        [{"prompt": [{"role": "user", "content": f"hello {i}"}]} for i in range(4)],
    )
    assert len(said) == 8
    assert all("this run shows no images to the model; give text" in text for text in said)


def test_a_command_gets_its_row_as_json(tmp_path: Path) -> None:
    """The pictures of the row are `data:` URLs, in the form in which a client sends them on."""
    folder, script = save_seeing(tmp_path / "model", "idefics3"), tmp_path / "agent.py"
    script.write_text(
        "import json, os, sys, urllib.request\n"
        "row = json.load(sys.stdin)\n"
        "body = json.dumps({'model': 'any', 'messages': row['prompt'], 'max_tokens': 4}).encode()\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "asked = urllib.request.Request(url, body, {'content-type': 'application/json'})\n"
        "answer = json.load(urllib.request.urlopen(asked, timeout=60))\n"
        "print(json.dumps({'reward': len(row['images']) + len(answer['choices'][0]['message']['content']) % 2}))\n"
    )
    trainer = run(f"python3 {script}", folder, tmp_path)  # type: ignore[arg-type]
    assert max(gaps(trainer)) < 1e-3
    rows = {prompt.prompt_id: prompt.pictures for prompt in trainer.loop.prompts}
    for rollout in rollouts_of(trainer):
        (branch,) = rollout.branches
        assert branch.pictures.digests == rows[rollout.key.prompt_id].digests


def test_the_rows_ids_with_another_picture_are_another_branch(tmp_path: Path) -> None:
    """The agent sends the text of the row with a picture of the same size: all ids are equal."""

    def agent(base_url: str, api_key: str, row: Any) -> float:
        (message,) = row["prompt"]
        text = [p for p in message["content"] if p["type"] == "text"]
        shown = {"type": "image_url", "image_url": {"url": to_data_url(picture(70))}}
        return float(len(ask(base_url, [{"role": "user", "content": [shown, *text]}])["content"]))

    trainer = run(agent, save_seeing(tmp_path / "model"), tmp_path, same_grid_rows())
    assert max(gaps(trainer)) < 1e-3
    rows = {prompt.prompt_id: prompt for prompt in trainer.loop.prompts}
    for rollout in rollouts_of(trainer):
        (branch,) = rollout.branches
        row = rows[rollout.key.prompt_id]
        assert row.pictures
        assert np.array_equal(branch.prompt_ids, row.ids)
        assert branch.pictures.digests != row.pictures.digests
