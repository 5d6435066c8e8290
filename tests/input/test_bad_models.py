"""Damaged and foreign model directories: each is refused in one line before anything is trained."""

from __future__ import annotations

import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bad_input import Row, check, in_time, rows
from safetensors.torch import load_file, save_file
from training_words import words

from lockstep.cli.main import main

Damage = Callable[[Path], object]
WEIGHTS = "model.safetensors"


def write(name: str, content: str | bytes) -> Damage:
    return lambda home: (home / name).write_bytes(content.encode() if isinstance(content, str) else content)


def remove(*names: str) -> Damage:
    return lambda home: [(home / name).unlink() for name in names]


def config(**changes: object) -> Damage:
    def change(home: Path) -> None:
        found = json.loads((home / "config.json").read_text())
        (home / "config.json").write_text(json.dumps({**found, **changes}))

    return change


def cut(name: str, share: float) -> Damage:
    def change(home: Path) -> None:
        content = (home / name).read_bytes()
        (home / name).write_bytes(content[: int(len(content) * share)])

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(home: Path) -> None:
        found = load_file(home / WEIGHTS)
        change(found)
        save_file(found, home / WEIGHTS, {"format": "pt"})

    return damage


def instead(name: str, content: Callable[[Path], object]) -> Damage:
    """Another kind of weights file in the place of the safetensors file."""

    def damage(home: Path) -> None:
        content(home / name)
        (home / WEIGHTS).unlink()

    return damage


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(print))


def broken_template(home: Path) -> None:
    (home / "chat_template.jinja").write_text("{% for m in messages %}")
    (home / "good.jsonl").write_text('{"prompt": [{"role": "user", "content": "a"}]}\n' * 8)


Q = "model.layers.0.self_attn.q_proj.weight"
TABLE = [
    Row("no config", remove("config.json"), "no config.json"),
    Row("an empty config", write("config.json", ""), "config|model"),
    Row("a config that is cut", cut("config.json", 0.5), "config|model"),
    Row("a config that is a list", write("config.json", "[]"), "config|model"),
    Row("a config that is a number", write("config.json", "3"), "config|model"),
    Row("a binary config", write("config.json", b"\x80\x04\xff"), "config|model"),
    Row("a latin-1 config", write("config.json", '{"a": "ü"}'.encode("latin-1")), "config|model"),
    Row("a config without a type", write("config.json", "{}"), "model"),
    Row("an unknown type", config(model_type="quux"), "quux"),
    Row("a type of another kind", config(model_type="vit"), "model"),
    Row("a config of other sizes", config(hidden_size=128), "another shape|hold|model"),
    Row("a config with more layers", config(num_hidden_layers=3), "layer_types"),
    Row("a config with fewer layers", config(num_hidden_layers=1), "layer_types"),
    Row("sizes below 0", config(hidden_size=-64), "model"),
    Row("sizes that are text", config(hidden_size="large"), "hidden_size"),
    Row("heads that do not divide", config(num_attention_heads=0), "model"),
    Row("a quantised model", config(quantization_config={"quant_method": "gptq", "bits": 4}), "quantised"),
    Row(
        "code of its own",
        config(auto_map={"AutoConfig": "m.C", "AutoModelForCausalLM": "m.M"}, model_type="own"),
        "model",
    ),
    Row("no weights", remove(WEIGHTS), "model|no file"),
    Row("empty weights", write(WEIGHTS, ""), "cannot load"),
    Row("weights that are cut", cut(WEIGHTS, 0.5), "cannot load"),
    Row("weights without their end", cut(WEIGHTS, 0.999), "cannot load"),
    Row("a header that is cut", cut(WEIGHTS, 0.001), "cannot load"),
    Row("weights that are text", write(WEIGHTS, "weights"), "cannot load"),
    Row(
        "weights that are a git pointer",
        write(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        "cannot load",
    ),
    Row("a header of 2^62 bytes", write(WEIGHTS, (2**62).to_bytes(8, "little")), "cannot load"),
    Row("a tensor that is missing", tensors(lambda t: t.pop(Q)), "lack .*q_proj"),
    Row("a tensor too many", tensors(lambda t: t.update(extra=torch.ones(3))), "extra"),
    Row("a tensor of another shape", tensors(lambda t: t.update({Q: torch.ones(3, 3)})), "another shape"),
    Row("a tensor with NaN", tensors(lambda t: t[Q].fill_(float("nan"))), "NaN or infinite"),
    Row(
        "a tensor with infinity", tensors(lambda t: t[Q].view(-1)[:1].fill_(float("inf"))), "NaN or infinite"
    ),
    Row(
        "a pickle of a function",
        instead("pytorch_model.bin", lambda p: p.write_bytes(pickle.dumps(print))),
        "cannot load",
    ),
    Row("a zipped pickle of a function", instead("pytorch_model.bin", zipped), "cannot load"),
    Row("an empty pickle", instead("pytorch_model.bin", lambda p: p.write_bytes(b"")), "cannot load"),
    Row(
        "a pickle that is text", instead("pytorch_model.bin", lambda p: p.write_text("hello")), "cannot load"
    ),
    Row("a pickle of a list", instead("pytorch_model.bin", lambda p: torch.save([1], p)), "cannot load"),
    Row(
        "a pickle of other tensors",
        instead("pytorch_model.bin", lambda p: torch.save({"a": torch.ones(1)}, p)),
        "lack|cannot load",
    ),
    Row(
        "an index of shards that are not there",
        instead(
            "model.safetensors.index.json",
            lambda p: p.write_text('{"metadata": {}, "weight_map": {"a": "b.safetensors"}}'),
        ),
        "model",
    ),
    Row(
        "an index that is cut",
        instead("model.safetensors.index.json", lambda p: p.write_text('{"weight_map": ')),
        "model",
    ),
    Row("no tokenizer", remove("tokenizer.json"), "usable tokenizer"),
    Row("an empty tokenizer", write("tokenizer.json", ""), "usable tokenizer"),
    Row("a tokenizer that is cut", cut("tokenizer.json", 0.5), "usable tokenizer"),
    Row("a tokenizer that is a list", write("tokenizer.json", "[]"), "usable tokenizer"),
    Row("a binary tokenizer", write("tokenizer.json", b"\x80\xff"), "usable tokenizer"),
    Row("a tokenizer config that is cut", cut("tokenizer_config.json", 0.5), "usable tokenizer"),
    Row("a vocabulary that is larger than the embedding", config(vocab_size=300), "300|another shape|embeds"),
    Row("a chat template that is cut", broken_template, "chat template|template"),
]


CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"


def adapter(config: object = '{"peft_type": "LORA"}', weights: object = "weights") -> Damage:
    """A directory with an adapter in the place of the model: the contents of its two files, or what makes them."""

    def damage(home: Path) -> None:
        remove("config.json", WEIGHTS)(home)
        for name, content in ((CONFIG, config), (ADAPTER, weights)):
            if callable(content):
                content(home / name)
            elif content is not None:
                (home / name).write_text(str(content))

    return damage


def loop(path: Path) -> None:
    path.symlink_to(path.name)


NAMED = "--model_name_or_path", "{model}", "--dataset_name", "{home}/good.jsonl"
COMMANDS = {
    "grpo": (*NAMED, "--reward_funcs", "length", "--output_dir", "{home}/run"),
    "online-dpo": (*NAMED[2:], "--model_name_or_path", "m", "--reward_funcs", "{model}"),
    "evaluate": (*NAMED, "--reward_funcs", "length", "--eval_size", "2"),
    "gateway": (*NAMED, "--agent_command", "true"),
    "verify": ("--model", "{model}"),
    "serve": ("{model}", "--dry_run"),
    "merge": ("{home}/good", "{home}/new", "--base", "{model}"),
    "audit": ("{home}/rollouts.jsonl", "--model", "{model}"),
}
ADAPTERS = [
    Row("whole", adapter(), CONFIG),
    Row("a config that is cut", adapter("{"), CONFIG),
    Row("a config that is nested deeply", adapter("[" * 100_000), CONFIG),
    Row("no config", adapter(None), ADAPTER),
    Row("a directory for a config", adapter(Path.mkdir), CONFIG),
    Row("a circle of links for a config", adapter(loop), CONFIG),
    Row("empty weights", adapter(weights=""), CONFIG),
    Row("no weights", adapter(weights=None), CONFIG),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_takes_an_adapter_for_a_model_whatever_is_wrong_with_it(
    command: str, tmp_path: Path, untied_dir: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words(tmp_path, "m")
    (tmp_path / "rollouts.jsonl").write_text(
        '{"prompt_ids": [1], "completion_ids": [2, 3], "logprobs": [-1.0, -2.0]}\n'
    )
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / CONFIG).write_text('{"base_model_name_or_path": "m"}')
    for row in ADAPTERS:
        home = shutil.copytree(untied_dir, tmp_path / row.name)
        row.given(home)
        capfd.readouterr()
        with in_time():
            code = main([command, *(word.format(home=tmp_path, model=home) for word in COMMANDS[command])])
        (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("lockstep: ")]
        assert (code, f"holds an adapter ({row.says}), not a whole model" in line) == (2, True), (
            row.name,
            line,
        )
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "run").exists()


@rows(*TABLE)
def test_a_bad_model_directory_is_one_line(
    row: Row, tmp_path: Path, untied_dir: str, capfd: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "model"
    shutil.copytree(untied_dir, home)
    row.given(home)
    data = {"dataset_name": str(home / "good.jsonl")} if (home / "good.jsonl").exists() else {}
    check(words(tmp_path, str(home), **data), row, capfd)
