"""Model families that the library `renderers` knows, each with a chat template and a tiny tokenizer that has the family's tokens.

Most templates are those of `families.py`. That of MiniMax M2 is a small one of our own. The library is installed in a folder of its
own, because it clashes with a package of vLLM (`make environments`).

    PYTHONPATH=src:tests .venv/bin/python tests/tokens/renderer_families.py      (docs/internals/conversations.md sums it up)
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from typing import NamedTuple

import pytest
from families import FAMILIES, GEMMA4, IM, LLAMA, QWEN, Family, end_ids, make_tokenizer
from other_pythons import FOLDER

from lockstep.errors import InputError
from lockstep.tokens.arrays import joined
from lockstep.tokens.conversation.extension import Extension
from lockstep.tokens.conversation.extension_proof import CALLS, EXTENDS, USER_TURN, drawn
from lockstep.tokens.conversation.family_renderer import RendererDiffers

# Behind all others: an installed copy comes first.
sys.path.append(str(FOLDER / "renderers"))
INSTALLED = importlib.util.find_spec("renderers") is not None
needs_renderers = pytest.mark.skipif(not INSTALLED, reason="renderers is not installed (make environments)")

_MINIMAX = (
    "]~!b[]~b]system\nYou are helpful.[e~[\n"
    "{% set ns = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.user = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{% if m.role == 'user' %}]~b]user\n{{ m.content }}[e~[\n"
    "{% elif m.role == 'assistant' %}]~b]ai\n"
    "{% if m.reasoning_content and loop.index0 > ns.user %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}"
    '{% if m.tool_calls %}\n<minimax:tool_call>\n{% for c in m.tool_calls %}<invoke name="{{ c.function.name }}">\n'
    '{% for k, v in c.function.arguments.items() %}<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>\n'
    "{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}[e~[\n"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}]~b]tool{% endif %}{{ '\n<response>' }}"
    "{{ m.content }}"
    "</response>{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}[e~[\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}]~b]ai\n<think>\n{% endif %}"
)
_MINIMAX_TOKENS = "<think> </think> <minimax:tool_call> </minimax:tool_call>"
_SEEN = "<|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>"
_QWEN35 = (f"{IM} {_SEEN}", QWEN)
_GEMMA = f"{GEMMA4} <bos> <eos> <pad> <|image> <|image|> <image|> <|audio> <|audio|> <audio|> <|video|> <|think|>"


class Rendered(NamedTuple):
    """A family and the name of its renderer."""

    family: Family
    renderer: str


RENDERED = {
    "qwen3": Rendered(FAMILIES["qwen3"], "qwen3"),
    "qwen3, thinking off": Rendered(FAMILIES["qwen3, thinking off"], "qwen3"),
    "qwen3-2507": Rendered(FAMILIES["qwen3-2507"], "qwen3"),
    "qwen3.5": Rendered(Family("qwen3_5_think", *_QWEN35), "qwen3.5"),
    "qwen3.5, thinking off": Rendered(Family("qwen3_5_nothink", *_QWEN35), "qwen3.5"),
    "qwen3.6": Rendered(Family("qwen3_6", *_QWEN35), "qwen3.6"),
    "qwen3.8": Rendered(Family("qwen3_8", *_QWEN35), "qwen3.8"),
    "qwen3-vl": Rendered(Family("qwen3_vl", *_QWEN35), "qwen3-vl"),
    "nemotron-3 nano": Rendered(FAMILIES["nemotron-3"], "nemotron-3"),
    "nemotron-3 super": Rendered(Family("nemotron_3_super", IM, QWEN), "nemotron-3"),
    "nemotron-3 ultra": Rendered(Family("nemotron_3_ultra", IM, QWEN), "nemotron-3-ultra"),
    "nemotron-3.5": Rendered(Family("nemotron_3_5_lightning", IM, QWEN), "nemotron-3.5"),
    "llama-3.2": Rendered(Family("llama3_2", f"{LLAMA} <|end_of_text|>", ends=2), "llama-3"),
    "glm-4.5": Rendered(FAMILIES["glm-4.5"], "glm-4.5"),
    "gpt-oss": Rendered(FAMILIES["gpt-oss"], "gpt-oss"),
    "deepseek-v3": Rendered(FAMILIES["deepseek-v3"], "deepseek-v3"),
    "deepseek-r1-distill": Rendered(FAMILIES["deepseek-r1-distill"], "deepseek-r1"),
    "gemma-4": Rendered(Family("gemma4_v5", _GEMMA, ends=2), "gemma4"),
    "kimi-k2": Rendered(FAMILIES["kimi-k2"], "kimi-k2"),
    "minimax-m2": Rendered(Family(_MINIMAX, "[e~[ ]~b] ]~!b[", _MINIMAX_TOKENS), "minimax-m2"),
}


@cache
def extension_of(name: str, with_renderer: bool = True) -> Extension:
    """Extends conversations of the family, with its renderer or without."""
    family, renderer = RENDERED[name]
    return Extension(
        make_tokenizer(family),
        end_ids(family),
        chat_template_kwargs=dict(family.kwargs),
        renderer=renderer if with_renderer else None,
    )


def inserted_by(extension: Extension, case: str) -> str:
    """Which of both makes the ids after an ended turn: "renderer" or "template", or "branches"."""
    continuation = extension.continuation
    if continuation.renderer is None or case not in extension.cases:
        return ""
    asked, last, follow = next(drawn(continuation, case))
    text, at = continuation.rendered(asked, last, follow)
    before = continuation.template.text(asked)
    if extension.cases[case] != EXTENDS:
        return extension.cases[case].split(":")[0]
    turn, end = (continuation.template.ids(part) for part in (text[len(before) : at], text[at:]))
    ids = continuation.renderer.inserted(continuation.template.ids(before), joined([turn, end[:1]]), follow)
    return "template" if ids is None else "renderer"


def table() -> str:
    """What a renderer gives for each family, and what the template alone gives."""
    rows = [
        "| family | renderer | a run with it | inserted after a call by | inserted after an answer by | calls read by | "
        "without a renderer |",
        "|---" * 7 + "|",
    ]
    for name, (_, renderer) in RENDERED.items():
        try:
            own = extension_of(name, with_renderer=False)
            alone = "the same ids" if own.reads_calls or not own.conventions.shows_calls else "calls cannot be read"
        except InputError:
            alone = "refused"
        try:
            extension = extension_of(name)
        except InputError as error:
            why = "refused: other ids" if isinstance(error, RendererDiffers) else "refused: other tokens"
            rows.append(f"| {name} | {renderer} | {why} | | | | {alone} |")
            continue
        how = extension.conventions
        reads = "Lockstep" if how.tool_format else "renderer" if extension.reads_calls else ""
        cells = [inserted_by(extension, case) for case in (CALLS[0], USER_TURN)]
        rows.append(f"| {name} | {renderer} | starts | {' | '.join(cells)} | {reads} | {alone} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
