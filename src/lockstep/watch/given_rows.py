"""The prompts proof: a generation has the rows of the data set that are due, and their ids are the tokenizer's.

Both are computed a second time here: the order from the seed alone, and the ids from the data set's own rows, by the
tokenizer's own chat template. A row is rendered the first time that it is due. From then on its digest is compared.

A message with the text of a control token is guarded when it is rendered (`tokens/chat.py`), so that its ids are
others than those of the tokenizer. Of such a row the text is compared. Where a template treats guarded text in another
way, the text differs too: then the receipt says that the row was not proven.

Proof `prompts`.
Shows: every generation has the rows that are due by the seed, in that order (exact, a second computation); the ids of
each row are what the tokenizer makes of the user's text or messages, with the tools and the template's arguments of
the run, and with the ids of the row's pictures (exact; rows with pictures: as they were read at the start).
Does not show: that the order of rows that are not solved yet is right (`no_positive_resampling`: each row once in a
generation is shown); rows of an evaluation (`evaluation`: they are those of the start); what an environment, an agent
or a `rollout_func` makes of a prompt; more than the text of a row with the text of a control token.
When: every generation, after the rewards; the ids of a row the first time, and later their digest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import xxhash
from datasets import Dataset
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from lockstep.config.run import OnlineConfig
from lockstep.errors import ProofError
from lockstep.rollouts.group import Prompt
from lockstep.tokens.arrays import Ids, whole_numbers
from lockstep.tokens.chat import with_joined_text, with_picture_ids

# Columns that decide on a prompt's ids: the messages, and which environment's tools they show.
_READ = ("prompt", "environment")


class GivenRows:
    """The training rows of a run as the user gave them.

    Args:
        rows: the data set.
        shuffled: whether each pass over the rows has its own order.
        tools_of: the schemas of the tools that a row's prompt shows; None: a prompt shows none.
        messages_of: the messages of a row with its pictures in them; None: the run has no pictures.
    """

    def __init__(
        self,
        rows: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        config: OnlineConfig,
        *,
        shuffled: bool,
        tools_of: Callable[[Mapping[str, Any]], list[dict[str, Any]]] | None = None,
        messages_of: Callable[[Mapping[str, Any], Any], list[dict[str, Any]]] | None = None,
    ) -> None:
        # A user's transform may need other columns, and may give another row every time.
        self._is_transformed = rows.format["type"] == "custom"
        own = [name for name in _READ if name in rows.column_names]
        self._rows = rows if self._is_transformed else rows.select_columns(own)
        self._tokenizer, self._config, self._shuffled = tokenizer, config, shuffled
        self._tools_of, self._messages_of = tools_of, messages_of
        # Digests of the ids of the rows that were due before.
        self._known: dict[str, int] = {}

    def check_order(self, prompts: Sequence[Prompt], number: int) -> None:
        """Check which rows a generation has. Raises `ProofError`."""
        size, found = self._config.prompts_per_generation, [prompt.prompt_id for prompt in prompts]
        what = f"generation {number} has"
        if getattr(self._config, "no_positive_resampling", None) is not None:
            if not len({*found}) == len(found) == size:
                raise _wrong(f"{what} {len({*found})} different rows in {len(found)} places; {size} are due")
            return
        due = self._due(number, size)
        if len(found) != len(due):
            raise _wrong(f"{what} {len(found)} rows; {len(due)} are due")
        for place, (row, own) in enumerate(zip(found, due, strict=True)):
            if row != own:
                raise _wrong(f"{what} the row {row} in place {place}; {own} is due")

    def _due(self, number: int, size: int) -> list[str]:
        count = len(self._rows)
        turn, place = divmod(number, count // size)
        rows = torch.arange(count)
        if self._shuffled:
            seed = self._config.seed if self._config.data_seed is None else self._config.data_seed
            rows = torch.randperm(count, generator=torch.Generator().manual_seed(seed + turn))
        return [f"train/{row}" for row in rows[place * size : (place + 1) * size].tolist()]

    def take_as_it_is(self, prompt: Prompt) -> None:
        """From now on, the prompt's ids are those that are due."""
        self._known[prompt.prompt_id] = _digest(prompt.ids)

    def check_ids(self, prompts: Sequence[Prompt]) -> list[str]:
        """Check the ids of prompts. Returns the names of those whose text could not be compared.

        Raises:
            ProofError: a prompt has other ids than its row.
        """
        unproven = []
        for prompt in prompts:
            known = self._known.get(prompt.prompt_id)
            if known is None and not self._is_its_row(prompt):
                unproven.append(prompt.prompt_id)
            if known is not None and known != _digest(prompt.ids):
                raise _wrong(f"the ids of {prompt.prompt_id} are others than when it was due before")
            self.take_as_it_is(prompt)
        return unproven

    def _is_its_row(self, prompt: Prompt) -> bool:
        """Whether a prompt has the ids, or at least the text, of its row; False: this cannot be said."""
        given, tools = self._given(prompt)
        shown, due = prompt.pictures, []
        # Some templates render nothing but parts: such rows differ in the first form.
        for form in (given,) if isinstance(given, str) else (given, [*map(_in_parts, given)]):
            ids = self._encoded(form) if isinstance(form, str) else self._rendered(form, tools)
            if ids is None:
                continue
            if shown:
                ids = with_picture_ids(ids, shown.placeholder, shown.pictures)
            if ids.tolist() == prompt.ids.tolist():
                return True
            due.append(ids)
        if self._is_transformed:
            return False
        if not due or (isinstance(given, list) and self._has_control_text(given)):
            return self._text_of(prompt.ids) in map(self._text_of, due)
        raise _wrong(f"{prompt.prompt_id} {self._difference(prompt.ids, due[0])}")

    def _encoded(self, text: str) -> Ids:
        return whole_numbers(self._tokenizer.encode(text, add_special_tokens=self._config.add_special_tokens))

    def _given(self, prompt: Prompt) -> tuple[str | list[dict[str, Any]], list[dict[str, Any]]]:
        """What the user gave as a prompt, and the tools that it shows."""
        row = self._rows[int(prompt.prompt_id.rpartition("/")[2])]
        tools = self._tools_of(row) if self._tools_of is not None else []
        if self._messages_of is None or isinstance(row["prompt"], str):
            return with_joined_text(row["prompt"]), tools
        return self._messages_of({**prompt.columns, "prompt": prompt.source}, prompt.pictures), tools

    def _rendered(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Ids | None:
        """Ids of messages; None: the template refuses them in this form."""
        goes_on = messages[-1]["role"] == "assistant"
        try:
            found = self._tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                add_generation_prompt=not goes_on,
                continue_final_message=goes_on,
                tokenize=True,
                return_dict=False,
                **self._config.template_arguments,
            )
        except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError):
            return None
        return whole_numbers(found)

    def _difference(self, found: Ids, due: Ids) -> str:
        pairs = enumerate(zip(found, due, strict=False))
        place = next((i for i, (one, other) in pairs if one != other), min(len(found), len(due)))
        here, there = (self._tokenizer.decode(ids[place : place + 8].tolist()) for ids in (found, due))
        return f"has {len(found)} ids, its row gives {len(due)}; from id {place} on they are {here!r} for {there!r}"

    def _has_control_text(self, messages: list[dict[str, Any]]) -> bool:
        text = json.dumps(messages, default=str, ensure_ascii=False)
        return any(token.content in text for token in self._tokenizer.added_tokens_decoder.values())

    def _text_of(self, ids: Ids) -> str:
        return "".join(self._tokenizer.decode(ids.tolist()).split())


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return (
        {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
    )


def _digest(ids: Ids) -> int:
    return xxhash.xxh3_64_intdigest(ids.tobytes())


def _wrong(found: str) -> ProofError:
    return ProofError(
        "prompts",
        found,
        "the prompts were read, ordered or continued in another way than the data set and the seed say",
        "let nothing change the prompts, the tokenizer or its template between the start of the run and its steps; "
        "otherwise this is a defect of Lockstep: report it",
    )
