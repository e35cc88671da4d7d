"""What opens a door: keys of services, tokens, private keys, passwords that are named as such."""

import base64
import binascii
import re
from collections.abc import Iterator
from functools import cache

from infra.scrub.views import Found

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


def find(text: str) -> Iterator[Found]:
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
