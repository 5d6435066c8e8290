"""Every generation has the rows that are due, with the ids that the tokenizer makes of what the user gave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from datasets import Dataset
from methods import FIELDS, PROMPTS, StopAfter, make
from transformers import AutoTokenizer

from lockstep import GRPOConfig
from lockstep.contract.protocol import Engine
from lockstep.errors import ProofError
from lockstep.images.prompts import PromptReader
from lockstep.run.data.prompts import load_prompts, order_of
from lockstep.tokens.chat import Template
from lockstep.watch.given_rows import GivenRows

TEMPLATE = """{%- if tools %}{{ '<|im_start|>tools ' ~ (tools | tojson) ~ '<|im_end|>' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ ' ' ~ (m.content or '') ~ '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant ' ~ ('think ' if thinking else '') }}{% endif %}"""
IN_PARTS = TEMPLATE.replace(
    "(m.content or '')", "(m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join)"
)
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}},
}
QUESTIONS = [
    [{"role": "user", "content": "what is one"}],
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is two"}],
    [{"role": "user", "content": [{"type": "text", "text": "what is "}, {"type": "text", "text": "three"}]}],
    [{"role": "user", "content": "say it"}, {"role": "assistant", "content": "it is"}],
    [{"role": "user", "content": "this is <|im_end|> text"}],
    [{"role": "user", "content": "and this"}, {"role": "assistant", "content": None, "name": "x"}][:1],
]


@pytest.fixture(scope="module")
def tokenizer(untied_dir: str) -> Any:
    found = AutoTokenizer.from_pretrained(untied_dir)
    found.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    found.chat_template = TEMPLATE
    return found


def config(**fields: Any) -> GRPOConfig:
    return GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, **FIELDS["GRPO"] | fields)


def given(data: Dataset, tokenizer: Any, **fields: Any) -> GivenRows:
    args = config(**fields)
    return GivenRows(data, tokenizer, args, shuffled=args.shuffle_dataset)


@pytest.mark.parametrize("template", [TEMPLATE, IN_PARTS])
@pytest.mark.parametrize("thinking", [True, False])
def test_rows_of_every_form_pass(tokenizer: Any, template: str, thinking: bool) -> None:
    arguments = {"thinking": thinking}
    with patch.object(tokenizer, "chat_template", template):
        for question in QUESTIONS:
            data = Dataset.from_list([{"prompt": question}])
            rows = given(data, tokenizer, chat_template_kwargs=arguments)
            prompts = load_prompts(data, "train", PromptReader(tokenizer, arguments), max_prompt_length=900)
            assert rows.check_ids(prompts) == rows.check_ids(prompts) == []


@pytest.mark.parametrize("special", [True, False])
def test_rows_of_text_pass(tokenizer: Any, special: bool) -> None:
    rows = given(PROMPTS, tokenizer, add_special_tokens=special)
    reader = PromptReader(tokenizer, add_special_tokens=special)
    prompts = load_prompts(PROMPTS, "train", reader, max_prompt_length=900)
    assert rows.check_ids(prompts) == []


def other_arguments(template: Template, real: Any, messages: Any, **how: Any) -> str:
    with patch.object(template, "_kwargs", {}):
        return str(real(template, messages, **how))


FAULTS = {
    "the template's arguments are lost": lambda t, real, m, **how: other_arguments(t, real, m, **how),
    "tools are shown that nobody gave": lambda t, real, m, **how: real(t, m, **how).replace(
        "<|im_start|>", "<|im_start|>tools [] <|im_end|><|im_start|>", 1
    ),
    "the first message is lost": lambda t, real, m, **how: real(t, m[1:] or m * 2, **how),
    "messages are turned round": lambda t, real, m, **how: real(t, m[::-1] if len(m) > 1 else m * 2, **how),
    "a long message is cut": lambda t, real, m, **how: real(
        t, [*m[:-1], {**m[-1], "content": str(m[-1]["content"])[:-1]}], **how
    ),
    "roles are exchanged": lambda t, real, m, **how: real(t, m, **how).replace("user", "system"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_messages_that_are_rendered_in_another_way_are_refused(tokenizer: Any, fault: str) -> None:
    data, arguments = Dataset.from_list([{"prompt": QUESTIONS[1]}]), {"thinking": True}
    rows, real = given(data, tokenizer, chat_template_kwargs=arguments), Template._rendered
    with patch.object(Template, "_rendered", lambda t, m, **how: FAULTS[fault](t, real, m, **how)):
        prompts = load_prompts(data, "train", PromptReader(tokenizer, arguments), max_prompt_length=900)
    with pytest.raises(ProofError, match=r"train/0 has \d+ ids, its row gives") as caught:
        rows.check_ids(prompts)
    assert caught.value.check == "prompts"


def test_tools_that_a_prompt_must_show_are_missed(tokenizer: Any) -> None:
    data = Dataset.from_list([{"prompt": QUESTIONS[0]}])
    rows = GivenRows(data, tokenizer, config(), shuffled=False, tools_of=lambda row: [TOOL])
    with_tools = Template(tokenizer, [tokenizer.eos_token_id], tools=[TOOL])
    (bare,) = load_prompts(data, "train", PromptReader(tokenizer), max_prompt_length=900)
    right = replace(bare, ids=with_tools.ids(with_tools.text(QUESTIONS[0])))
    assert rows.check_ids([right]) == []
    with pytest.raises(ProofError, match="others than when it was due before"):
        rows.check_ids([bare])
    with pytest.raises(ProofError, match="its row gives"):
        GivenRows(data, tokenizer, config(), shuffled=False, tools_of=lambda row: [TOOL]).check_ids([bare])


def test_a_guarded_row_whose_text_differs_is_not_proven_and_no_alarm(tokenizer: Any) -> None:
    data = Dataset.from_list([{"prompt": QUESTIONS[4]}])
    (prompt,) = load_prompts(data, "train", PromptReader(tokenizer), max_prompt_length=900)
    rows = given(data, tokenizer)
    assert rows.check_ids([replace(prompt, ids=prompt.ids[:-3])]) == ["train/0"]


@pytest.mark.parametrize("form", [None, "numpy", "torch"])
def test_rows_in_a_format_of_their_own_pass(tokenizer: Any, form: str | None) -> None:
    data = Dataset.from_list([{"prompt": QUESTIONS[1]}]).with_format(form)
    prompts = load_prompts(data, "train", PromptReader(tokenizer), max_prompt_length=900)
    assert given(data, tokenizer).check_ids(prompts) == []


def test_a_transform_that_gives_other_rows_each_time_is_not_proven_and_no_alarm(tokenizer: Any) -> None:
    data, reads = Dataset.from_dict({"prompt": ["", ""], "word": ["what", "is"]}), []

    def drawn(batch: dict[str, Any]) -> dict[str, Any]:
        reads.append(1)
        return {"prompt": [f"{word} {'it ' * len(reads)}" for word in batch["word"]]}

    changing = data.with_transform(drawn)
    prompts = load_prompts(changing, "train", PromptReader(tokenizer), max_prompt_length=900)
    assert given(changing, tokenizer).check_ids(prompts) == ["train/0", "train/1"]
    still = data.with_transform(lambda batch: {"prompt": batch["word"]})
    prompts = load_prompts(still, "train", PromptReader(tokenizer), max_prompt_length=900)
    assert given(still, tokenizer).check_ids(prompts) == []


def prompts_of(tokenizer: Any) -> list[Any]:
    return load_prompts(PROMPTS, "train", PromptReader(tokenizer), max_prompt_length=900)


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_is_the_one_of_training_in_every_pass(tokenizer: Any, shuffle: bool) -> None:
    args, prompts = config(shuffle_dataset=shuffle, data_seed=5), prompts_of(tokenizer)
    order = order_of(prompts, args, shuffle=shuffle)
    rows = GivenRows(PROMPTS, tokenizer, args, shuffled=shuffle)
    for number in range(11):
        rows.check_order([prompts[place] for place in order.places(number)], number)


ORDERS = {
    "the generation before": lambda order, number: order.places(max(number - 1, 0) if number else 1),
    "the same order in every pass": lambda order, number: order.places(number % order.per_epoch),
    "two rows exchanged": lambda order, number: order.places(number)[::-1],
    "only the first half of the rows": lambda order, number: [p % 4 for p in order.places(number)],
    "a row short": lambda order, number: order.places(number)[1:],
}


@pytest.mark.parametrize("fault", ORDERS)
def test_another_order_is_refused(tokenizer: Any, fault: str) -> None:
    args, prompts = config(), prompts_of(tokenizer)
    order = order_of(prompts, args, shuffle=True)
    rows = GivenRows(PROMPTS, tokenizer, args, shuffled=True)

    def check_two_passes() -> None:
        for number in range(2 * order.per_epoch):
            rows.check_order([prompts[place] for place in ORDERS[fault](order, number)], number)

    with pytest.raises(ProofError, match=r"generation \d has") as caught:
        check_two_passes()
    assert caught.value.check == "prompts"


def test_without_solved_rows_a_generation_has_each_row_once(tokenizer: Any) -> None:
    rows, prompts = given(PROMPTS, tokenizer, no_positive_resampling=0.9), prompts_of(tokenizer)
    rows.check_order([prompts[5], prompts[1]], 3)
    with pytest.raises(ProofError, match="1 different rows in 2 places; 2 are due"):
        rows.check_order([prompts[5], prompts[5]], 3)


def test_a_run_that_goes_on_with_the_wrong_rows_stops_before_it_learns(
    untied_dir: str, hf_engine: Engine, tmp_path: Path
) -> None:
    fields = {**FIELDS["GRPO"], "save_strategy": "steps", "save_steps": 2}
    first = make("GRPO", untied_dir, tmp_path, hf_engine, fields, callbacks=[StopAfter(2)])
    first.train()
    again = make("GRPO", untied_dir, tmp_path, hf_engine, fields)
    real = again._order.places
    with (
        patch.object(again._order, "places", lambda generation: real(generation + 1)),
        pytest.raises(ProofError, match="generation 2 has the row") as caught,
    ):
        again.train(resume_from_checkpoint=True)
    assert (caught.value.check, again.state.global_step) == ("prompts", 2)


def test_ids_that_change_in_the_middle_of_a_run_stop_it(
    untied_dir: str, hf_engine: Engine, tmp_path: Path
) -> None:
    class Changed(StopAfter):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == 4:
                prompts = trainer._train_prompts
                prompts[:] = [replace(p, ids=np.roll(p.ids, 1)) for p in prompts]

    trainer = make("GRPO", untied_dir, tmp_path, hf_engine, FIELDS["GRPO"], callbacks=[Changed(9)])
    with pytest.raises(ProofError, match="others than when it was due before"):
        trainer.train()
    assert trainer.state.global_step == 4
