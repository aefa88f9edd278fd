"""URLs that may be shown: whatever is wrong with one, its password is not in what is printed."""

import re
from urllib.parse import urlsplit, urlunsplit

_REDIS = ("redis", "rediss", "unix")
_OPTION = re.compile(r"([?&]\w*password=)[^&#]*")
_ADVICE = (
    "in a password write characters such as / ? # [ ] and @ in percent form, as %2F "
    "(urllib.parse.quote)"
)


def mask_password(url: str) -> str:
    """Return a URL that may be shown: each password in it is replaced by three stars.

    Of a server of Redis everything before the last ``@`` is taken for user and password, which is
    what somebody meant who did not escape them; a name without a password is then no user's.
    """
    url = _OPTION.sub(r"\1***", url)
    scheme, separator, rest = url.partition("://")
    if separator and scheme.lower() in _REDIS and "@" in rest:
        words, _, place = rest.rpartition("@")
        user, colon, _ = words.partition(":")
        return f"{scheme}://{f'{user}:' if colon else ''}***@{place}"
    try:
        parts = urlsplit(url)
        password = parts.password
    except ValueError:
        return url
    if password is None:
        return url
    return urlunsplit(parts._replace(netloc=parts.netloc.replace(f":{password}@", ":***@", 1)))


def what_is_wrong(url: str, error: Exception) -> str:
    """Return why a URL cannot be used: a reader's own words, unless they may quote the password."""
    try:
        is_whole = url.count("@") == urlsplit(url).netloc.count("@") <= 1
    except ValueError:
        is_whole = "@" not in url
    return str(error) if is_whole else _ADVICE
