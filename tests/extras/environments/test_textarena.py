"""Games of textarena, the real package: seeds, isolation, and whole rollouts that are trained.

Training on vLLM is tested before a release. In CI, `test_tools_in_training.py` trains with environments on vLLM.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from caller import make_walker
from conftest import VLLM
from tiny import make_tokenizer
from tokenizers import AddedToken

import lockstep
from lockstep.cli.main import main
from lockstep.errors import InputError
from lockstep.extras.environments.textarena import game
from lockstep.rollouts.programs.environments import Environment, EnvironmentFailed, Environments
from lockstep.rollouts.programs.tools import ToolCalls

CONTEXT = 1280
MOVES = ("[Hit]", "[Stand]")


@pytest.fixture(scope="module")
def player_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model that makes valid moves of Blackjack."""
    folder = tmp_path_factory.mktemp("models") / "player"
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(move, normalized=False) for move in MOVES])
    steps = {"<|assistant|>": dict.fromkeys(MOVES, 0.5), **{move: {"<|end|>": 1.0} for move in MOVES}}
    make_walker(tokenizer, steps, max_position_embeddings=CONTEXT).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


Play = Callable[[Callable[[], Any]], Environment]


@pytest.fixture
def play() -> Iterator[Play]:
    calls, made = ToolCalls(60.0), []

    def one(factory: Callable[[], Any]) -> Environment:
        made.append(Environments(factory, calls))
        return asyncio.run(made[-1].take(None))

    yield one
    for each in made:
        each.close()
    calls.close()


def say(environment: Environment, *answers: str) -> list[str | None]:
    said = [asyncio.run(environment.next_user_message(answer)) for answer in answers]
    return [None if content is None else content.text for content in said]


def begun(environment: Environment, seed: int) -> str:
    content = asyncio.run(environment.reset({}, seed))
    return "" if content is None else content.text


def test_the_seed_of_a_rollout_decides_its_game(play: Play) -> None:
    blackjack = play(game("Blackjack-v0"))
    played = {seed: (begun(blackjack, seed), *say(blackjack, "[Hit]", "[Stand]")) for seed in (1, 2, 3)}
    assert len(set(played.values())) == 3
    again = play(game("Blackjack-v0"))
    for seed in (3, 1):
        assert (begun(again, seed), *say(again, "[Hit]", "[Stand]")) == played[seed]


def test_a_game_shows_only_what_is_new_and_ends_the_rollout_with_its_reward(play: Play) -> None:
    guess = play(game("GuessTheNumber-v0", max_turns=7, unfinished=-0.5))
    assert guess.tools == {}
    assert "within 7 turns" in begun(guess, 1)
    number = random.Random(1).randint(1, 20)
    assert say(guess, f"[{number - 1}]", f"is it [{number + 1}]?") == [
        "The target number is higher.",
        "The target number is lower.",
    ]
    (refused,) = say(guess, "no number")
    assert (refused or "").startswith("You attempted an invalid move.")
    assert asyncio.run(guess.reward()) == -0.5
    assert say(guess, f"[{number}]") == [None]
    assert asyncio.run(guess.reward()) == 1.0
    assert guess.title == "GuessTheNumber-v0"


def test_a_game_leaves_the_random_numbers_of_this_process_alone(play: Play) -> None:
    before = random.getstate()
    asyncio.run(play(game("Blackjack-v0")).reset({}, 5))
    assert random.getstate() == before


@pytest.mark.parametrize(
    ("name", "message"),
    [("Chess-v9", "textarena has no game 'Chess-v9'"), ("Nim-v0", "Nim-v0 is not a game for one player")],
)
def test_a_game_that_cannot_be_played_alone_is_refused(name: str, message: str, play: Play) -> None:
    with pytest.raises(EnvironmentFailed, match=message):
        asyncio.run(play(game(name)).reset({}, 0))


def test_a_python_without_textarena_is_named_with_what_to_do(play: Play, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -ES "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(EnvironmentFailed, match=r"cannot import textarena .*pip install textarena there"):
        play(game("Blackjack-v0", python=str(bare)))


def trainer(model: str, folder: Path, **fields: Any) -> Any:
    settings: dict[str, Any] = {
        "max_steps": 1, "num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 600,
        "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no", "report_to": [], "bf16": False,
        "use_vllm": False, "disable_tqdm": True, "vllm_max_model_length": CONTEXT, "seed": 3,
    }  # fmt: skip
    config = lockstep.GRPOConfig(output_dir=str(folder), **{**settings, **fields})
    return lockstep.GRPOTrainer(model, args=config, environment_factory=game("Blackjack-v0"))


@pytest.mark.parametrize(
    "use_vllm", [False, pytest.param(True, marks=[*VLLM, pytest.mark.release])], ids=["transformers", "vllm"]
)
def test_games_are_played_in_training_and_every_move_is_proven(
    use_vllm: bool, player_dir: str, tmp_path: Path
) -> None:
    made = trainer(player_dir, tmp_path, use_vllm=use_vllm)
    try:
        made.train()
        (line,) = [line for line in made.state.log_history if "reward" in line]
        assert line["parity/max_abs_gap"] < 1e-4
        assert line["tools/turns"] > 3
        assert line["environments/failed"] == 0
        rollouts = [rollout for group in made.loop.generation.groups for rollout in group.rollouts]
        assert line["rewards/Blackjack-v0/mean"] == pytest.approx(
            sum(r.reward for r in rollouts) / len(rollouts)
        )
        # Each rollout has cards of its own.
        assert len({rollout.notes["prompt"][-1]["content"] for rollout in rollouts}) == len(rollouts)
        for rollout in rollouts:
            said = [
                message["content"] for message in rollout.notes["messages"] if message["role"] == "assistant"
            ]
            cards = [message["content"] for message in rollout.notes["messages"] if message["role"] == "user"]
            assert {move for move in MOVES if move in said}
            assert cards
            assert all(text.startswith(("Hand", "You attempted an invalid move.")) for text in cards)
            # What the game says is context.
            assert len(rollout.completion.sampled_places) < len(rollout.token_ids)
    finally:
        made.close()


def test_the_example_of_the_page_runs(
    player_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "guides" / "tools.md").read_text()
    (code,) = re.findall(r"`factory = (lockstep\.extras\.environments\.textarena\.game\(.*?\))`", page)
    code = f"import lockstep.extras.environments.textarena\n\nfactory = {code}\n"
    command = (
        "lockstep grpo --model_name_or_path MODEL --dataset_name data.jsonl --environment_factory "
        "games.py:factory"
    )
    row = json.dumps({"prompt": [{"role": "user", "content": "Play."}]})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "games.py").write_text(code)
    (tmp_path / "data.jsonl").write_text(f"{row}\n" * 2)
    small = {
        "use_vllm": "false", "bf16": "false", "max_steps": "1", "num_generations": "2", "save_strategy": "no",
        "per_device_train_batch_size": "2", "vllm_max_model_length": str(CONTEXT), "logging_steps": "1",
    }  # fmt: skip
    words = shlex.split(command.replace("MODEL", player_dir))
    assert main([*words[1:], *(word for name, value in small.items() for word in (f"--{name}", value))]) == 0
    (metrics,) = tmp_path.rglob("metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert max(line.get("tools/turns", 0) for line in lines) > 1


def test_a_game_that_does_not_exist_is_refused_before_training(player_dir: str, tmp_path: Path) -> None:
    config = lockstep.GRPOConfig(
        output_dir=str(tmp_path), max_steps=1, use_vllm=False, bf16=False, report_to=[]
    )
    with pytest.raises(InputError, match=r"textarena has no game 'Chess-v9'.*before training"):
        lockstep.GRPOTrainer(player_dir, args=config, environment_factory=game("Chess-v9"))
