"""Chat templates of model families, each with a tiny tokenizer that has the family's control tokens.

Most templates are read from the installed TRL, so that nothing is copied. Those of Mistral, SmolLM2 and Kimi K2
are minimal ones of our own.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lockstep.errors import InputError
from lockstep.tokens.extension import CASES, Extension

_TRL = Path(trl.__file__).parent / "chat_templates"
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ {'content': m.content, 'call_id': m.tool_call_id} | tojson "
    "}}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{% if m.tool_calls %}[TOOL_CALLS]["
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('an id has 9 characters') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]{% endif %}{{ eos_token }}{% endif %}{% endfor %}"
)
_KIMI = (
    "<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_system|>{{ m.name }}<|im_middle|>## Return of {{ "
    "m.tool_call_id }}\n"
    "{{ m.content }}{% else %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}{% endif %}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor "
    "%}<|tool_calls_section_end|>"
    "{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
_PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt "
    "%}assistant: {% endif %}"
)


class Family(NamedTuple):
    """A template, its tokenizer's special tokens (the first ends a turn), and added tokens that are not special."""

    template: str
    special: str
    added: str = ""
    ends: int = 1
    kwargs: tuple[tuple[str, object], ...] = ()


IM = "<|im_end|> <|im_start|> <|endoftext|>"
QWEN = "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁outputs▁begin｜> "
    "<｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> <｜tool▁sep｜> "
    "<｜User｜> <｜Assistant｜> <think> </think>"
)
LLAMA = "<|eot_id|> <|eom_id|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|python_tag|>"
GEMMA4 = (
    "<turn|> <|tool_response> <|turn> <tool_response|> <|tool_call> <tool_call|> <|channel> <channel|> "
    '<|"|> <|tool> <tool|>'
)
_COHERE = "<|END_OF_TURN_TOKEN|> <|START_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|>"
_LFM = (
    "<|im_end|> <|im_start|> <|tool_call_start|> <|tool_call_end|> <|tool_list_start|> <|tool_list_end|> "
    "<|endoftext|>"
)

FAMILIES: dict[str, Family] = {
    "smollm2": Family(_CHATML, IM),
    "qwen2.5": Family("qwen2_5", IM, "<tool_call> </tool_call>"),
    "qwen3": Family("qwen3", IM, QWEN),
    "qwen3, thinking off": Family("qwen3", IM, QWEN, kwargs=(("enable_thinking", False),)),
    "qwen3-2507": Family("qwen3_instruct_2507", IM, QWEN),
    "qwen3.5": Family("qwen3_5_think", IM, QWEN),
    "qwen3.5, thinking off": Family("qwen3_5_nothink", IM, QWEN),
    "nemotron-3": Family("nemotron_3_nano", IM, QWEN),
    "llama-3": Family("llama3", LLAMA),
    "llama-3.1": Family("llama3_1", LLAMA, ends=2),
    "llama-3.2": Family("llama3_2", LLAMA, ends=2),
    "mistral": Family(_MISTRAL, "</s> <s> [INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]"),
    "glm-4.5": Family(
        "glm4moe",
        "<|user|> <|observation|> <|endoftext|> <|assistant|> <|system|> [gMASK] <sop>",
        QWEN + " <arg_key> </arg_key> <arg_value> </arg_value>",
        ends=3,
    ),
    "gpt-oss": Family(
        "gptoss",
        "<|return|> <|call|> <|end|> <|start|> <|channel|> <|message|> <|constrain|>",
        ends=2,
    ),
    "deepseek-v3": Family("deepseekv3", "<｜end▁of▁sentence｜> <｜begin▁of▁sentence｜>", _DEEPSEEK),
    "deepseek-r1-distill": Family(
        "deepseek_r1_distill", "<｜end▁of▁sentence｜> <｜begin▁of▁sentence｜>", _DEEPSEEK
    ),
    "gemma-2": Family("gemma", "<end_of_turn> <eos> <bos> <start_of_turn>", ends=2),
    "gemma-3": Family("gemma3", "<end_of_turn> <eos> <bos> <start_of_turn>", ends=2),
    "gemma-4": Family("gemma4_v5", GEMMA4, ends=2),
    "phi-3": Family("phi3", "<|end|> <|user|> <|assistant|> <|system|> <|endoftext|>"),
    "cohere": Family("cohere", _COHERE),
    "cohere-2": Family("cohere2", _COHERE + " <|END_RESPONSE|> <|START_RESPONSE|>"),
    "lfm2": Family("lfm2_v2", _LFM),
    "lfm2.5": Family("lfm2_2_5_v2", _LFM, "<think> </think>"),
    "kimi-k2": Family(
        _KIMI,
        "<|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|tool_calls_section_begin|> "
        "<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>",
    ),
    "no control tokens": Family(_PLAIN, "<|endoftext|>"),
}

# Models that see images. The templates of the first two take text or lists of parts as content, the others take lists
# only.
_SEEN = "<|vision_start|> <|image_pad|> <|vision_end|>"
_TILES = "<|im_start|> <fake_token_around_image> <image> <global-img>"
VISION: dict[str, Family] = {
    "qwen2.5-vl": Family("qwen2_5_vl", f"{IM} {_SEEN}"),
    "qwen3-vl": Family("qwen3_vl", f"{IM} {_SEEN}", QWEN),
    "smolvlm": Family("smolvlm", f"<end_of_utterance> {_TILES}"),
    "idefics3": Family("idefics3", f"<end_of_utterance> <|begin_of_text|> {_TILES}"),
}


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a family, by its name."""
    return make_tokenizer((FAMILIES | VISION)[name])


@cache
def make_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 400 tokens and the family's control tokens, with the family's template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(
        [
            "what is 12 + 34\n\n",
            '{"name": "look_up", "arguments": {"city": "Paris"}}\n',
            "the user is <|the |tool> . <thing>\n",
        ]
        * 3,
        trainer,
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in family.special.split()]
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in family.added.split()]
    )
    special = family.special.split()
    bos = next(
        (t for t in special if t in ("<s>", "<bos>", "<|begin_of_text|>", "<｜begin▁of▁sentence｜>")), None
    )
    template = (
        family.template if "{" in family.template else (_TRL / f"{family.template}.jinja").read_text("utf-8")
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=special[0], bos_token=bos, chat_template=template
    )


@cache
def extension_of(name: str, tool_format: str | None = None) -> Extension:
    """Extends conversations of the family."""
    kwargs = dict(FAMILIES[name].kwargs)
    return Extension(
        tokenizer_of(name), end_ids_of(name), chat_template_kwargs=kwargs, tool_format=tool_format
    )


def end_ids_of(name: str) -> list[int]:
    """The ids that end a turn of the family."""
    return end_ids(FAMILIES[name])


def end_ids(family: Family) -> list[int]:
    """The ids that end a turn."""
    return [
        make_tokenizer(family).convert_tokens_to_ids(token) for token in family.special.split()[: family.ends]
    ]


def table() -> str:
    """The outcomes that docs/internals/conversations.md sums up: what happens in each family and case."""
    rows = [f"| family | tool calls | {' | '.join(CASES)} |", "|---" * (len(CASES) + 2) + "|"]
    for name in FAMILIES:
        try:
            extension = extension_of(name)
        except InputError:
            rows.append(f"| {name} | | {' | '.join(['refused'] * len(CASES))} |")
            continue
        cells = [extension.cases.get(case, "").split(":")[0] for case in CASES]
        rows.append(f"| {name} | {extension.conventions.tool_format or ''} | {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
