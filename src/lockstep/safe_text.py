r"""Text that is safe to show: characters made visible, secrets left out, and lines for people.

`visible` shows what a terminal or a browser would obey or hide: ESC becomes `\x1b`, an order to write from right to
left `\u202e`. Letters of every script stay, and so do the joiners without which some scripts and emoji cannot be
written. Whatever is printed or becomes part of a page goes through it.

`without_secrets` is for settings: it knows the name of each value. `masked` is for sentences, such as errors and log
lines. What models, tools and data sets say is kept as it is: rollouts are a record.

The linter forbids `print` elsewhere, so that no text of a model or a file steers a terminal.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Mapping
from typing import Any

# Controls but newline and tab; orders about the direction of text; what has no width; surrogates; joiners; selectors
# and tags.
_MAYBE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_NON_JOINER, _JOINER = "\u200c", "\u200d"
# Scripts whose letters join, or stack behind a virama: Arabic to N'Ko, Indic, Tibetan and Myanmar, Khmer and Mongolian.
_JOINING = re.compile(
    "[\u0600-\u07ff\u0840-\u0dff\u0f00-\u109f\u1780-\u18af\u1b00-\u1bff\ua800-\uabff\ufb50-\ufdff\ufe70-\ufefc]"
)
# Words of these scripts are not set apart by spaces, and a space without width says where a line may end.
_WITHOUT_SPACES = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]")
_SELECTORS = re.compile("[\u180b-\u180d\u180f\ufe00-\ufe0f\U000e0100-\U000e01ef]")
_FLAG, _END_OF_TAGS = "\U0001f3f4", "\U000e007f"
_TAGS = re.compile("[\U000e0030-\U000e0039\U000e0061-\U000e007a]")


def visible(text: str) -> str:
    """The text with Python's escape for each character that would be obeyed or hidden. Newlines and tabs stay."""
    if _MAYBE.search(text) is None:
        return text
    tags = _flags(text)

    def shown(found: re.Match[str]) -> str:
        is_seen = found.start() in tags or _belongs(text, found.start())
        return found[0] if is_seen else found[0].encode("unicode_escape").decode()

    return _MAYBE.sub(shown, text)


def _belongs(text: str, place: int) -> bool:
    """Whether a character that is not seen alone belongs to the text around it."""
    sign, before, after = text[place], text[place - 1 : place], text[place + 1 : place + 2]
    if not before:
        return False
    if sign in (_NON_JOINER, _JOINER):
        if _JOINING.match(before):
            return True
        return sign == _JOINER and _is_pictured(before) and bool(after) and _is_pictured(after)
    if sign == "\u200b":
        return bool(_WITHOUT_SPACES.match(before) and _WITHOUT_SPACES.match(after))
    # One selector chooses the form of a sign; more of them would hide a text.
    return _SELECTORS.match(sign) is not None and not _SELECTORS.match(before) and _takes_form(before)


def _is_pictured(sign: str) -> bool:
    # The tones of skin are modifiers, and the selector of the colored form stands behind its sign.
    is_known = unicodedata.category(sign) in ("So", "Sk") or sign in "\ufe0f\u2640\u2642"
    return is_known or "\U0001f000" <= sign <= "\U0001faff"


def _takes_form(sign: str) -> bool:
    return sign in "0123456789#*" or (ord(sign) > 0x7F and unicodedata.category(sign)[0] in "LSMP")


def _flags(text: str) -> set[int]:
    """The places of the tags that make a flag, such as that of Scotland, of a black flag."""
    found: set[int] = set()
    at = text.find(_FLAG)
    while at >= 0:
        end = at + 1
        while end < len(text) and end - at < 8 and _TAGS.match(text[end]):
            end += 1
        if text[end : end + 1] == _END_OF_TAGS and end > at + 1:
            found.update(range(at + 1, end + 1))
        at = text.find(_FLAG, at + 1)
    return found


HIDDEN = "(hidden)"

# Last words of names of secrets.
_ENDS = re.compile(
    r"[a-z]*passwords?|passwd|passphrase|pwd|secrets?|credentials?|authorization|auth|bearer|cookies?|jwt"
    r"|[a-z]*(?:api|access|secret|private)key|[a-z]*(?:auth|access|api|hub|hf)token"
)
# "key" is the name of many things, and a secret behind one of these words.
_KEYS = re.compile(
    r"api|access|private|secret|auth|account|signing|encryption|wandb|openai|anthropic|hf|huggingface|comet"
)
# "tokens" are mostly counts. Behind these words they are secrets, and so is a single token that is a number.
_OWNERS = re.compile(
    r"hub|hf|huggingface|auth|access|api|refresh|bearer|session|secret|user|oauth|login|personal|security|csrf|github|gitlab|wandb"
    r"|trackio|slack|bot|service|client"
)
# "token" behind one of these words is a piece of text, or its id.
_PIECES = re.compile(
    r"eos|bos|pad|padding|unk|sep|cls|mask|image|img|video|audio|stop|start|begin|end|first|last|next|new|per|special|additional"
    r"|fallback|bo[ia]|eo[ia]|think|thinking|tool|decoder|encoder|sampled|worst|prompt|completion"
)
_MARK = re.compile(r"\s*[<\[{|].*[>\]}|]\s*", re.DOTALL)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")

# What is a secret by its look. The first group, if there is one, stays.
_LOOKS = (
    # A token of the hub, of OpenAI and others. Words of lower case, such as hf_overrides, are names.
    re.compile(r"\bhf_(?:(?=[a-z_]{0,60}[A-Z0-9])[A-Za-z0-9_]{8,}|[a-z]{16,})"),
    re.compile(r"\bsk(?:-|_live_|_test_)(?:(?=[a-z_-]{0,60}[A-Z0-9])[A-Za-z0-9_-]{8,}|[a-z]{16,})"),
    re.compile(
        r"\b(?:gh[opusr]_|github_pat_|glpat-|xox[abeprs]-|npm_|pypi-|gsk_|nvapi-|wandb_v1_)(?=[A-Za-z_-]{0,60}[0-9])[\w-]{12,}"
    ),
    re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[\w-]{30,}"),
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"(\b(?i:bearer)\s+)(?!(?i:tokens?|auth\w*|schemes?|headers?)\b)[A-Za-z0-9._~+/=-]{6,}"),
    # The user and the password of an address. `git@` is everybody's name.
    re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]{0,20}://)(?!git@)[^\s/?#'\"]{1,2000}(?=@)"),
    re.compile(
        r"(?<![\w@/.:-])(?!mailto:)[\w.+-]{1,64}:[^\s:/@'\"]{3,}(?=@(?!sha\d)(?:[\w-]+\.[\w.-]+|localhost\b))"
    ),
)
# A name that may be secret, and its value: name=value, name: value, 'name': 'value', --name value.
_PAIR = re.compile(
    r"""(?<![A-Za-z0-9_])(?P<name>[A-Za-z0-9_.-]{0,40}?(?:tokens?|keys?|passwords?|passwd|passphrase|pwd|secrets?|credentials?"""
    r"""|authorization|auth|bearer|cookies?|jwt))(?![A-Za-z0-9_])(?P<quote>['"]?)(?P<sign>\s{0,2}[=:]\s{0,2}|\s{1,2})"""
    r"""(?P<value>[bu]?'(?:[^'\\]|\\.)*'|[bu]?"(?:[^"\\]|\\.)*"|\[[^\]]{0,500}\]|\([^)]{0,500}\)|\{[^}]{0,500}\}|(?:(?:bearer|basic|token)\s+)?[^\s,;&'"(){}\[\]]+)""",
    re.IGNORECASE,
)
# An unquoted word behind a colon is hidden from this length on: "hub_token: it must be …" is a sentence.
_WORTH = 6


def is_secret_name(name: str, value: Any = "") -> bool:
    """Whether a value of this name is a secret.

    Args:
        name: the name of a setting, a variable or a header: `hub_token`, `x-api-key`, `HF_TOKEN`. Names of pieces of
            text (`eos_token`), of counts (`max_tokens`) and of files (`key_file`) name no secret.
        value: None and booleans are no secrets: `token: true` asks for a login that is stored elsewhere.
    """
    if value is None or isinstance(value, bool):
        return False
    words = [word.lower() for word in _WORD.findall(name)]
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if _ENDS.fullmatch(last):
        return True
    if last == "key":
        return _KEYS.fullmatch(before) is not None
    if last == "tokens":
        return _OWNERS.fullmatch(before) is not None
    if last != "token" or _PIECES.fullmatch(before):
        return False
    if _OWNERS.fullmatch(before):
        return True
    # An unknown kind of token, or just "token".
    return not isinstance(value, float | int) and not (isinstance(value, str) and _MARK.fullmatch(value))


def without_secrets(value: Any, *, by_name: bool = True) -> Any:
    """A setting without its secrets: mappings lose entries that are secret by name, texts what looks like a secret.

    Lists and mappings may be nested. What has no secret is returned as it is. The keys of mappings are names of
    settings (`by_name`), but not where users choose them, as for rewards.
    """
    if isinstance(value, str):
        kept: Any = _without_looks(value, exact=True)
        return value if kept == value else kept
    if isinstance(value, Mapping):
        kept = {
            key: without_secrets(one, by_name=by_name)
            for key, one in value.items()
            # `token: true` asks for a stored login. A run is the same with a token and with a login.
            if not (by_name and is_secret_name(str(key), "" if isinstance(one, bool | None) else one))
        }
        return value if len(kept) == len(value) and all(kept[key] is value[key] for key in kept) else kept
    if isinstance(value, list | tuple | set | frozenset):
        given = list(value)
        kept = [without_secrets(one, by_name=by_name) for one in given]
        if all(new is old for new, old in zip(kept, given, strict=True)):
            return value
        return type(value)(*kept) if hasattr(value, "_fields") else type(value)(kept)
    return value


def masked(text: str) -> str:
    """A sentence with `(hidden)` for each secret: what looks like one, and the values of names that are secret."""
    return _without_looks(text, exact=False)


def _without_looks(text: str, *, exact: bool) -> str:
    for look in _LOOKS:
        text = look.sub(lambda found: (found.group(1) if found.re.groups else "") + HIDDEN, text)
    return _PAIR.sub(lambda found: _without_value(found, exact=exact), text)


def _without_value(found: re.Match[str], *, exact: bool) -> str:
    name, quote, sign, value = found.group("name", "quote", "sign", "value")
    plain = value.strip("'\"")
    if "=" in sign:
        is_pair = not exact or sign == "="
    elif ":" in sign:
        named = len(_WORD.findall(name)) > 1 or not name.lower().startswith("token")
        # In a setting, this is the form of a header.
        named = named and (not exact or "-" in name or name.lower() == "authorization")
        is_pair = bool(quote) or (named and (value != plain or len(plain) >= _WORTH))
    else:
        is_pair = name.startswith("--") and not plain.startswith("--")
    read: Any = {"none": None, "null": None, "true": True, "false": False}.get(plain.lower(), plain)
    if isinstance(read, str) and re.fullmatch(r"-?\d+(?:\.\d+)?", read):
        read = float(read)
    if not is_pair or HIDDEN in value or not plain or not is_secret_name(name, read):
        return found.group()
    return f"{name}{quote}{sign}{HIDDEN}"


def say(text: str = "", *, end: str = "\n", flush: bool = False) -> None:
    """Print a text on standard output."""
    print(visible(text), end=end, flush=flush)


def complain(text: str) -> None:
    """Print an error or a warning on standard error, without secrets. If nobody can read that, on standard output."""
    shown = visible(masked(text))
    print(shown, file=sys.stderr, flush=True)
    if _is_lost(sys.stderr) and not _is_lost(sys.stdout):
        print(shown, flush=True)


def _is_lost(stream: object) -> bool:
    # The streams of a command know it (`cli/output.py`).
    return getattr(getattr(stream, "buffer", None), "is_lost", False)
