"""Agents that are trained: an unchanged script on OpenAI's SDK learns through the gateway."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest
import tiny
from conftest import needs_vllm
from datasets import Dataset
from openai import OpenAI

import lockstep
from lockstep.cli.main import main
from lockstep.errors import InputError
from lockstep.extras.agents.web import Gateway
from lockstep.files import append_line

ROWS = Dataset.from_list([{"prompt": [{"role": "user", "content": f"what is {i} + {i}"}]} for i in range(16)])
# Making a client takes longer than a rollout of this model.
CLIENT = OpenAI(base_url="http://127.0.0.1:1", api_key="none")
LETTERS = set("abcdefghijklmnopqrstuvwxyz")


def two_turns(base_url: str, api_key: str, row: dict[str, Any]) -> float:
    """An agent that knows nothing of Lockstep: it asks twice, and counts the small letters."""
    client, messages = CLIENT.with_options(base_url=base_url, api_key=api_key), list(row["prompt"])
    said = ""
    for _ in range(2):
        answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
        said += (text := answer.choices[0].message.content or "")
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and 3?"}]
    return sum(character in LETTERS for character in said) / max(len(said), 1)


def trainer(model_dir: str, folder: Path, agent: Any, **fields: Any) -> Any:
    settings: dict[str, Any] = {
        "max_steps": 2,
        "num_generations": 4,
        "per_device_train_batch_size": 16,
        "max_completion_length": 40,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "bf16": False,
        "use_vllm": False,
        "disable_tqdm": True,
        "vllm_max_model_length": 256,
    }
    arguments = {key: fields.pop(key) for key in ("reward_funcs", "tools", "rollout_func") if key in fields}
    config = lockstep.GRPOConfig(output_dir=str(folder), **{**settings, **fields})
    return lockstep.GRPOTrainer(model_dir, args=config, train_dataset=ROWS, agent=agent, **arguments)


def logs(made: Any) -> list[dict[str, float]]:
    return [entry for entry in made.state.log_history if "reward" in entry]


class TestLearning:
    @pytest.mark.release
    def test_an_unchanged_script_learns(self, untied_dir: str, tmp_path: Path) -> None:
        made = trainer(
            untied_dir, tmp_path, two_turns, max_steps=12, per_device_train_batch_size=32, num_generations=8
        )
        made.train()
        made.close()
        rewards = [entry["reward"] for entry in logs(made)]
        assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3, rewards
        last = logs(made)[-1]
        assert last["agent/answered"] == 2
        assert last["agent/failed"] == 0
        assert last["parity/max_abs_gap"] < 1e-3

    @pytest.mark.vllm
    @needs_vllm
    def test_branches_and_failures_pass_every_proof_on_vllm(self, untied_dir: str, tmp_path: Path) -> None:
        def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float | None:
            client, messages = CLIENT.with_options(base_url=base_url, api_key=api_key), list(row["prompt"])
            first = (
                client.chat.completions.create(model="policy", messages=messages, max_tokens=3)
                .choices[0]
                .message
            )
            said = {"role": "assistant", "content": first.content}
            # The history is rewritten, then taken up again.
            for between in ({**said, "content": "something else"}, said):
                client.chat.completions.create(
                    model="policy", messages=[*messages, between, *messages], max_tokens=3
                )
            if row["prompt"][0]["content"] == "what is 3 + 3":
                raise RuntimeError("the page is gone")
            return float("a" in (first.content or ""))

        made = trainer(untied_dir, tmp_path, agent, use_vllm=True)
        made.train()
        made.close()
        for entry in logs(made):
            assert entry["agent/answered"] == 3
            assert 1 < entry["agent/branches"] <= 2
            assert entry["parity/max_abs_gap"] < 1e-3

    def test_a_command_learns_beside_reward_functions(self, untied_dir: str, tmp_path: Path) -> None:
        seen: list[Any] = []

        def length(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
            seen.extend(zip(prompts, completions, strict=True))
            return [float(len(messages)) for messages in completions]

        script = (
            "read -r row; prompt=$(jq -c .prompt <<< $row); "
            'curl -sf $OPENAI_BASE_URL/chat/completions -d "{\\"messages\\": $prompt, \\"max_tokens\\": 2}"'
        )
        made = trainer(
            untied_dir,
            tmp_path,
            f"bash -c '{script}'",
            max_steps=1,
            per_device_train_batch_size=4,
            reward_funcs=length,
        )
        made.train()
        made.close()
        assert logs(made)[0]["reward"] == 1
        prompt, messages = seen[-1]
        assert prompt in [row["prompt"] for row in ROWS]
        assert [message["role"] for message in messages] == ["assistant"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("agent", "fields", "message"),
        [
            (3, {}, "command line"),
            ("  ", {}, "command line"),
            ("bash 'x", {}, "words"),
            (two_turns, {"agent_timeout": 600.0}, "vllm_server_timeout"),
            (two_turns, {"max_thinking_length": 4}, "max_thinking_length"),
            (two_turns, {"tools": [len]}, "its own tools"),
            (two_turns, {"rollout_func": len}, "its own tools"),
        ],
    )
    def test_what_contradicts_an_agent_is_refused(
        self, untied_dir: str, tmp_path: Path, agent: Any, fields: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(InputError, match=message):
            trainer(untied_dir, tmp_path, agent, **fields)

    def test_a_tokenizer_without_a_chat_template_is_refused(self, tmp_path: Path) -> None:
        folder = tmp_path / "plain"
        tiny.save(tiny.make_model(), folder)
        plain = tiny.make_tokenizer()
        plain.chat_template = None
        plain.save_pretrained(folder)
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        with pytest.raises(InputError, match="chat template"):
            trainer(str(folder), tmp_path, two_turns)

    def test_agents_that_all_fail_stop_the_run_with_the_reason(self, untied_dir: str, tmp_path: Path) -> None:
        def agent(*_: Any) -> None:
            raise RuntimeError("no network")

        made = trainer(untied_dir, tmp_path, agent)
        with pytest.raises(InputError, match=re.escape("RuntimeError: no network")):
            made.train()
        made.close()

    def test_the_gateway_ends_with_its_trainer(
        self, untied_dir: str, tmp_path: Path, monkeypatch: Any
    ) -> None:
        urls: list[str] = []
        monkeypatch.setattr(
            Gateway,
            "open",
            lambda self, rollout, own=Gateway.open: urls.append(self.url) or own(self, rollout),
        )
        made = trainer(untied_dir, tmp_path, two_turns, max_steps=1)
        made.train()
        made.close()
        with pytest.raises(openai.APIConnectionError):
            OpenAI(base_url=f"{urls[0]}/v1", api_key="x", max_retries=0).models.list()


def fails_after(count: int) -> Any:
    """`append_line` on a disk that is full after so many lines."""
    written: list[Path] = []

    def append(path: Path, line: str) -> None:
        if len(written) == count:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        written.append(path)
        append_line(path, line)

    return append


def test_the_command_writes_rollouts_with_their_ids_and_learns_nothing(
    untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent.py").write_text(
        "from openai import OpenAI\n"
        "def solve(base_url, api_key, row):\n"
        "    client = OpenAI(base_url=base_url, api_key=api_key)\n"
        "    answer = client.responses.create(model='x', input=row['prompt'], max_output_tokens=4)\n"
        "    return float(len(answer.output_text) > row['least'])\n"
    )
    # A date of a file of JSON lines is no JSON value any more.
    days = [f"2026-11-2{i} 10:00:00" for i in range(3)]
    ROWS.select(range(3)).add_column("least", [0, 1, 2]).add_column("day", days).to_json(
        tmp_path / "data.jsonl"
    )
    words = {
        "model_name_or_path": untied_dir,
        "dataset_name": tmp_path / "data.jsonl",
        "agent": f"{tmp_path / 'agent.py'}:solve",
        "rollouts_file": tmp_path / "rollouts.jsonl",
        "output_dir": tmp_path / "run",
        "num_generations": 2,
        "per_device_train_batch_size": 2,
        "max_completion_length": 8,
        "vllm_max_model_length": 128,
        "use_vllm": False,
        "bf16": False,
    }
    command = ["gateway", *(word for name, value in words.items() for word in (f"--{name}", str(value)))]
    assert main(command) == 0
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [(line["row"]["least"], line["sample"]) for line in lines] == [
        (i, n) for i in range(3) for n in range(2)
    ]
    tokenizer = tiny.make_tokenizer()
    for line in lines:
        (branch,) = line["branches"]
        assert len(branch["token_ids"]) == len(branch["logprobs"]) == len(branch["sampled"]) <= 4
        text = tokenizer.decode(branch["token_ids"], skip_special_tokens=True)
        assert line["notes"]["messages"] == [{"role": "assistant", "content": text}]
        assert line["scores"] == {"agent": float(len(text) > line["row"]["least"])}
    # A file with rollouts is not overwritten.
    assert main(command) == 2
    # A file that cannot be written is found first, and what was sampled before an error is kept.
    first, later = str(words["rollouts_file"]), str(tmp_path / "later.jsonl")
    assert main([word.replace(first, str(tmp_path / "none" / "x")) for word in command]) == 2
    monkeypatch.setattr("lockstep.run.trainers.online._PART", 2)
    monkeypatch.setattr("lockstep.extras.agents.gateway_command.append_line", fails_after(2))
    assert main([word.replace(first, later) for word in command]) != 0
    assert len(Path(later).read_text(encoding="utf-8").splitlines()) == 2
    assert main([word for word in command if word not in ("--agent", words["agent"])]) == 2
