"""From messages to token ids: the tokenizer, the chat template and its clock, the end tokens, and the ids of pictures.

No other module turns a dataset's prompt into token ids. A prompt of plain text is encoded without changes: text of
control tokens becomes control tokens, as in TRL. Messages are rendered by the chat template, in first prompts as in
later turns. An engine's answer is never tokenized again, and embeddings are never resized.

A template writes control tokens as text (`<|im_end|>`), and the tokenizer turns this text into ids. Text of a user or a
tool that looks the same would become the same ids. Therefore such text is *guarded* before it is rendered: a guard
character is inserted after its first character, and the tokenizer finds no control token there. The added tokens that
it does find split the text into stretches. A stretch with a guard is encoded again, without the guard, by the same
tokenizer without its added tokens. All other stretches keep the ids that the tokenizer gives the whole text. Therefore
messages without such text get exactly the template's own ids.

A message contains a picture as the part `{"type": "image", "picture": …}`. The chat template writes one placeholder for
it, which is replaced by the picture's ids. They come from the picture, not from the tokenizer.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from lockstep.errors import InputError, LockstepError, one_line, quoted
from lockstep.model_files import load_files
from lockstep.threads import OutOfTime, ended_within
from lockstep.tokens.arrays import Ids, whole_numbers

# The key of a processed picture in a part of a message. The chat template does not get it.
PICTURE = "picture"


class HasPictureIds(Protocol):
    """A processed picture. Only its ids are used here."""

    @property
    def ids(self) -> Ids:
        """(N,) ids that stand for the picture in a conversation."""


def picture_part(picture: HasPictureIds) -> dict[str, Any]:
    """The part of a message's content that shows a picture."""
    return {"type": "image", PICTURE: picture}


def pictures_in(messages: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The processed pictures of messages, in the order in which the messages show them."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part[PICTURE] for part in parts if isinstance(part, Mapping) and PICTURE in part]


def with_picture_ids(ids: Ids, placeholder: int, pictures: Sequence[HasPictureIds]) -> Ids:
    """Ids in which each placeholder is replaced by the ids of its picture; an `InputError` if the numbers differ."""
    places = np.flatnonzero(ids == placeholder)
    if len(places) != len(pictures):
        raise InputError(
            f"the text has {len(places)} placeholders for {len(pictures)} pictures: the chat template does "
            "not write one per image part, or a prompt of plain text does not contain one per picture"
        )
    if not pictures:
        return ids
    first, *pieces = np.split(ids, places)
    rest = [part for own, piece in zip(pictures, pieces, strict=True) for part in (own.ids, piece[1:])]
    return whole_numbers(np.concatenate([first, *rest]))


Message = dict[str, Any]
# The content of a message: text, or a list of parts.
Content = str | list[dict[str, Any]]
# A lone surrogate, which text cannot contain. Tokenizers cannot read it, and get a character that no text uses.
_GUARD, _GUARD_AS_READ = "\udfff", "\ufdd0"
# Words and white space are ordinary text, even if a tokenizer has a token of its own for them.
_ORDINARY_TEXT = re.compile(r"\w+|\s+")
# A word that shows whether a template renders the content of a message.
_TEST_WORD = "quokka"
# Seconds within which a template renders it.
_RENDERED = 30.0
# Roles whose text may contain control tokens for thinking and tool calls.
_TRUSTED = ("assistant", "system", "developer")
_LOOKS_LIKE_CONTROL = re.compile(r"<[|｜]\S*[|｜]>|</?(?:think|tool)\w*>|\[/?[A-Z_]+\]")


def is_conversational(prompt: str | list[Message]) -> bool:
    """Whether a prompt is a list of messages (`role`, `content`). Otherwise it is plain text."""
    return isinstance(prompt, list)


def template_of(
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: dict[str, Any] | None = None,
    placeholder: int | None = None,
) -> Template | None:
    """The template that renders first prompts; None if the tokenizer has none. `placeholder` as in `Template`."""
    if tokenizer.chat_template is None:
        return None
    return Template(tokenizer, [tokenizer.eos_token_id], chat_template_kwargs, placeholder=placeholder)


def with_joined_text(prompt: Any) -> Any:
    """A prompt in which each content that is a list of text parts (`{"type": "text", "text": …}`) has become one text.

    The parts of a message are joined without a separator, as templates for images and text do. Keys whose value is None
    are left out, apart from a message's `content`: Arrow gives every message, call and part the keys of all others, and
    templates ask whether a key is there.
    """
    if isinstance(prompt, np.ndarray) and prompt.dtype == object:
        # In NumPy's format of `datasets`, messages are an array.
        prompt = prompt.tolist()
    if not isinstance(prompt, list):
        return prompt
    return [_with_joined_text(message) if isinstance(message, dict) else message for message in prompt]


def _with_joined_text(message: Message) -> Message:
    given = {name: value for name, value in message.items() if value is not None or name == "content"}
    found = {name: _written(value) for name, value in given.items()}
    if _is_text_parts(found.get("content")):
        found["content"] = "".join(part["text"] for part in found["content"])
    return found


def _written(value: Any) -> Any:
    """A value without the keys that are None, at any depth. Files of pictures (`bytes`, `path`) keep theirs."""
    if isinstance(value, dict) and value.keys() != {"bytes", "path"}:
        return {name: _written(entry) for name, entry in value.items() if entry is not None}
    return [_written(entry) for entry in value] if isinstance(value, list) else value


def _is_text_parts(content: Any) -> bool:
    return isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    )


def render_prompt(
    prompt: str | list[Message],
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: dict[str, Any] | None = None,
    template: Template | None = None,
    *,
    images: bool = False,
    add_special_tokens: bool = True,
) -> tuple[int, ...]:
    """Token ids of one prompt.

    Plain text is encoded with the tokenizer's special tokens, unless `add_special_tokens` is off. Messages are rendered
    by the chat template, with the generation prompt. If the last message is the assistant's, there is no generation
    prompt: the model continues this message, as in TRL.

    Args:
        template: the result of `template_of`, so that many prompts share it; None: it is made for this prompt.
        images: whether contents may be lists of parts.

    Raises:
        InputError: the prompt is empty, is of another type, contains more than text, or has messages and there is no
            chat template.
    """
    prompt = with_joined_text(prompt)
    if isinstance(prompt, str):
        ids = list(tokenizer(prompt, add_special_tokens=add_special_tokens)["input_ids"])
    elif is_conversational(prompt) and prompt and all(isinstance(m, dict) and "role" in m for m in prompt):
        if any(not isinstance(m.get("content"), str | list | None if images else str | None) for m in prompt):
            raise InputError(
                "a message's content must be text or a list of text parts; images need a model that reads "
                "them, and other parts are not supported yet"
            )
        if any(not isinstance(m["role"], str) for m in prompt):
            raise InputError("a message's role must be text")
        if any(m.get("content") is None and m["role"] in ("system", "user") for m in prompt):
            raise InputError("a message of the system or the user has no content")
        template = template if template is not None else template_of(tokenizer, chat_template_kwargs)
        if template is None:
            raise InputError(
                "prompts are messages but the tokenizer has no chat template; give prompts as text"
            )
        ids = template.ids(template.text(prompt), pictures_in(prompt)).tolist()
    else:
        wanted = "text or a non-empty list of messages with a role"
        raise InputError(f"a prompt must be {wanted}, got {prompt!r:.200}")
    if not ids:
        raise InputError(f"a prompt has no tokens: {prompt!r:.200}")
    return tuple(ids)


class Template:
    """The chat template of a tokenizer, with the template's arguments of a run.

    Args:
        end_ids: ids that end a turn.
        kwargs: further arguments of the template (`chat_template_kwargs`).
        tools: the tools as the template takes them (functions or JSON schemas).
        placeholder: the id of the template's text for a picture; None: no message shows pictures.

    Attributes:
        control: the text of each control token, by id. Control tokens are the tokenizer's special tokens, the end
            tokens, and other added tokens that the template's source contains or that look like `<|name|>`, `<think>`,
            `<tool_call>` or `[NAME]`. Tokens for words and white space are no control tokens.
        control_pattern: finds text that looks like a control token.

    Raises:
        InputError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Iterable[int],
        kwargs: dict[str, Any] | None = None,
        tools: Sequence[dict[str, Any] | Callable[..., Any]] | None = None,
        placeholder: int | None = None,
    ) -> None:
        if tokenizer.chat_template is None:
            raise InputError("the tokenizer has no chat template: conversations cannot be extended")
        self.tokenizer = tokenizer
        self._tools = list(tools) if tools else None
        self._kwargs = dict(kwargs or {})
        self._placeholder = placeholder
        source = tokenizer.get_chat_template(None, self._tools)
        added, ends = tokenizer.added_tokens_decoder, set(end_ids)
        self.control: dict[int, str] = {
            i: t.content
            for i, t in added.items()
            if not _ORDINARY_TEXT.fullmatch(t.content)
            and (t.special or i in ends or t.content in source or _LOOKS_LIKE_CONTROL.fullmatch(t.content))
        }
        self.control_ids = np.array(sorted(self.control), np.int64)
        self._added_ids = np.array(sorted(added), np.int64)
        special = {i for i, t in added.items() if t.special} | ends
        self.control_pattern = _pattern_of(self.control.values())
        # In trusted roles only special tokens are guarded. A template finds thinking in the text of the assistant's
        # content, and a system message may use `<think>` or `<tool_call>` as control tokens.
        self._special_pattern = _pattern_of(text for i, text in self.control.items() if i in special)
        # Templates of some models with pictures accept only lists of parts, and render nothing of a text.
        self._takes_parts = False
        try:
            self._takes_parts = ended_within(
                _RENDERED,
                "the chat template",
                lambda: not self._shows_text() and self._shows_text(in_parts=True),
            )
        except OutOfTime as error:
            raise InputError(
                f"the chat template did not render one word within {_RENDERED:g} s: it has a loop without an end"
            ) from error

    def text(self, messages: Sequence[Message]) -> str:
        """The text of a conversation, up to the opening of the next assistant turn, with guards.

        If the last message is the assistant's, the text ends inside this message, so that the model continues it.

        Raises:
            InputError: the template refuses these messages.
        """
        continues = bool(messages) and messages[-1]["role"] == "assistant"
        return self._rendered(messages, add_generation_prompt=not continues, continue_final_message=continues)

    def finished(self, messages: Sequence[Message]) -> str:
        """The text of a conversation that ends with its last message, with guards. Raises as `text`."""
        return self._rendered(messages, add_generation_prompt=False)

    def ids(self, text: str, pictures: Sequence[HasPictureIds] = ()) -> Ids:
        """Ids of rendered text. Guarded text gives no control token, and each picture its own ids, in order.

        Raises:
            InputError: guarded text cannot be encoded as text, or the number of placeholders is not that of the
                pictures.
        """
        if _GUARD in text:
            ids = whole_numbers(self._unguarded(text))
        else:
            ids = whole_numbers(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if self._placeholder is not None:
            return with_picture_ids(ids, self._placeholder, pictures)
        if pictures:
            raise InputError("a message has a picture, but this run has no pictures in messages")
        return ids

    def _shows_text(self, *, in_parts: bool = False) -> bool:
        content: Any = [{"type": "text", "text": _TEST_WORD}] if in_parts else _TEST_WORD
        messages = [{"role": "user", "content": content}]
        try:
            return _TEST_WORD in self._rendered(messages, add_generation_prompt=True)
        except InputError:
            return False

    def _rendered(self, messages: Sequence[Message], **how: bool) -> str:
        guarded = [self._guarded_message(message) for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                guarded, tools=self._tools, tokenize=False, **how, **self._kwargs
            )
        except LockstepError:
            raise
        except Exception as error:
            # Templates compute, and call Python methods on the messages: they raise whatever Python raises.
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise InputError(f"the chat template refuses these messages: {kind}{quoted(error)}") from error
        return str(text)

    def is_guarded(self, messages: Sequence[Message]) -> bool:
        """Whether a message contains text that looks like a control token and must stay text."""
        return any(_GUARD in text for message in messages for text in _texts(self._guarded_message(message)))

    def _guarded_message(self, message: Message) -> Message:
        trusted = message["role"] in _TRUSTED
        if self._takes_parts and isinstance(message.get("content"), str):
            message = {**message, "content": [{"type": "text", "text": message["content"]}]}
        found = {}
        for key, value in message.items():
            pattern = self._special_pattern if trusted and key != "tool_calls" else self.control_pattern
            found[key] = value if key in ("role", "type") else _guard_texts(value, pattern)
        return found

    def _unguarded(self, text: str) -> list[int]:
        if not self.tokenizer.is_fast:
            raise InputError(
                "a message contains the text of a control token, and this tokenizer has no fast version that "
                "could encode it as text: remove it from the message, or load a fast tokenizer"
            )
        readable = text.replace(_GUARD, _GUARD_AS_READ)
        encoded = self.tokenizer(readable, add_special_tokens=False, return_offsets_mapping=True)
        ids, spans = encoded["input_ids"], encoded["offset_mapping"]
        found: list[int] = []
        first = start = 0  # the stretch since the last added token: its first id, and its first character
        for position in [*np.flatnonzero(np.isin(ids, self._added_ids)).tolist(), len(ids)]:
            end = spans[position][0] if position < len(ids) else len(text)
            stretch, own = text[start:end], ids[first:position]
            found += self._ids_as_text(stretch, own) if _GUARD in stretch else own
            if position < len(ids):
                found.append(ids[position])
                first, start = position + 1, spans[position][1]
        return found

    def _ids_as_text(self, stretch: str, guarded_ids: list[int]) -> list[int]:
        """Ids of a stretch without its guards. `guarded_ids` are its ids with them in the whole text."""
        bare, text = self._without_added_tokens(), stretch.replace(_GUARD, "")
        ids: list[int] = bare.encode(text, add_special_tokens=False).ids
        readable = stretch.replace(_GUARD, _GUARD_AS_READ)
        same = bare.encode(readable, add_special_tokens=False).ids == guarded_ids
        if not same or np.isin(ids, self.control_ids).any() or self.tokenizer.decode(ids) != text:
            raise InputError(
                f"a message contains the text of a control token ({text!r:.80}), and this tokenizer cannot "
                "encode it as text: remove it from the message"
            )
        return ids

    def _without_added_tokens(self) -> Tokenizer:
        """The tokenizer without its added tokens. It shares the vocabulary."""
        whole = self.tokenizer.backend_tokenizer
        bare = Tokenizer(whole.model)
        if whole.normalizer is not None:
            bare.normalizer = whole.normalizer
        if whole.pre_tokenizer is not None:
            bare.pre_tokenizer = whole.pre_tokenizer
        return bare


def shared_start(one: str, other: str) -> int:
    """How many characters two texts share at their start."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def _pattern_of(texts: Iterable[str]) -> re.Pattern[str]:
    # The longest text is first, because the tokenizer prefers it too. Without any text the pattern matches nothing.
    return re.compile("|".join(re.escape(t) for t in sorted(texts, key=len, reverse=True)) or r"(?!)")


def _guard_texts(value: Any, pattern: re.Pattern[str]) -> Any:
    """A value in which every text is guarded. Lone surrogates become U+FFFD, because tokenizers cannot read them."""
    if isinstance(value, str):
        if not value.isascii():
            value = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return pattern.sub(lambda found: found[0][0] + _GUARD + found[0][1:], value)
    if isinstance(value, dict):
        return {_guard_texts(k, pattern): _guard_texts(v, pattern) for k, v in value.items() if k != PICTURE}
    if isinstance(value, list | tuple):
        return [_guard_texts(v, pattern) for v in value]
    return value


def _texts(value: Any) -> Iterator[str]:
    """Every text within a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for pair in value.items() for part in pair for text in _texts(part))
    elif isinstance(value, list):
        yield from (text for part in value for text in _texts(part))


_logger = logging.getLogger(__name__)

_NEVER_RESIZED = "embeddings are never resized here: the engine would keep the old vocabulary"

_VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tiktoken.model",
)


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, with its pad token set.

    Raises:
        InputError: the model has no tokenizer, or the tokenizer has no end-of-sequence token.
    """
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).is_file() for name in _VOCABULARY_FILES):
        # Without this check, transformers would make an empty tokenizer of the model's type.
        raise InputError(
            f"model {path} comes without a usable tokenizer: none of {', '.join(_VOCABULARY_FILES)} is there"
        )
    try:
        tokenizer = load_files(AutoTokenizer, path)
    except StrictDataclassError as error:
        # transformers reads the model's config too.
        raise InputError(f"the config.json of model {path} is wrong: {one_line(error)}") from error
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError) as error:
        # Which of these errors transformers raises depends on the missing file.
        why = f"{type(error).__name__}: {error}"
        if not folder.is_dir():
            raise InputError(
                f"there is no model directory {path[:200]} here, and as a hub id: {one_line(error)[:200]}"
            ) from error
        raise InputError(f"model {path} comes without a usable tokenizer: {why}") from error
    return guard_tokenizer(tokenizer)


def guard_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Use the end-of-sequence token as the pad token if there is none; an `InputError` if both are missing."""
    if tokenizer.eos_token_id is None:
        raise InputError("the tokenizer has no end-of-sequence token; completions could never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def embedding_rows(model: PreTrainedModel) -> int:
    """Number of token ids that the model can embed."""
    return int(model.get_input_embeddings().weight.shape[0])


def fit_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the tokenizer's special ids have embeddings, and write the pad id into the model's config.

    A tokenizer that is larger than the embedding has tokens that neither the model nor an engine can compute with. Some
    published models have one that no text gives (Gemma 3: the token of an image). Therefore a prompt that has such a
    token is refused (`check_embedded`), and not the tokenizer.

    Raises:
        InputError: the model cannot embed the pad token or the end token.
    """
    rows = embedding_rows(model)
    for title, needed in (("pad", tokenizer.pad_token_id), ("end-of-sequence", tokenizer.eos_token_id)):
        if needed is not None and needed >= rows:
            raise InputError(
                f"the tokenizer's {title} token has id {needed} but the model embeds only {rows} tokens: give "
                f"the tokenizer a token that the model has ({_NEVER_RESIZED})"
            )
    if beyond := sorted((i, token) for token, i in tokenizer.get_vocab().items() if i >= rows):
        _logger.warning(
            f"the tokenizer has {len(beyond)} tokens that the model cannot embed ({beyond[0][1]!r} with id "
            f"{beyond[0][0]} first; the model embeds {rows}): a prompt with one of them is refused"
        )
    model.config.pad_token_id = tokenizer.pad_token_id
    if model.generation_config is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id


def check_embedded(ids: Ids, rows: int, what: str) -> None:
    """Refuse (`InputError`) ids, of which there is at least one, if the model has no embedding for one of them.

    `rows` is the number of ids that the model embeds; `what` says where the ids come from.
    """
    if (largest := int(ids.max())) >= rows:
        raise InputError(
            f"{what} has token id {largest} but the model embeds only {rows} tokens: take the text of that token "
            f"out, or remove the token from the tokenizer ({_NEVER_RESIZED})"
        )


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that end a completion: the tokenizer's end token, then those of the model's generation config, each once.

    Ids of the generation config that the model cannot sample are left out.
    """
    ids = _listed(tokenizer.eos_token_id)
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    vocabulary = model.config.get_text_config().vocab_size
    ids += [i for i in _listed(configured) if i < vocabulary]
    return tuple(dict.fromkeys(int(i) for i in ids))


def directory_end_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The end tokens that a model directory names, and that of its tokenizer."""
    try:
        configured = load_files(GenerationConfig, path).eos_token_id
    except OSError:
        # The directory has no generation config.
        configured = None
    return {tokenizer.eos_token_id, *_listed(configured)}


def _listed(ids: int | list[int] | None) -> list[int]:
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


# What transformers calls the clock in a template. An argument of the template with this name stands in its place.
NAME_IN_TEMPLATES = "strftime_now"


@dataclass(slots=True)
class TemplateClock:
    """A clock that stands still: one moment for all chat templates of a run.

    Some templates write the date into a prompt (`strftime_now`, in transformers the clock of the machine). A run would
    then get other prompts after midnight, on another rank, in a later turn, or when it is resumed.

    Attributes:
        moment: local time without a zone, as transformers has it.
        is_earlier: whether an earlier start of the run had it.
        was_read: whether a template has asked for the time.
    """

    moment: datetime
    is_earlier: bool = False
    was_read: bool = False

    def strftime_now(self, form: str) -> str:
        """The moment in the form of `datetime.strftime`."""
        self.was_read = True
        return self.moment.strftime(form)
