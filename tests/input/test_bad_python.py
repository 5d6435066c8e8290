"""Bad arguments from Python: each raises one clear error of ours, where possible before a model is loaded."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from bad_input import Row, refused, rows
from tiny import make_model, make_tokenizer
from torch._dynamo.eval_frame import DisableContext, OptimizedModule
from transformers import BertConfig, BertModel

from lockstep import GRPOConfig, GRPOTrainer, OnlineDPOTrainer
from lockstep.connection import connect
from lockstep.errors import InputError, LockstepError
from lockstep.run.data import prompts
from lockstep.tokens import chat

DATA = datasets.Dataset.from_dict({"prompt": [f"p{i}" for i in range(8)]})


def reward(completions: list, **_: Any) -> list[float]:
    return [float(i) for i in range(len(completions))]


@pytest.fixture(scope="module")
def make(untied_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., GRPOTrainer]:
    folder = tmp_path_factory.mktemp("python")
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "use_vllm": False,
        "bf16": False,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 4,
        "max_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }

    def made(config: dict[str, Any] | None = None, **changes: Any) -> GRPOTrainer:
        given = {"model": untied_dir, "reward_funcs": reward, "train_dataset": DATA, **changes}
        given.setdefault("args", GRPOConfig(**{**settings, **(config or {})}))
        return GRPOTrainer(**given)

    return made


class Slow(torch.nn.Module):
    pass


def other(kind: str = "qwen2", **changes: Any) -> Any:
    model = make_model(kind, **changes)
    model.config._name_or_path = "/nowhere/model"
    return model


def held(change: Callable[[Any], object] | None = None, **kind: Any) -> Any:
    """A model as a user may give it, with the name of its files."""
    model = make_model(**kind)
    changed = None if change is None else change(model)
    return model if changed is None else changed


def without_a_gradient(model: Any) -> None:
    model.requires_grad_(False)


def of_no_values(model: Any) -> None:
    model.lm_head.to("meta")


def in_eight_bits(model: Any) -> None:
    model.lm_head.weight.requires_grad = False
    model.lm_head.weight.data = model.lm_head.weight.data.to(torch.int8)


def made_for_inference(model: Any) -> None:
    with torch.inference_mode():
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(384, 64))


def tied(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def untied(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


def compiled(model: Any) -> Any:
    """What `torch.compile` makes, also where tests have switched it off."""
    return OptimizedModule(model, DisableContext())


MODELS = {
    "frozen": (without_a_gradient, {}, "all its parameters are frozen"),
    "without values": (of_no_values, {}, "lm_head.weight have no values .device meta"),
    "in eight bits": (in_eight_bits, {}, "lm_head.weight is torch.int8, a quantised weight"),
    "in float16": (lambda model: model.half(), {}, "is trained in torch.float16, which needs a loss scaler"),
    "made for inference": (made_for_inference, {}, "was made in torch.inference_mode"),
    "tied, and the config says not": (tied, {}, "are one parameter, and its config says"),
    "not tied, and the config says so": (untied, {"tied": True}, "are two parameters, and its config says"),
    "compiled": (compiled, {}, "model is compiled"),
    "with a compiled layer": (
        lambda model: model.model.layers.__setitem__(0, compiled(model.model.layers[0])),
        {},
        "model is compiled",
    ),
}


def raising(error: BaseException, after: int = 0) -> datasets.IterableDataset:
    def generate() -> Any:
        yield from ({"prompt": f"p{i}"} for i in range(after))
        raise error

    return datasets.IterableDataset.from_generator(generate)


def endless() -> datasets.IterableDataset:
    return datasets.IterableDataset.from_generator(lambda: ({"prompt": f"p{i}"} for i in itertools.count()))


def fail(_: Any) -> Any:
    return 1 / 0


ARGUMENTS = [
    Row("a model that is a number", {"model": 42}, "model.*int"),
    Row("a model that is nothing", {"model": None}, "model.*NoneType"),
    Row("a model that is a path object", {"model": Path("/nowhere/model")}, "does not exist|PosixPath"),
    Row("a model that is a plain module", {"model": torch.nn.Linear(2, 2)}, "model.*Linear"),
    Row(
        "a model without a head",
        {
            "model": BertModel(
                BertConfig(
                    hidden_size=32,
                    num_hidden_layers=1,
                    num_attention_heads=2,
                    intermediate_size=32,
                    vocab_size=64,
                )
            )
        },
        "BertModel|language model",
    ),
    Row("a model from nowhere", {"model": other}, "does not exist"),
    Row("a class of models", {"model": torch.nn.Module}, "model"),
    Row("a tokenizer that is text", {"processing_class": "gpt2"}, "processing_class.*str"),
    Row("a tokenizer that is a number", {"processing_class": 3}, "processing_class.*int"),
    Row("a tokenizer that is a function", {"processing_class": len}, "processing_class"),
    Row("a tokenizer that is a model", {"processing_class": torch.nn.Linear(2, 2)}, "processing_class"),
    Row("args that are a dictionary", {"args": {"seed": 1}}, "args is a dict"),
    Row("args of another method", {"args": "rloo"}, "args is a str"),
    Row("data that is a list", {"train_dataset": [{"prompt": "a"}]}, "must be a datasets.Dataset, got list"),
    Row("data that is nothing", {"train_dataset": None}, "`train_dataset` is required"),
    Row("data that is text", {"train_dataset": "data.jsonl"}, "must be a datasets.Dataset, got str"),
    Row(
        "data with splits",
        {"train_dataset": datasets.DatasetDict({"train": DATA})},
        "must be a datasets.Dataset, got DatasetDict",
    ),
    Row(
        "a stream that breaks",
        {"train_dataset": raising(OSError("gone"))},
        "row 0 cannot be read: OSError: gone",
    ),
    Row(
        "a stream that exits",
        {"train_dataset": raising(SystemExit(3))},
        "row 0 cannot be read: SystemExit: 3",
    ),
    Row(
        "a transform that raises",
        {"train_dataset": DATA.with_transform(fail)},
        "row 0 cannot be read: ZeroDivision",
    ),
    Row("rows of pandas", {"train_dataset": DATA.to_pandas()}, "Dataset.from_pandas makes one"),
    Row("empty data", {"train_dataset": DATA.select([])}, "is empty"),
    Row("data for evaluation that is a list", {"eval_dataset": [1]}, "eval dataset must be"),
    Row("a reward that is a number", {"reward_funcs": 3}, "neither a function nor a reward model"),
    Row("no reward", {"reward_funcs": []}, "No reward source provided"),
    Row("a reward that is nothing", {"reward_funcs": None}, "No reward source provided"),
    Row("nothing among rewards", {"reward_funcs": [reward, None]}, "No reward source provided"),
    Row("a reward that is a plain module", {"reward_funcs": Slow()}, "neither a function nor a reward model"),
    Row(
        "a reward that is a language model",
        {"reward_funcs": other},
        "outputs|sequence classifier|tokenizer|reward|no model directory",
    ),
    Row("tokenizers of another number", {"reward_processing_classes": [None, None]}, "2 entries for 1"),
    Row("callbacks that are not a list", {"callbacks": 3}, "callbacks"),
    Row("callbacks that are functions", {"callbacks": [reward]}, "callbacks"),
    Row("optimizers that are text", {"optimizers": "adamw"}, "optimizers"),
    Row("one optimizer", {"optimizers": (None,)}, "optimizers"),
    Row("an adapter that is a dictionary", {"peft_config": {"r": 8}}, "peft_config.*dict"),
    Row("an adapter that is text", {"peft_config": "lora"}, "peft_config.*str"),
    Row("tools", {"data_collator": reward}, "data_collator is not supported"),
    Row("a reference without beta", {"ref_model": other}, "beta"),
    Row("an engine that is text", {"engine": "vllm"}, "engine.*str"),
    Row("an engine without methods", {"engine": object()}, "engine"),
]
CONFIGS = [
    Row("a learning rate that is text", {"learning_rate": "fast"}, "learning_rate"),
    Row("a learning rate that is a list", {"learning_rate": [1e-6]}, "learning_rate"),
    Row("a temperature that is nothing", {"temperature": None}, "temperature"),
    Row("steps that are text", {"max_steps": "many"}, "max_steps"),
    Row("weights that are text", {"reward_weights": ["a"]}, "reward_weights"),
    Row("weights that are one number", {"reward_weights": 1.0}, "reward_weights"),
    Row("stop strings that are text", {"stop_strings": "end"}, "stop_strings"),
    Row("stop strings that are numbers", {"stop_strings": [3]}, "stop_strings"),
    Row("a group that is a fraction", {"num_generations": 2.5}, "num_generations"),
    Row("NaN", {"learning_rate": float("nan")}, "learning_rate"),
    Row("kwargs that are a list", {"model_init_kwargs": [1]}, "model_init_kwargs"),
    Row(
        "half a character in a list",
        {"stop_strings": ["a\udcff"]},
        "stop_strings .*a character that is not text",
    ),
    Row(
        "half a character in a mapping",
        {"chat_template_kwargs": {"a": "\udcff"}},
        "a character that is not text",
    ),
    Row("a zero byte", {"output_dir": "a\0b"}, "output_dir .*holds a character that is not text"),
    Row("half a character", {"output_dir": "run\udcff"}, "output_dir .*holds a character that is not text"),
    Row(
        "a generation that no machine holds",
        {"num_generations": 10**8, "per_device_train_batch_size": 10**8},
        "a generation has 100,000,000 completions",
    ),
    Row(
        "completions that leave no room",
        {"max_completion_length": 512},
        "512 tokens leave no room for a prompt.* lower max_completion_length",
    ),
    Row("a seed that is text", {"seed": "x"}, "seed"),
]
CONNECTIONS = [
    Row("no URL", {"url": []}, "url"),
    Row("not a URL", {"url": "gpu-node"}, "url has 'gpu-node'"),
    Row("two URLs as one text", {"url": "http://a:1,http://b:1"}, "several of them in a list"),
    Row("a password", {"url": "http://a:hunter2@b"}, "user name or password"),
    Row("a port out of range", {"url": "http://a:99999"}, "99999"),
    Row("the same URL twice", {"url": ["http://a", "http://a"]}, "twice"),
    Row(
        "a key file that is not there",
        {"url": "http://127.0.0.1:1", "key_file": "/nowhere/key"},
        "cannot be read",
    ),
    Row("a key file that is a directory", {"url": "http://127.0.0.1:1", "key_file": "/"}, "key"),
    Row("nobody there", {"url": "http://127.0.0.1:1", "timeout": 0.3}, "did not answer within"),
    Row("a time limit of nothing", {"url": "http://127.0.0.1:1", "timeout": 0.0}, "timeout"),
    Row("a time limit below 0", {"url": "http://127.0.0.1:1", "timeout": -1.0}, "timeout"),
    Row("a time limit that is NaN", {"url": "http://127.0.0.1:1", "timeout": float("nan")}, "timeout"),
    Row(
        "a port of gloo out of range",
        {"url": "http://127.0.0.1:1", "group_port": 70000, "timeout": 0.3},
        "group_port|did not answer",
    ),
    Row(
        "a transport that nobody knows",
        {"url": "http://127.0.0.1:1", "transport": "pigeon", "timeout": 0.3},
        "pigeon|did not answer",
    ),
]


@rows(*ARGUMENTS)
def test_a_bad_argument_is_one_error(row: Row, make: Callable[..., GRPOTrainer]) -> None:
    given = {name: value() if value is other else value for name, value in row.given.items()}
    refused(lambda: make(**given), row.says)


@rows(*CONFIGS)
def test_a_bad_field_is_one_error(row: Row, make: Callable[..., GRPOTrainer]) -> None:
    refused(lambda: make(row.given), row.says)


@rows(*CONNECTIONS)
def test_a_bad_connection_is_one_error(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCKSTEP_SERVER_KEY", raising=False)
    refused(lambda: connect(**row.given), row.says)


def test_a_judge_that_is_none_is_one_error(untied_dir: str, tmp_path: Path) -> None:
    refused(lambda: OnlineDPOTrainer(untied_dir, judge="gpt", train_dataset=DATA), "judge")


@pytest.mark.parametrize(
    "data",
    [
        DATA.with_format("arrow"),
        DATA.with_format("pandas"),
        DATA.add_column("answer", ["1"] * 8).with_format("numpy", columns=["answer"]),
        DATA.to_iterable_dataset().with_format("arrow"),
    ],
    ids=["arrow", "pandas", "hidden columns", "a stream of tables"],
)
def test_rows_are_read_whatever_format_a_dataset_has(make: Callable[..., GRPOTrainer], data: Any) -> None:
    trainer = make(train_dataset=data, eval_dataset=data)
    assert [prompt.source for prompt in trainer._train_prompts][:1] == ["p0"]
    trainer.close()


def test_an_evaluation_stream_without_an_end_is_one_error(
    make: Callable[..., GRPOTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "_MOST_EVALUATED", 50)
    refused(lambda: make(eval_dataset=endless()), "more than 50 rows")


def test_messages_of_numpys_format_are_messages(make: Callable[..., GRPOTrainer]) -> None:
    data = datasets.Dataset.from_dict({"prompt": [[{"role": "user", "content": f"p{i}"}] for i in range(8)]})
    trainer = make(train_dataset=data.with_format("numpy"))
    assert trainer._train_prompts[0].source == [{"role": "user", "content": "p0"}]
    trainer.close()


@pytest.mark.parametrize("how", MODELS)
def test_a_model_that_cannot_be_trained_is_refused_by_its_cause(
    how: str, make: Callable[..., GRPOTrainer], untied_dir: str, tied_dir: str
) -> None:
    change, kind, says = MODELS[how]
    model = held(change, **kind)
    model.config._name_or_path = tied_dir if kind else untied_dir
    refused(lambda: make(model=model), says)


@pytest.mark.parametrize("within", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")])
def test_a_trainer_is_neither_made_nor_called_where_torch_computes_otherwise(
    within: Any, make: Callable[..., GRPOTrainer]
) -> None:
    trainer = make()
    with within():
        refused(make, "outside of it")
        refused(trainer.train, "outside of it")
    trainer.close()


@pytest.mark.parametrize(
    ("place", "says"), [("cuda", "CUDA"), ({"": "cuda:0"}, "CUDA"), ("meta", "have no values|no data")]
)
def test_a_device_map_that_cannot_be_used_is_one_error(
    place: Any, says: str, make: Callable[..., GRPOTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available() and place != "meta":
        pytest.skip("this machine has a GPU")
    refused(lambda: make({"model_init_kwargs": {"device_map": place}}), says)


TEMPLATES = {
    "{{ 1 // 0 }}": "refuses these messages: ZeroDivisionError",
    "{{ 1 + 'a' }}": "refuses these messages: TypeError",
    "{{ range(10**12) }}": "refuses these messages: OverflowError",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}": "refuses these messages: RecursionError",
    "{{ raise_exception('no\nsystem') }}": "refuses these messages: no system",
    "{% for %}": "refuses these messages",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_whatever_a_template_raises_is_one_error(template: str, make: Callable[..., GRPOTrainer]) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    data = datasets.Dataset.from_dict({"prompt": [[{"role": "user", "content": "a"}]] * 8})
    refused(lambda: make(train_dataset=data, processing_class=tokenizer), TEMPLATES[template])


def test_a_template_without_an_end_is_one_error(
    make: Callable[..., GRPOTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "_RENDERED", 0.2)
    tokenizer = make_tokenizer()
    loop = "{% for i in range(99999) %}"
    tokenizer.chat_template = f"{loop}{loop}{{% endfor %}}{{% endfor %}}"
    data = datasets.Dataset.from_dict({"prompt": [[{"role": "user", "content": "a"}]] * 8})
    refused(lambda: make(train_dataset=data, processing_class=tokenizer), "has a loop without an end")


def test_a_process_whose_new_tensors_have_64_bits_is_one_error(make: Callable[..., GRPOTrainer]) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        refused(make, "default dtype is float64")
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def trainer(make: Callable[..., GRPOTrainer]) -> GRPOTrainer:
    return make(processing_class=make_tokenizer())


RESUMES = [
    Row("no checkpoint at all", True, "no checkpoint"),
    Row("a checkpoint that is not there", "/nowhere/checkpoint-1", "not a checkpoint|does not exist"),
    Row("a directory without a checkpoint", "/", "not a checkpoint|trainer_state.json"),
    Row("a number", 3, "resume_from_checkpoint"),
]


@rows(*RESUMES)
def test_a_resume_without_a_checkpoint_is_one_error(row: Row, trainer: GRPOTrainer) -> None:
    refused(lambda: trainer.train(resume_from_checkpoint=row.given), row.says)


def test_a_trainer_that_is_closed_trains_no_more(make: Callable[..., GRPOTrainer]) -> None:
    closed = make()
    closed.close()
    refused(lambda: closed.train(), "closed", LockstepError)
    refused(lambda: closed.evaluate(), "closed|eval_dataset", LockstepError)
    closed.close()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("vllm_importance_sampling_mode", "token_truncat", "did you mean 'token_truncate'"),
        ("lr_scheduler_type", "diagonal", "The choices are: linear"),
        ("eval_strategy", "", "The choices are: no, steps, epoch"),
        ("debug", "x", "underflow_overflow"),
        ("output_dir", "a" * 300, "more than 255 bytes"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused(name: str, value: str, says: str) -> None:
    refused(lambda: GRPOConfig(**{"output_dir": "unused", name: value}), f"{value[:20]}.*{says}", InputError)


@pytest.mark.parametrize("value", [np.array([1, 2]), object(), torch.tensor(3), 1j])
@pytest.mark.parametrize(
    "name", ["parallelism_config", "report_to", "structured_outputs_json", "beta", "stop_strings"]
)
def test_an_object_that_no_field_takes_is_refused_by_name(name: str, value: object) -> None:
    refused(lambda: GRPOConfig(output_dir="unused", **{name: value}), name, InputError)


def test_whole_numbers_are_fractions_where_a_field_has_fractions() -> None:
    """torch's AdamW takes no pair of 0 and 0.999."""
    made = GRPOConfig(output_dir="unused", adam_beta1=0, adam_beta2=0)
    assert isinstance(made.adam_beta1, float)


def test_entries_of_a_list_are_checked_by_their_type() -> None:
    refused(lambda: GRPOConfig(output_dir="unused", bad_words=["a", 3]), "bad_words.*each entry must be text")
    refused(
        lambda: GRPOConfig(output_dir="unused", allowed_token_ids=[1.5]), "each entry must be a whole number"
    )
