"""Filters by lists of words and addresses; replacement of personal data."""

import ipaddress
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from pretrain.errors import InputError
from pretrain.files import sha256_of
from pretrain_tools.preparation.cleaning.published import NamedFilter
from pretrain_tools.preparation.cleaning.stages import Judge, TextBatch, Verdicts

_NAME = rb"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LABEL = rb"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_OCTET = rb"(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)"
MAIL = re.compile(rb"\b%(name)s(?:\.%(name)s)*@(?:(?:%(label)s\.)+%(label)s|\[%(ip)s\])" % {
    b"name": _NAME, b"label": _LABEL, b"ip": rb"(?:%s\.){3}%s" % (_OCTET, _OCTET)})  # fmt: skip
IP = re.compile(rb"(?<![0-9.])(?:%s\.){3}%s(?![0-9]|\.[0-9])" % (_OCTET, _OCTET))
MAYBE_IP = re.compile(rb"\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]")
"""Begins with one rare byte, so its search is ten times as fast as that of IP."""
SPACES = b" \t\n\r\v\f"
VERSION_OR_FILE = re.compile(rb"v?[0-9]+\.[0-9xX*]|[0-9](?:\.[0-9]+)?x\.")
"""Begins what follows the @ of lodash@4.17.21, checkout@v4.1.0 or icon@2x.png."""
NO_DOMAINS = (b".service", b".socket", b".timer", b".mount", b".slice", b".png", b".jpg", b".jpeg", b".gif", b".svg")
"""Ends of names such as getty@tty1.service, none of them a top-level domain."""
REPOSITORY = re.compile(rb":[A-Za-z0-9._~-]*/")
"""Follows the host in git@github.com:owner/name."""
VERSION_BEFORE = re.compile(
    # After a word for versions or sections, perhaps in a list: "versions 1.2.3.4 and 1.2.3.5".
    rb"(?:\b(?:versions?|ver|v|releases?|rel|rev(?:ision)?|builds?|firmware|updates?|upgrade[ds]?(?: to)?|"
    rb"sections?|sect?|chapters?|ch|clauses?|articles?|art|paragraphs?|para|appendix|annex)"
    rb"\b|\xc2\xa7)[.:=#\"'\s]{0,3}(?:[0-9.]+(?:,|\s|and|or|to|through|-)+)*$"
    # Within a word, a product (Opera/9.80.1.2), a requirement (==1.2.3.4), an image (library/nginx:1.2.3.4).
    rb"|(?<!\\)[A-Za-z_]-?$|(?:^|[\s(;,\"'])[A-Za-z_-]+/$|[=<>~!]=\s?$|\^$|/[A-Za-z0-9._-]+:$",
    re.IGNORECASE,
)
VERSION_AFTER = re.compile(rb"-?[a-z]|\.(?:tar|t?gz|zip|whl|jar|exe|deb|rpm|dmg|msi|so|dll)\b", re.IGNORECASE)
HEADING_BEFORE = re.compile(rb"(?:^|\n)[#*\s]*$")
HEADING_AFTER = re.compile(rb"\.?[ \t]+[A-Z\xc3-\xf4]")
LARGEST_SECTION = 40
BEFORE_BYTES = 60


class ListFilter(NamedFilter):
    """A filter by the lines of a file; empty ones and those that begin with # do not count."""

    is_compiled: ClassVar[bool] = False
    file: str

    def __post_init__(self) -> None:
        if not Path(self.file).is_file():
            raise InputError(f"--filter {self.name}: file={self.file}: no such file; give one of lines")
        if not self.entries():
            raise InputError(f"--filter {self.name}: file={self.file}: has no entry; write one on each line")

    def entries(self) -> list[str]:
        """Reads the lines that count."""
        try:
            lines = Path(self.file).read_text("utf-8").splitlines()
        except UnicodeDecodeError:
            raise InputError(f"--filter {self.name}: file={self.file}: is not UTF-8 text") from None
        return [line.strip() for line in lines if line.strip() and not line.startswith("#")]

    def as_plan(self) -> dict[str, Any]:
        path = Path(self.file)
        return super().as_plan() | {"file": path.name, "sha256": sha256_of(path)}


@dataclass(frozen=True)
class WordList(ListFilter):
    """Removes documents with `hits` words or phrases of a list, in any case; `anywhere` on: also within words."""

    name: ClassVar[str] = "word_list"
    file: str
    hits: int = 1
    anywhere: bool = False

    def open(self) -> Judge:
        entries = sorted({entry.lower() for entry in self.entries()}, key=lambda entry: (-len(entry), entry))
        either = "|".join(map(re.escape, entries))
        whole = re.compile(either if self.anywhere else rf"(?<!\w)(?:{either})(?!\w)")
        # Few texts have the first word of an entry: only these are searched for whole entries.
        first = {match[0] for entry in entries if (match := re.match(r"\w+", entry))}
        is_plain = not self.anywhere and all(re.match(r"\w", entry) for entry in entries)
        word = re.compile(r"\w+")

        def judge(batch: TextBatch) -> Verdicts:
            verdicts = Verdicts()
            for number, text in enumerate(batch.texts):
                lower = text.decode().lower()
                if is_plain and first.isdisjoint(word.findall(lower)):
                    continue
                found = whole.finditer(lower)
                if next(itertools.islice(found, self.hits - 1, None), None) is not None:
                    verdicts.removed[number] = ""
            return verdicts

        return judge


@dataclass(frozen=True)
class UrlList(ListFilter):
    """Removes documents by --url_field: of a domain of the list or a part of it, or with a URL of the list."""

    name: ClassVar[str] = "url_list"
    file: str

    def open(self) -> Judge:
        entries = set(self.entries())
        domains = {entry.lower().removeprefix("www.") for entry in entries if "/" not in entry}

        def judge(batch: TextBatch) -> Verdicts:
            verdicts = Verdicts()
            for number, url in enumerate(batch.urls):
                if url in entries:
                    verdicts.removed[number] = "url"
                elif url and not domains.isdisjoint(domains_of(url)):
                    verdicts.removed[number] = "domain"
            return verdicts

        return judge


def domains_of(url: str) -> Iterator[str]:
    """Lists the domains of a URL: a.b.example.org, b.example.org, example.org, org."""
    try:
        host = urlsplit(url if "//" in url else f"//{url}").hostname or ""
    except ValueError:
        return
    labels = host.split(".")
    yield from (".".join(labels[first:]) for first in range(len(labels)))


@dataclass(frozen=True)
class PersonalData(NamedFilter):
    """Replaces e-mail addresses and public IPv4 addresses, as FineWeb does, by ones that lead nowhere.

    Several replacements, joined by +, take turns within a document.
    """

    name: ClassVar[str] = "personal_data"
    is_compiled: ClassVar[bool] = False
    mail: tuple[str, ...] | None = ("email@example.com", "firstname.lastname@example.org")
    ip: tuple[str, ...] | None = (
        "22.214.171.124", "126.96.36.199", "188.8.131.52", "184.108.40.206", "220.127.116.11", "18.104.22.168"
    )  # fmt: skip

    def judge(self, batch: TextBatch) -> Verdicts:
        mails = [text.encode() for text in self.mail or ()]
        ips = [text.encode() for text in self.ip or ()]

        verdicts = Verdicts()
        for number, text in enumerate(batch.texts):
            changed = text
            if mails and b"@" in text:
                changed, count = without_mail(text, mails)
                verdicts.counts["mail_addresses"] += count
            if ips and MAYBE_IP.search(changed):
                changed, count = without_ips(changed, ips)
                verdicts.counts["ip_addresses"] += count
            if changed != text:
                verdicts.changed[number] = changed
        verdicts.counts = +verdicts.counts
        return verdicts


def without_mail(text: bytes, replacements: list[bytes]) -> tuple[bytes, int]:
    """Returns (text with its mail addresses replaced in turn, how many). Searches only the runs around an @."""
    turn = itertools.cycle(replacements)
    count = 0
    pieces = []
    position = 0
    at = text.find(b"@")
    while at >= 0:
        # A longer run without a space is no address, and the search would begin at each of its bytes.
        first = max(position, at - 1000)
        start = max(text.rfind(bytes([space]), first, at) for space in SPACES) + 1 or first
        ends = [end for space in SPACES if (end := text.find(bytes([space]), at, at + 1000)) >= 0]
        end = min(ends, default=min(len(text), at + 1000))
        pieces.append(text[position:start])
        position = start
        for match in MAIL.finditer(text, start, end):
            if is_mail(match):
                pieces += [text[position : match.start()], next(turn)]
                count = count + 1
                position = match.end()
        pieces.append(text[position:end])
        position = end
        at = text.find(b"@", end)
    return b"".join([*pieces, text[position:]]), count


def is_mail(match: re.Match[bytes]) -> bool:
    """Tells a mail address from a package's version, a file, a unit and a repository."""
    name, _, domain = match[0].rpartition(b"@")
    is_other = VERSION_OR_FILE.match(domain) or domain.lower().endswith(NO_DOMAINS)
    return not (is_other or name in (b"git", b"hg", b"svn") or REPOSITORY.match(match.string, match.end()))


def is_version(match: re.Match[bytes]) -> bool:
    """Tells a version or the number of a section from an IP address, by its surroundings."""
    text = match.string
    before = text[max(0, match.start() - BEFORE_BYTES) : match.start()]
    if VERSION_BEFORE.search(before) or VERSION_AFTER.match(text, match.end()):
        return True
    is_small = all(int(number) <= LARGEST_SECTION for number in match[0].split(b"."))
    return bool(is_small and HEADING_BEFORE.search(before) and HEADING_AFTER.match(text, match.end()))


def without_ips(text: bytes, replacements: list[bytes]) -> tuple[bytes, int]:
    """Returns (text with its public IPv4 addresses replaced in turn, how many)."""
    turn = itertools.cycle(replacements)
    count = 0

    def replaced(match: re.Match[bytes]) -> bytes:
        nonlocal count
        if is_version(match):
            return match[0]
        try:
            if not ipaddress.ip_address(match[0].decode()).is_global:
                return match[0]
        except ValueError:
            return match[0]
        count += 1
        return next(turn)

    return IP.sub(replaced, text), count
