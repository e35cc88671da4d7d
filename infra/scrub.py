"""Takes what points at a person or opens a door out of a text, before the text is written anywhere.

Patterns are written for linear time: a quantified run is possessive and can only start where the run starts. Their
guards treat the brackets of a placeholder as part of a word, so that a placeholder never makes a new match possible and
scrubbing twice equals scrubbing once. What has a check digit is checked (Luhn, mod 97).

Ordinary code and prose must come through unchanged, hence what is left alone: a bare run of digits that is neither a
card nor written as a phone number (it may be a timestamp), loopback and unspecified addresses, slices such as `[1::2]`.
A dotted group of four numbers is taken for an address, even when it is a version.
"""

import ipaddress
import re
from collections.abc import Callable

# Raise it with any change of the patterns: rows carry it, and a stored row can be scrubbed again.
REVISION = 1

_LATIN = "A-Za-zÀ-ÖØ-öø-ɏ"
_LOCAL = rf"{_LATIN}0-9._%+\-"

_EMAIL = re.compile(
    rf"(?<![{_LOCAL}\]])[{_LOCAL}]++@(?!\d+(?:x\.|\.\d))"  # neither icon@2x.png nor package@1.2.0-beta.rc
    rf"(?:[{_LATIN}0-9\-]{{1,63}}+\.)+[{_LATIN}]{{2,}}+(?![{_LATIN}0-9_\[(]|\.[{_LATIN}0-9_\[])"
)
_JWT = re.compile(r"(?<![\w\-\].])eyJ[\w\-]{5,}+\.[\w\-]{5,}+\.[\w\-]{5,}+(?!\[)", re.ASCII)
_BEARER = re.compile(r"(?<![\w\]])([Bb]earer[ \t]{1,8})([\w.~+/\-]{16,}+=*+)(?![\w\[])", re.ASCII)
_KEY = re.compile(
    r"(?<![\w\-\]])(?:sk-[\w\-]{16,}+|gh[pousr]_\w{20,}+|github_pat_\w{20,}+|glpat-[\w\-]{20,}+|hf_\w{30,}+"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w\-]{35}|xox[abprs]-[A-Za-z0-9\-]{10,}+)(?![\w\[])",
    re.ASCII,
)
_IBAN = re.compile(
    r"(?<![\w\]])[A-Z]{2}\d{2}(?:[A-Z0-9]{11,30}+|(?: [A-Z0-9]{4}){2,7}+(?: [A-Z0-9]{1,3}(?!\w))?)(?![\w\[])",
    re.ASCII,
)
_CARD = re.compile(
    r"(?<![\w\].])(?:\d{13,19}|\d{4}([ -])\d{4}\1\d{4}\1\d{4}(?:\1\d{1,3})?|\d{4}([ -])\d{6}\2\d{4,5})"
    r"(?![\w\[]|[.-][\d\[])",
    re.ASCII,
)
_PHONE = re.compile(
    r"(?<![\w+.\-\]])(?:"
    r"\+[1-9](?:[ ().-]{0,2}\d){7,14}"  # international: +44 20 7946 0958
    r"|(?:1[ .-])?\([2-9]\d{2}\) ?\d{3}[ .-]\d{4}"  # North America: (415) 555-2671
    r"|(?:1[.-])?[2-9]\d{2}([.-])[2-9]\d{2}\1\d{4}"  # 415-555-2671
    r"|0[1-9](?:([ .-])\d{2})(?:\2\d{2}){3}"  # France: 06 12 34 56 78
    r"|(?:\(0[1-9]\d{1,3}\) ?|0[1-9]\d{1,3}[ -])\d{3,4}[ -]?\d{3,4}"  # Britain, Germany: 020 7946 0958
    r")(?![\w\[]|[.-][\d\[])",
    re.ASCII,
)
_IPV4 = re.compile(r"(?<![\w\].])(?:\d{1,3}\.){3}\d{1,3}(?![\w\[]|\.[\d\[])", re.ASCII)
_IPV6 = re.compile(r"(?<![\w:.\]])(?<!\w\[)(?<![\])]\[)[0-9A-Fa-f]{4}:[0-9A-Fa-f:]{2,40}+(?![\w\[])", re.ASCII)


def scrub(text: str) -> str:
    """Return `text` with e-mail addresses, phone and card numbers, IBANs, IP addresses and secrets replaced.

    Each is replaced by its kind in brackets: [EMAIL], [PHONE], [CARD], [IBAN], [IP], [KEY], [JWT].
    """
    text = _JWT.sub("[JWT]", text)
    text = _BEARER.sub(_replace_bearer, text)
    text = _replace(_KEY, "[KEY]", _has_digit, text)
    text = _replace(_EMAIL, "[EMAIL]", _is_email, text)
    text = _IBAN.sub(_replace_iban, text)
    text = _replace(_CARD, "[CARD]", _is_card, text)
    text = _IPV6.sub(_replace_ipv6, text)
    text = _replace(_IPV4, "[IP]", _is_remote, text)
    return _replace(_PHONE, "[PHONE]", _is_phone, text)


def _replace(pattern: re.Pattern[str], placeholder: str, accepted: Callable[[str], bool], text: str) -> str:
    return pattern.sub(lambda match: placeholder if accepted(match[0]) else match[0], text)


def _replace_bearer(match: re.Match[str]) -> str:
    # "bearer authentications-and-so-on" is prose; a token has a digit.
    return f"{match[1]}[KEY]" if _has_digit(match[2]) else match[0]


def _replace_iban(match: re.Match[str]) -> str:
    # Words in capitals after a spaced IBAN look like further groups, so groups are taken off the end until it checks.
    groups = match[0].split(" ")
    for count in range(len(groups), 0, -1):
        if _is_iban("".join(groups[:count])):
            return " ".join(["[IBAN]", *groups[count:]])
    return match[0]


def _replace_ipv6(match: re.Match[str]) -> str:
    address, colon = match[0], ""
    if address.endswith(":") and not address.endswith("::"):
        address, colon = address[:-1], ":"
    return f"[IP]{colon}" if _has_digit(address) and _is_remote(address) else match[0]


def _has_digit(text: str) -> bool:
    return any(character.isdigit() for character in text)


def _is_email(text: str) -> bool:
    return not text.startswith("git@")  # the user part of a repository's address is nobody


def _is_remote(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified)


def _is_iban(text: str) -> bool:
    if not 15 <= len(text) <= 34:
        return False
    rearranged = text[4:] + text[:4]
    return int("".join(str(int(character, 36)) for character in rearranged)) % 97 == 1


def _is_card(text: str) -> bool:
    digits = [int(character) for character in text if character.isdigit()]
    # Issuers' numbers start with 2 to 6; without this a tenth of all long integers would count as cards.
    if not 2 <= digits[0] <= 6:
        return False
    doubled = (digit if index % 2 == 0 else digit * 2 - 9 * (digit > 4) for index, digit in enumerate(reversed(digits)))
    return sum(doubled) % 10 == 0


def _is_phone(text: str) -> bool:
    num_digits = sum(character.isdigit() for character in text)
    is_signed_float = re.fullmatch(r"\+\d+\.\d+", text) is not None
    is_national = not text.startswith("+")
    fewest, most = (10, 11) if is_national else (8, 15)
    return not is_signed_float and fewest <= num_digits <= most
