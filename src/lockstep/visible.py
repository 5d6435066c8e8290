r"""Makes characters visible that a terminal or a browser would obey or hide: a text of a model, a tool or a file stays a text.

ESC becomes `\x1b`, an order to write from right to left `\u202e`, a character without width `\u200b`. Letters of every
script stay, and so do the joiners without which some scripts and emoji cannot be written: in Arabic, Persian and Indic
scripts, and inside an emoji. Whatever is printed or becomes part of a page goes through here.
"""

from __future__ import annotations

import re
import unicodedata

# Controls but newline and tab; orders about the direction of text; what has no width; surrogates; joiners; selectors and tags.
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
_FLAG, _TAGS, _END_OF_TAGS = "\U0001f3f4", re.compile("[\U000e0030-\U000e0039\U000e0061-\U000e007a]"), "\U000e007f"


def visible(text: str) -> str:
    r"""The text with an escape, as Python writes it, for each character that would be obeyed or hidden. Newlines and tabs stay."""
    if _MAYBE.search(text) is None:
        return text
    tags = _flags(text)
    return _MAYBE.sub(
        lambda found: found[0] if found.start() in tags or _belongs(text, found.start()) else _name(found[0]), text
    )


def _name(sign: str) -> str:
    return sign.encode("unicode_escape").decode()


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
    return (
        unicodedata.category(sign) in ("So", "Sk")
        or sign in "\ufe0f\u2640\u2642"
        or "\U0001f000" <= sign <= "\U0001faff"
    )


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
