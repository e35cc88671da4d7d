"""What points at a person or a machine: e-mail and IP addresses, phone and card numbers, bank accounts."""

import ipaddress
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import accumulate

import phonenumbers
from stdnum import iban, luhn

from infra.scrub.views import Found

_LATIN = "A-Za-zÀ-ÖØ-öø-ɏ"
_LOCAL = rf"{_LATIN}0-9._%+\-"

_EMAIL = re.compile(
    rf"(?<![{_LOCAL}\]])[{_LOCAL}]++(?:'[{_LOCAL}]++)?@(?!\d+(?:x\.|\.\d))"  # no icon@2x.png, no package@1.2.0-beta.rc
    rf"(?:[{_LATIN}0-9\-]{{1,63}}+\.)+[{_LATIN}]{{2,}}+(?![{_LATIN}0-9_\[(]|\.[{_LATIN}0-9_\[])"
)
_IN_USERINFO = re.compile(r"://[^\s/:@]*:$")
_BRACKETED = r" {0,2}(?:\(%s\)|\[%s\]|\{%s\}|<%s>) {0,2}"
_AT = rf"(?:{_BRACKETED % (('(?i:at)',) * 4)}| AT )"
_DOT = rf"(?:{_BRACKETED % (('(?i:dot|punkt|point)',) * 4)}| DOT |\.)"
_SPELT_EMAIL = re.compile(
    rf"(?<![{_LOCAL}\]])[{_LOCAL}]{{1,64}}+{_AT}(?:[{_LATIN}0-9\-]{{1,63}}+{_DOT}){{1,4}}[{_LATIN}]{{2,24}}+(?![\w\[(])"
)
_SAID_EMAIL = re.compile(
    rf"(?<![{_LOCAL}\]])[{_LOCAL}]{{1,64}}+ at (?:[{_LATIN}0-9\-]{{1,63}}+ dot ){{1,4}}"
    r"(?:com|org|net|edu|gov|info|io|ai|dev|de|uk|fr|es|it|nl|eu|ch|at|in|br|ru|cn|jp|au|ca|us)\b"
)
_IBAN = re.compile(r"(?<![\w\]])[A-Za-z]{2}\d{2}(?:[ -]?[A-Za-z0-9]){11,32}+(?!\[)", re.ASCII)
_CARD = re.compile(r"(?<![\w\].+])\d(?:[ .-]?\d){11,21}+(?![\w\[]|[.-][\d\[])", re.ASCII)
_IPV4 = re.compile(r"(?<![\w\].])(?:\d{1,3}\.){3}\d{1,3}(?![\w\[]|\.[\d\[])", re.ASCII)
_IPV6 = re.compile(r"(?<![\w:.\]])(?<!\w\[)(?<![\])]\[)[0-9A-Fa-f]{4}:[0-9A-Fa-f:]{2,40}+(?![\w\[])", re.ASCII)
_VERSIONED = re.compile(
    r"(?i)\b(?:version|ver|release|section|sect|chapter|clause|rfc|driver|firmware|build|iso|kapitel)\b[^\d\n]{0,12}$"
    r"|(?:[=~<>!^]=|§) ?$"
)

# Phone numbers by how they are written.
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
# Those that look like other numbers too, so that they must be valid in one of the regions that write them so.
_SHAPES: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = (
    (re.compile(r"(?<![\w+.\-\]])\(\d{2}\) ?9?\d{4}-\d{4}(?![\w\[]|[.-]\d)", re.ASCII), ("BR",)),
    (re.compile(r"(?<![\w+.\-\]])8[ -]?\(\d{3}\) ?\d{3}[ -]\d{2}[ -]\d{2}(?![\w\[]|[.-]\d)", re.ASCII), ("RU", "KZ")),
    (re.compile(r"(?<![\w+.\-\]])00 ?[1-9](?:[ ().-]{0,2}\d){8,13}(?![\w\[]|[.-]\d)", re.ASCII), ("DE",)),
)
# Behind a word for it, whatever is valid somewhere is one.
_ANY_PHONE = re.compile(r"(?<![\w+.\-\]\[])[(+]?\d(?:[ ().\-/]{0,2}\d){6,14}(?![\w\[]|[.,-]\d)", re.ASCII)
_CALLED = re.compile(
    r"(?i)(?:\b(?:tel|tele[fp]hone|telefon\w*|tel[eé]fono|phone|call|ring|dial|mobile?|m[oó]vil|handy(?:nummer)?|cell|"
    r"cell?ular|fax|whatsapp|sms|text me|hotline|portable|appel\w*|ll[aá]ma\w*|bel|ruf|rufe|chiama\w*|zap|contact|"
    r"numer|komórka|teléfono|тел|телефон|звони\w*)\b|電話|手机|手機|电话|携帯|전화)[^\d+]{0,24}$"
)
_NEAR = 48
REGIONS = (
    "US", "GB", "DE", "FR", "IN", "ES", "IT", "NL", "SE", "PL", "BR", "CN", "JP", "AU", "RU", "MX", "AT", "CH", "BE",
    "TR", "KR", "ZA", "PT", "DK", "NO", "FI", "IE", "CZ", "GR", "UA", "ID", "NG", "AR",
)  # fmt: skip
MAX_CHECKED = 64  # numbers of a text that are held against regions; what comes after them counts as valid


def find(text: str) -> Iterator[Found]:
    """Yield addresses and numbers; stretches may overlap."""
    for match in _EMAIL.finditer(text):
        # The user part of a repository's address is nobody; a password in a URL is no name, and found as such.
        if not match[0].startswith("git@") and not _IN_USERINFO.search(_before(text, match)):
            yield Found(*match.span(), "EMAIL")
    for pattern in (_SPELT_EMAIL, _SAID_EMAIL):
        yield from (Found(*match.span(), "EMAIL") for match in pattern.finditer(text))
    for pattern, is_account, kind in ((_IBAN, _is_iban, "IBAN"), (_CARD, _is_card, "CARD")):
        for match in pattern.finditer(text):
            yield from (Found(*span, kind) for span in _accounts(match, is_account))
    for match in _IPV6.finditer(text):
        address = match[0][:-1] if match[0].endswith(":") and not match[0].endswith("::") else match[0]
        if any(character.isdigit() for character in address) and _is_remote(address):
            yield Found(match.start(), match.start() + len(address), "IP")
    for match in _IPV4.finditer(text):
        if _is_remote(match[0]) and not _VERSIONED.search(_before(text, match)):
            yield Found(*match.span(), "IP")
    yield from (Found(*span, "PHONE") for span in _phones(text))


def _accounts(match: re.Match[str], is_account: Callable[[str], bool]) -> Iterator[tuple[int, int]]:
    """Yield the stretch of whole groups that is an account number; digits and words of others may stand beside it."""
    groups = re.split("[ .-]", match[0])
    starts = list(accumulate((len(group) + 1 for group in groups), initial=match.start()))
    first = 0
    while first < len(groups):
        for last in range(len(groups), first, -1):
            if is_account("".join(groups[first:last])):
                yield starts[first], starts[last] - 1
                first = last - 1
                break
        first += 1


def _is_iban(text: str) -> bool:
    if not 15 <= len(text) <= 34 or not text[:2].isalpha() or not text[2:4].isdigit():
        return False
    checked = int("".join(str(int(character, 36)) for character in text[4:] + text[:4])) % 97 == 1
    return checked and bool(iban.is_valid(text, check_country=False))


def _is_card(text: str) -> bool:
    return _issued(text) and bool(luhn.is_valid(text))


def _issued(digits: str) -> bool:
    """Return whether an issuer gives out numbers of this length that begin so; a tenth of all others fits Luhn too."""
    head = int(digits[:4])
    match len(digits):
        case 14:
            return digits[:2] in ("36", "38", "39") or 3000 <= head <= 3059
        case 15:
            return digits[:2] in ("34", "37")
        case 16:
            return digits[0] in "456" or 2221 <= head <= 2720 or 3528 <= head <= 3589
        case 17 | 18 | 19:
            return digits[:2] == "62" or (len(digits) == 19 and digits[0] == "4")
    return False


def _is_remote(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified)


def _phones(text: str) -> Iterator[tuple[int, int]]:
    yield from (match.span() for match in _PHONE.finditer(text) if _has_length_of_phone(match[0]))
    unsure: list[tuple[re.Match[str], tuple[str, ...]]] = []
    unsure += [(match, regions) for pattern, regions in _SHAPES for match in pattern.finditer(text)]
    unsure += [(match, REGIONS) for match in _ANY_PHONE.finditer(text) if _CALLED.search(_before(text, match))]
    for number, (match, regions) in enumerate(unsure):
        if number >= MAX_CHECKED or _is_valid(match[0], regions):
            yield match.span()


def _before(text: str, match: re.Match[str]) -> str:
    return text[max(0, match.start() - _NEAR) : match.start()]


def _has_length_of_phone(text: str) -> bool:
    num_digits = sum(character.isdigit() for character in text)
    is_signed_float = re.fullmatch(r"\+\d+\.\d+", text) is not None
    fewest, most = (8, 15) if text.startswith("+") else (10, 11)
    return not is_signed_float and fewest <= num_digits <= most


def _is_valid(text: str, regions: tuple[str, ...]) -> bool:
    for region in regions:
        with suppress(phonenumbers.NumberParseException):
            if phonenumbers.is_valid_number(phonenumbers.parse(text, region)):
                return True
    return False
