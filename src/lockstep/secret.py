"""Says what is secret in a setting or a text, and leaves it out: tokens, passwords and keys.

Everything that Lockstep writes for others to read goes through one of two functions. `without_secrets` is for settings: it knows
the name of each value. `masked` is for sentences, such as errors and log lines. What models, tools and data sets say is kept as it
is: rollouts are a record.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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
    re.compile(r"(?<![\w@/.:-])(?!mailto:)[\w.+-]{1,64}:[^\s:/@'\"]{3,}(?=@(?!sha\d)(?:[\w-]+\.[\w.-]+|localhost\b))"),
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
        name: the name of a setting, a variable or a header: `hub_token`, `x-api-key`, `HF_TOKEN`. Names of pieces of text
            (`eos_token`), of counts (`max_tokens`) and of files (`key_file`) name no secret.
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
    """A copy of a setting without its secrets: mappings lose the entries that are secret by name, texts what looks like a secret.

    Lists and mappings may be nested. What has no secret is returned as it is.

    Args:
        by_name: whether the keys of mappings are names of settings. They are not where users choose them, as for rewards.
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
    """A sentence in which `(hidden)` stands for each secret: what looks like one, and the values of names that are secret."""
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
