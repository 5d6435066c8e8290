"""What is secret: found by name at any depth and by look, and nothing else."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.cli.past_runs import next_lines
from lockstep.errors import EngineLost, InputError, Interrupted, LockstepError, ProofError
from lockstep.report.page.report import render_report
from lockstep.report.page.run_record import read_run
from lockstep.run.files.directory import SETTINGS, about_run, open_run
from lockstep.run.files.identity import changed_fields, curve_settings
from lockstep.safe_text import HIDDEN, is_secret_name, masked, without_secrets
from lockstep.watch.receipt import Receipt, read_receipt

SECRETS = (
    "hf_AbCdEf12345678",
    "sk-proj-1a2B3c4D5e6F",
    "s3cretPass",
    "plainsecret",
    "nestedsecret",
    "ghp_1234567890abcdef",
)


def none_of_them(text: str) -> bool:
    return not any(secret in text for secret in SECRETS)


@pytest.mark.parametrize(
    "text",
    [
        "401 for hf_AbCdEf12345678",
        "Incorrect API key: sk-proj-1a2B3c4D5e6F.",
        "headers {'Authorization': 'Bearer s3cretPass'}",
        "curl -H 'Authorization: Basic s3cretPass' example.org",
        "X-Api-Key: plainsecret",
        "https://me:s3cretPass@host.org/data.jsonl is not there",
        "https://s3cretPass@host.org/",
        "proxy me:s3cretPass@proxy.host.org:3128",
        "https://host.org/file?token=plainsecret&x=1",
        "https://host.org/file?X-Amz-Security-Token=plainsecret",
        "model_init_kwargs was {'token': 'nestedsecret', 'dtype': 'float32'}",
        'vllm: {"a": [{"hf_token": "nestedsecret"}]}',
        "non-default args: {'model': 'm', 'hf_token': \"nestedsecret\"}",
        "GRPOConfig(hub_token='plainsecret', seed=1)",
        "HF_TOKEN=plainsecret python train.py",
        "--hub_token plainsecret --seed 1",
        "--hub-token=plainsecret",
        "config.yaml is not YAML: line 3: hub_token: plainsecret: x",
        "'auth': ('me', 's3cretPass')",
        "apiKey=plainsecret",
        "PGPASSWORD=plainsecret",
        "myapikey=plainsecret",
        "remote: ghp_1234567890abcdef",
    ],
)
def test_a_sentence_hides_a_secret(text: str) -> None:
    assert none_of_them(masked(text)), masked(text)
    assert HIDDEN in masked(text)


@pytest.mark.parametrize(
    "text",
    [
        "tokenizer=fast", "max_tokens=5", "eos_token='<|im_end|>'", "pad_token: '[PAD]'",
        "token_entropy_bonus: highest",
        "unexpected token: 'x'", "token=<s>", "hub_token=None", "use_auth_token: it must be text", "token: 1746352",
        "key=value",
        "KeyError: 'token'", "prompt_key: question", "vllm_server_key_file: keys.txt", "hf_overrides",
        "hf_hub_download",
        "sk-learn", "risk-adjusted-5A", "Bearer token is missing", "https://host.org:8000/v1/models",
        "git@github.com:me/it.git",
        "ssh://git@github.com/me/it", "repo/image:v1@sha256:0123", "rewards.py:has_password", "12:30:05",
        "write to mailto:me@host.org",
        "step 3, token 5 of request 1/2", "allowed_token_ids: [1, 2]", "3 tokens; gap mean 1.0e-05",
        "--prompt_key question",
    ],
)  # fmt: skip
def test_a_sentence_without_a_secret_is_as_it_was(text: str) -> None:
    assert masked(text) == text
    assert without_secrets({"text": [text]}) == {"text": [text]}


def test_only_the_secrets_among_all_fields_are_secret_by_name() -> None:
    kinds = [getattr(lockstep, name) for name in dir(lockstep) if name.endswith("Config")]
    names = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    names |= {name for fields in json.loads(FIELDS.read_text()).values() for name in fields}
    names |= {*(Path(__file__).parent / "server/free_arguments.txt").read_text().split()}
    assert len(names) > 400
    # CORS credentials are a switch, and switches are no secrets.
    assert {name for name in names if is_secret_name(name)} == {"hub_token", "hf_token", "allow_credentials"}
    assert not is_secret_name("allow_credentials", False)


FIELDS = Path(lockstep.__file__).parent / "cli/fields.json"
NESTED: dict[str, Any] = {
    "token": "nestedsecret", "dtype": "float32",
    "more": [{"proxies": {"https": "http://me:s3cretPass@proxy"}, "api_key": "plainsecret"}],
    "eos_token": "</s>", "headers": {"Authorization": "plainsecret"},
}  # fmt: skip


def config(folder: Path, **fields: Any) -> Any:
    given = {
        "hub_token": "plainsecret",
        "model_init_kwargs": {"token": "nestedsecret", "dtype": "float32"},
        **fields,
    }
    return lockstep.GRPOConfig(output_dir=str(folder), report_to="none", **given)


def test_settings_lose_secrets_at_any_depth_and_keep_the_rest() -> None:
    before = copy.deepcopy(NESTED)
    kept = {
        "dtype": "float32",
        "more": [{"proxies": {"https": f"http://{HIDDEN}@proxy"}}],
        "eos_token": "</s>",
        "headers": {},
    }
    assert without_secrets(NESTED) == kept
    assert before == NESTED
    settings = {"a": 1, "b": (1, "x"), "c": {"eos_token": 5}}
    assert without_secrets(settings) is settings


def test_whatever_a_config_becomes_has_no_secret_and_the_config_keeps_it(tmp_path: Path) -> None:
    made = config(tmp_path)
    texts = [str(made), repr(made), made.to_json_string(), str(made.to_dict()), str(made.to_sanitized_dict())]
    texts += [json.dumps(curve_settings(made), default=str), pickle.dumps(made).decode("latin1")]
    assert all(map(none_of_them, texts))
    for same in (made, copy.copy(made), copy.deepcopy(made)):
        assert same.hub_token == "plainsecret"
        assert same.model_init_kwargs["token"] == "nestedsecret"
    again = pickle.loads(pickle.dumps(made))
    differing = {
        name
        for name, value in vars(made).items()
        if name != "distributed_state" and vars(again)[name] != value
    }
    assert differing == {"hub_token", "model_init_kwargs"}


def test_the_files_of_a_run_have_no_secret(tmp_path: Path) -> None:
    made = config(tmp_path)
    with open_run(
        tmp_path / "run", {"agent_command": "agent --api-key=plainsecret", **dataclasses.asdict(made)}
    ) as place:
        folder = place.folder
    about = about_run("grpo", "https://me:s3cretPass@host/m", {"hf_token": "plainsecret"}, made, {}, {})
    (folder / "about.json").write_text(json.dumps(about, default=str))
    receipt = Receipt(folder / "receipt.jsonl", 0)
    receipt.append(
        {
            "kind": "alarm",
            "step": 0,
            "text": "tool said: 401 for Bearer s3cretPass",
            "code": {"reward no_password": "ab"},
        }
    )
    # The name of a user's function is no name of a setting.
    assert read_receipt(folder / "receipt.jsonl")[0]["code"] == {"reward no_password": "ab"}
    (folder / "report.html").write_text(render_report(read_run(folder)))
    for path in folder.iterdir():
        assert none_of_them(path.read_text()), path


def test_a_report_of_a_run_of_an_earlier_version_has_no_secret(tmp_path: Path) -> None:
    about = {
        "method": "grpo",
        "model": "m",
        "settings": {"model_init_kwargs": NESTED},
        "chosen": ["model_init_kwargs"],
    }
    (tmp_path / "about.json").write_text(json.dumps(about))
    (tmp_path / "end.json").write_text(
        json.dumps({"ended": "failed", "step": 1, "error": "E", "message": "for hf_AbCdEf12345678"})
    )
    assert none_of_them(render_report(read_run(tmp_path)))


@pytest.mark.parametrize("now", [{"token": "another"}, {"token": True}, {}, None])
def test_a_run_goes_on_with_another_token_or_with_none(tmp_path: Path, now: dict[str, Any] | None) -> None:
    earlier = {"model_init_kwargs": {"token": "nestedsecret"}, "url": "http://me:s3cretPass@host/", "seed": 0}
    after = {"model_init_kwargs": now, "url": "http://me:other@host/", "seed": 0}
    assert changed_fields(earlier, after) == changed_fields(without_secrets(earlier), after) == []
    assert changed_fields(earlier, {**after, "seed": 1}) == ["seed"]
    other = {"model_init_kwargs": {**(now or {}), "revision": "v2"}}
    assert changed_fields(earlier, {**after, **other}) == ["model_init_kwargs"]


def test_the_next_commands_have_no_secret(tmp_path: Path) -> None:
    typed = [
        "--hub_token",
        "plainsecret",
        "--seed",
        "3",
        "--hub_token=plainsecret",
        "--model_init_kwargs",
        json.dumps(NESTED),
    ]
    typed += [f"--model_init_kwargs={json.dumps(NESTED)}", "--dataset_name", "https://me:s3cretPass@host/x"]
    typed += [
        '["https://me:s3cretPass@host/x"]',
        '"hf_AbCdEf12345678"',
        '--a=[{"token": "plainsecret"}]',
        '{"lr":1e-5}',
    ]
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text('{"global_step": 1}')
    lines = "\n".join(next_lines(tmp_path, adapter=False, typed=typed))
    assert "--seed 3" in lines
    assert '"dtype": "float32"' in lines
    # What holds no secret stays as it was typed.
    assert '{"lr":1e-5}' in lines
    assert none_of_them(lines)


@pytest.mark.parametrize(
    "kind", [LockstepError, InputError, Interrupted, lambda text: EngineLost(text, list)]
)
def test_an_error_holds_no_secret_and_steers_no_terminal_wherever_it_is_shown(
    kind: Callable[[str], Exception],
) -> None:
    error = kind("data said \x1b]0;x\x07 with token='plainsecret' at https://me:s3cretPass@host/")
    assert str(error) == f"data said \\x1b]0;x\\x07 with token={HIDDEN} at https://{HIDDEN}@host/"
    assert none_of_them(str(ProofError("gap", "for hf_AbCdEf12345678", "plain", "set it")))


def test_run_json_of_an_earlier_version_is_written_again_without_its_secrets(tmp_path: Path) -> None:
    (tmp_path / SETTINGS).write_text(json.dumps({"model_init_kwargs": NESTED}))
    with open_run(tmp_path, {"model_init_kwargs": NESTED}):
        assert none_of_them((tmp_path / SETTINGS).read_text())
