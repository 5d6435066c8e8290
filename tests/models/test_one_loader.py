"""Code that comes with a model is never run, and nobody is asked whether to run it, by any loader or command.

The model of these tests names a class of its own for everything that transformers can load. The class writes a file
when its module is imported. A `y` lies on the standard input.
"""

from __future__ import annotations

import ast
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from input.training_words import words
from tiny import save_model
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoProcessor,
    GenerationConfig,
    dynamic_module_utils,
)

from lockstep.cli.main import main
from lockstep.engines.transformers_engine import TransformersEngine
from lockstep.engines.vllm.arguments import OWN_CODE, check_user_arguments, cpu_cache_bytes
from lockstep.errors import InputError
from lockstep.extras.lora_alone.adapter_arguments import linear_layers
from lockstep.model_files import build_empty, code_refused, load_files
from lockstep.models.policy import load_policy
from lockstep.models.reward_model import load_reward_model
from lockstep.server.command import check_names
from lockstep.tokens.chat import load_tokenizer

REPOSITORY = Path(__file__).parents[2]
LOADER = "src/lockstep/model_files.py"
# Attributes that load files, which may bring code of their own.
LOADS = ("from_pretrained", "from_config", "get_class_from_dynamic_module", "load_custom_generate")
KINDS = (
    "Config",
    "Tokenizer",
    "Processor",
    "ImageProcessor",
    "ModelForCausalLM",
    "ModelForSequenceClassification",
)


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model directory with code of its own. The test fails if the code was run, or if anybody read the answer."""
    monkeypatch.setattr("sys.stdin", answer := io.StringIO("y\n" * 99))
    folder, ran = save_model(tmp_path / "foreign"), tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text((folder / "own.py").read_text())
    names = {f"Auto{kind}": f"own.{kind}" for kind in KINDS} | {
        "AutoTokenizer": ["own.Tokenizer", "own.Tokenizer"]
    }
    for name, known in (
        ("config.json", {"model_type": "own"}),
        ("tokenizer_config.json", {"tokenizer_class": "OwnTokenizer"}),
        ("preprocessor_config.json", {"image_processor_type": "OwnImageProcessor"}),
        ("processor_config.json", {"processor_class": "OwnProcessor"}),
    ):
        file = folder / name
        content = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**content, **known, "auto_map": names}))
    yield folder
    assert not ran.exists(), "the model's own code was run"
    assert answer.tell() == 0, "somebody read the answer from the standard input"


LOADERS: dict[str, Callable[[str], Any]] = {
    "config": lambda path: load_files(AutoConfig, path),
    "tokenizer": load_tokenizer,
    "image processor": lambda path: load_files(AutoImageProcessor, path),
    "processor": lambda path: load_files(AutoProcessor, path),
    "model": load_policy,
    "model, though the call trusts it": lambda path: load_files(
        AutoModelForCausalLM, path, trust_remote_code=True
    ),
    "reward model": load_reward_model,
    "transformers engine": lambda path: TransformersEngine(path, None, dtype=torch.float32, max_model_len=64),
    "cache of vLLM": lambda path: cpu_cache_bytes(path, torch.float32, 64, 1),
}


@pytest.mark.parametrize("name", LOADERS)
def test_no_loader_runs_a_models_own_code_or_asks(name: str, foreign: Path) -> None:
    with pytest.raises(InputError, match="custom code that comes with its files, and Lockstep does not run"):
        LOADERS[name](str(foreign))


def test_a_servers_layers_are_not_found_with_a_models_own_code(foreign: Path) -> None:
    assert linear_layers(str(foreign)) == []


@pytest.mark.parametrize("command", ["grpo", "verify", "serve", "audit"])
def test_no_command_runs_a_models_own_code_or_asks(
    command: str, foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump = tmp_path / "dump.jsonl"
    dump.write_text('{"prompt_ids": [1], "completion_ids": [2], "logprobs": [-1.0]}\n')
    given = {
        "grpo": words(tmp_path, str(foreign)),
        "verify": ["verify", "--model", str(foreign), "--engine", "transformers"],
        "serve": ["serve", str(foreign), "--dry_run"],
        "audit": ["audit", str(dump), "--model", str(foreign)],
    }
    code = main(given[command])
    said = capsys.readouterr().err
    assert code == 2, said
    assert "does not run such code" in said


def test_a_known_family_loads_with_its_class_of_transformers_whatever_else_its_config_names(
    foreign: Path,
) -> None:
    config = json.loads((foreign / "config.json").read_text())
    (foreign / "config.json").write_text(json.dumps({**config, "model_type": "qwen2"}))
    assert type(load_policy(str(foreign))).__name__ == "Qwen2ForCausalLM"
    assert linear_layers(str(foreign))


def test_a_part_that_another_library_makes_from_a_config_is_refused_too(foreign: Path) -> None:
    # As vLLM makes the vision part of some families: without `trust_remote_code`.
    config = GenerationConfig(
        auto_map={"AutoModelForCausalLM": "own.ModelForCausalLM"}, _name_or_path=str(foreign)
    )
    config.name_or_path = str(foreign)
    seconds = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    with code_refused(), pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForCausalLM.from_config(config)
    assert seconds == dynamic_module_utils.TIME_OUT_REMOTE_CODE > 0
    with pytest.raises(InputError, match="does not run such code"):
        build_empty(AutoModelForCausalLM, config)


@pytest.mark.parametrize("name", sorted(OWN_CODE))
def test_no_engine_argument_lets_vllm_run_a_models_own_code(name: str) -> None:
    for check in (lambda: check_user_arguments({name}, "vllm_engine_kwargs"), lambda: check_names([name])):
        with pytest.raises(InputError, match=f"may not set {name}: code that comes with a model is not run"):
            check()


def test_weights_are_not_unpickled_as_anything_else(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="weights_only=False is not supported"):
        load_policy(str(save_model(tmp_path / "model")), {"weights_only": False})


def loads_of(tree: ast.AST, *, may_say: bool = True) -> list[str]:
    """The places in a source that load files, as text.

    Those that say that the files' code is not trusted are left out if they
    may say so themselves."""
    safe = {
        id(node.func)
        for node in ast.walk(tree)
        if may_say
        and isinstance(node, ast.Call)
        and any(k.arg == "trust_remote_code" and ast.unparse(k.value) == "False" for k in node.keywords)
    }
    named = [
        n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in LOADS and id(n) not in safe
    ]
    asked = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.Call)
        and ast.unparse(n.func) == "getattr"
        and any(isinstance(a, ast.Constant) and a.value in LOADS for a in n.args)
    ]
    names = {*LOADS, "pipeline"}
    imported = [
        n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and names & {a.name for a in n.names}
    ]
    return [ast.unparse(node) for node in (*named, *asked, *imported)]


def test_everything_is_loaded_by_one_function() -> None:
    """No source of the package loads files itself. Programs for users write `trust_remote_code=False`."""
    found = {}
    for part in ("src", "benchmarks", "scripts", "examples", "recipes"):
        for path in (REPOSITORY / part).rglob("*.py"):
            name, text = str(path.relative_to(REPOSITORY)), path.read_text()
            if not any(word in text for word in (*LOADS, "pipeline")):
                continue
            tree = ast.parse(text)
            own = part == "src" and not name.startswith("src/lockstep/examples/")
            bare = loads_of(tree, may_say=not own)
            if name != LOADER and bare:
                found[name] = bare
    assert found == {}, f"load these with the functions of {LOADER}"


def test_another_way_to_load_is_found() -> None:
    for text in (
        "AutoConfig.from_pretrained(path)",
        "AutoConfig.from_pretrained(path, trust_remote_code=True)",
        "AutoConfig.from_pretrained(path, trust_remote_code=given)",
        "load = kind.from_pretrained",
        "getattr(kind, 'from_pretrained')(path)",
        "kind.from_config(config)",
        "from transformers import pipeline",
    ):
        assert loads_of(ast.parse(text)), text
    assert loads_of(ast.parse("kind.from_pretrained(path, trust_remote_code=False)")) == []
