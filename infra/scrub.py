"""Takes what points at a person or opens a door out of a text, before the text is written anywhere.

Every finder looks at the text as it is read (`_views`): what only hides a secret, such as zero-width
characters, full-width digits or a space after each letter, is folded first. Patterns are written for linear time: a
quantified run is possessive or bounded, and starts where the run starts. What has a check digit or a numbering plan is
checked (python-stdnum, phonenumbers); formats of keys are also those of detect-secrets.

Ordinary code and prose must come through unchanged, hence what is left alone: a bare run of digits that nothing nearby
calls a phone number (it may be a timestamp), loopback and unspecified addresses, slices such as `[1::2]`, the value of
a variable called `password` that reads like code. `tests/infra/scrubbing` holds what both sides look like.
"""

import base64
import binascii
import ipaddress
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import phonenumbers
from stdnum import iban, luhn

# Raise it with any change of what is found: rows carry it, and a stored row can be scrubbed again.
REVISION = 2

KINDS = ("EMAIL", "PHONE", "CARD", "IBAN", "IP", "KEY", "JWT", "PASSWORD")
PLACEHOLDER = re.compile(rf"\[(?:{'|'.join(KINDS)})\]")
MAX_PASSES = 4  # a replacement may set free what stood beside it; one that keeps on doing so is made for it


class Found(NamedTuple):
    """A stretch of a text, first and behind last character, and its kind."""

    start: int
    end: int
    kind: str


def scrub(text: str) -> str:
    """Return `text` with each thing that must go replaced by its kind in brackets; placeholders stay as they are."""
    for _ in range(MAX_PASSES):
        found = find(text)
        if not found:
            break
        parts, end = [], 0
        for one in found:
            parts += [text[end : one.start], f"[{one.kind}]"]
            end = one.end
        text = "".join([*parts, text[end:]])
    return text


def find(text: str) -> list[Found]:
    """Return what must go, from left to right, without overlaps."""
    finders = (_secrets, _numbers)
    found = [view.original(one) for view in _views(text) for finder in finders for one in finder(view.text)]
    placeholders = [match.span() for match in PLACEHOLDER.finditer(text)] if found else []
    return _merged([one for one in found if not any(a < one.end and one.start < b for a, b in placeholders)])


def _merged(found: list[Found]) -> list[Found]:
    merged: list[list[Found]] = []
    end = -1
    for one in sorted(found):
        if one.start < end:
            merged[-1].append(one)
        else:
            merged.append([one])
        end = max(end, one.end)
    return [
        Found(parts[0].start, max(one.end for one in parts), max(parts, key=lambda one: one.end - one.start).kind)
        for parts in merged
    ]


# Soft hyphen, zero-width space and joiners, direction marks, word joiner, byte order mark.
INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
FULL_WIDTH = re.compile("[\u3000\uff01-\uff5e]")
SPACED_OUT = re.compile(r"(?<!\S)(?:\S ){7,}+(?:\S(?!\S))?")  # from 7 characters on, a space after each


class _View(NamedTuple):
    """A reading of a text; `places` says where each character came from, None where that is its own place."""

    text: str
    places: Sequence[int] | None

    def original(self, found: Found) -> Found:
        places = self.places
        return found if places is None else Found(places[found.start], places[found.end - 1] + 1, found.kind)


def _views(text: str) -> Iterator[_View]:
    """Yield the readings of a text: what is seen of it, and the same with spaced-out words closed up."""
    seen = _seen(text)
    yield seen
    runs = [match.span() for match in SPACED_OUT.finditer(seen.text)]
    if runs:
        yield _closed_up(seen, runs)


def _seen(text: str) -> _View:
    if INVISIBLE.search(text) is None and FULL_WIDTH.search(text) is None:
        return _View(text, None)
    kept = [place for place, character in enumerate(text) if INVISIBLE.match(character) is None]
    return _View("".join(_narrow(text[place]) for place in kept), kept)


def _narrow(character: str) -> str:
    return unicodedata.normalize("NFKC", character) if FULL_WIDTH.match(character) else character


def _closed_up(seen: _View, runs: Sequence[tuple[int, int]]) -> _View:
    kept: list[int] = []
    end = 0
    for start, stop in runs:
        kept += range(end, start)
        kept += range(start, stop, 2)
        end = stop - 1 if seen.text[stop - 1] == " " else stop
    kept += range(end, len(seen.text))
    places = kept if seen.places is None else [seen.places[place] for place in kept]
    return _View("".join(seen.text[place] for place in kept), places)


MAX_WORD, STEP = 512, 256  # a longer word is searched in pieces that overlap: some detectors take quadratic time
LONGEST_KEY = STEP  # longer than any that detectors know

_JWT = re.compile(r"(?<![\w\-\].])eyJ[\w\-]{5,}+\.[\w\-]{5,}+\.[\w\-]{5,}+(?!\[)", re.ASCII)
_PREFIXED = re.compile(
    r"(?<![\w\-\]])(?:sk-[\w\-]{16,}+|[sr]k_(?:live|test)_\w{16,}+|whsec_\w{24,}+|gh[pousr]_\w{20,}+|github_pat_\w{20,}+"
    r"|gl(?:pat|dt|ft|rt|soat|cbt)-[\w\-]{20,}+|hf_\w{30,}+|npm_\w{30,}+|(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}"
    r"|AIza[\w\-]{35}|ya29\.[\w\-]{20,}+|GOCSPX-[\w\-]{20,}+|xox[abeoprs]-[A-Za-z0-9\-]{10,}+|do[por]_v1_[0-9a-f]{40,}+"
    r"|shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}|pypi-[\w\-]{50,}+|SG\.[\w\-]{16,}+\.[\w\-]{16,}+)(?![\w\[])",
    re.ASCII,
)
# A word that detectors may know; they also want a digit.
_WORD = re.compile(r"[\w\-.:/+=@%&?~]{20,}+", re.ASCII)
_PEM = re.compile(
    r"-----BEGIN (?:[A-Z0-9]{2,16} ){0,3}PRIVATE KEY(?: BLOCK)?-----"
    r"(?:\s|\\[nrt])*+(?:(?:[A-Za-z0-9+/=]{16,}+|[A-Z][A-Za-z\-]{1,20}: [^\n\\]{1,80}+)(?:\s|\\[nrt])*+)*+"
    r"(?:[A-Za-z0-9+/=]{0,15}(?:\s|\\[nrt])*+-----END [A-Z0-9 ]{1,40}-----)?"
)

# A value ends where a sentence, a list, a call or the next field of a form goes on.
_VALUE = r"""(?:[^\s"'`,;&<>()\[\]{}]|&(?!\w{1,40}=))"""
_NAMED = re.compile(
    r"""(?ix) (?<![^\W_]) (?:[\w\-.]{0,40}?[_\-.])?
    (?: (?P<password> \w{0,10}passw(?:or[dt]|d) | passphrase | passcode | \w{0,4}pwd | [a-z]{0,4}pass
          | contraseña | senha | wachtwoord | hasło | mot\ de\ passe | lösenord | пароль | 密码 | パスワード )
      | (?P<secret> secret[_\- ]?(?:access[_\- ]?)?(?:key)? | client[_\- ]?secret
          | (?:api|auth|access|private|encryption)[_\- ]?key | (?:[a-z]{1,10}[_\- ]?)?token ) )
    ["']? (?: \s{0,3}(?::=|=>|[:=：])\s{0,3} | \s(?:is|lautet|ist|es|est)\s{1,3} )
    (?P<quote> ["'`]? ) (?!\[[A-Z]+\]) (?P<value> """
    + _VALUE
    + r"{4,256} )"
)
_AUTHORIZATION = re.compile(
    r"""(?i)(?<![^\W_])authorization["']?\s{0,2}[:=]\s{0,2}["']?(?:(?:bearer|basic|token|apikey|digest)\s{1,3})?"""
    rf"(?P<value>{_VALUE}{{8,512}})"
)
_BEARER = re.compile(r"(?<![\w\]])[Bb]earer[ \t]{1,8}(?P<value>[\w.~+/\-]{16,}+=*+)(?![\w\[])", re.ASCII)
_BASIC = re.compile(r"(?<![\w\]])[Bb]asic[ \t]{1,8}(?P<value>[A-Za-z0-9+/]{12,}+=*+)", re.ASCII)
_USERINFO = re.compile(r"://[^\s/:@\"'<>]{0,64}:(?P<value>[^\s/@\"'<>]{1,128})@")
_CURL_USER = re.compile(rf"(?<!\S)(?:-u|--user)[ =][\"']?[^\s:\"']{{1,64}}:(?P<value>{_VALUE}{{3,128}})")

_CODE = re.compile(r"[$<{%*/~\\]|\.{1,3}$|(?:self|os|settings|config|env|process|request|args)\.")
_EXAMPLES = {
    "password", "passwort", "secret", "string", "none", "null", "true", "false", "changeme", "xxxx", "redacted",
}  # fmt: skip


def _secrets(text: str) -> Iterator[Found]:
    """Yield what opens a door; stretches may overlap."""
    yield from (Found(*match.span(), "JWT") for match in _JWT.finditer(text))
    yield from (Found(*match.span(), "KEY") for match in _PEM.finditer(text))
    yield from (Found(*match.span(), "KEY") for match in _PREFIXED.finditer(text) if _has_digit(match[0]))
    for word in _WORD.finditer(text):
        if _has_digit(word[0]):
            yield from _detected(text, *word.span())
    yield from _headers(text)
    for match in _NAMED.finditer(text):
        if _is_secret(match, text[match.end() : match.end() + 1]):
            yield Found(*_span(match), "PASSWORD" if match["password"] else "KEY")


def _headers(text: str) -> Iterator[Found]:
    # "bearer authentications-and-so-on" is prose; a token has a digit.
    for pattern in (_AUTHORIZATION, _BEARER):
        for match in pattern.finditer(text):
            if _has_digit(match["value"]) and _CODE.match(match["value"]) is None:
                yield Found(*_span(match), "KEY")
    yield from (Found(*_span(match), "KEY") for match in _BASIC.finditer(text) if _is_userinfo(match["value"]))
    for pattern in (_USERINFO, _CURL_USER):
        for match in pattern.finditer(text):
            if _CODE.match(match["value"]) is None:
                yield Found(*_span(match), "PASSWORD")


def _span(match: re.Match[str]) -> tuple[int, int]:
    start, end = match.span("value")
    return start, end - (match["value"][-1] in ".:?" and end - start > 1)  # a sentence's end


def _detected(text: str, start: int, end: int) -> Iterator[Found]:
    for piece in range(start, max(start + 1, end - LONGEST_KEY), STEP):
        for detector in _detectors():
            for match in detector.finditer(text, piece, min(end, piece + MAX_WORD)):
                yield Found(*match.span(), "KEY")


@cache
def _detectors() -> tuple[re.Pattern[str], ...]:
    """Return the formats of detect-secrets; importing its detectors takes a while."""
    from detect_secrets.plugins import (
        aws,
        azure_storage_key,
        discord,
        github_token,
        gitlab_token,
        mailchimp,
        openai,
        pypi_token,
        sendgrid,
        slack,
        square_oauth,
        stripe,
        telegram_token,
        twilio,
    )

    known = (
        aws.AWSKeyDetector, azure_storage_key.AzureStorageKeyDetector, discord.DiscordBotTokenDetector,
        github_token.GitHubTokenDetector, gitlab_token.GitLabTokenDetector, mailchimp.MailchimpDetector,
        openai.OpenAIDetector, pypi_token.PypiTokenDetector, sendgrid.SendGridDetector, slack.SlackDetector,
        square_oauth.SquareOAuthDetector, stripe.StripeDetector, telegram_token.TelegramBotTokenDetector,
        twilio.TwilioKeyDetector,
    )  # fmt: skip
    return tuple(pattern for detector in known for pattern in detector.denylist)


def _is_secret(match: re.Match[str], following: str) -> bool:
    value, quote = match["value"].rstrip(".:?"), match["quote"]
    is_call = following in ("(", "[", "{")
    if len(value) < 4 or is_call or _CODE.match(value) or value.lower() in _EXAMPLES:
        return False
    has_digit, has_letter = _has_digit(value), any(character.isalpha() for character in value)
    if match["secret"]:
        return len(value) >= 12 and has_digit and has_letter
    if has_digit:
        return has_letter or len(set(value)) > 1
    closed = bool(quote) and following == quote
    return has_letter and (closed or any(sign in value for sign in "!#%^*"))


def _is_userinfo(text: str) -> bool:
    try:
        return b":" in base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except binascii.Error:
        return False


def _has_digit(text: str) -> bool:
    return any(character.isdigit() for character in text)


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


def _numbers(text: str) -> Iterator[Found]:
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
