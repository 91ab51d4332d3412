"""Replaces personal data in documents."""

import ipaddress
import itertools
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from pretrain_tools.preparation.cleaning.stages import CleaningStage, TextBatch, Verdicts

_LETTERS = rb"A-Za-z0-9!#$%&'*+/=?^_`{|}~-"
_NAME = rb"[%s]+" % _LETTERS
# Look ahead for an @ first. Otherwise, matching a long run without spaces would take quadratic time.
_NEAR = rb"(?=[.%s]{1,64}@)" % _LETTERS
_LABEL = rb"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_OCTET = rb"(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)"
MAIL = re.compile(rb"\b%(near)s%(name)s(?:\.%(name)s)*@(?:(?:%(label)s\.)+%(label)s|\[%(ip)s\])" % {
    b"near": _NEAR, b"name": _NAME, b"label": _LABEL, b"ip": rb"(?:%s\.){3}%s" % (_OCTET, _OCTET)})  # fmt: skip
IP = re.compile(rb"(?<![0-9.])(?:%s\.){3}%s(?![0-9]|\.[0-9])" % (_OCTET, _OCTET))
MAYBE_IP = re.compile(rb"\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]")
"""Quick check before IP. Ten times as fast, because it begins with a rare byte."""
VERSION_OR_FILE = re.compile(rb"v?[0-9]+\.[0-9xX*]|[0-9](?:\.[0-9]+)?x\.")
"""Matches the text after @ in lodash@4.17.21, checkout@v4.1.0 and icon@2x.png."""
NO_DOMAINS = (b".service", b".socket", b".timer", b".mount", b".slice", b".png", b".jpg", b".jpeg", b".gif", b".svg")
"""File and systemd unit suffixes, as in getty@tty1.service. None of them is a top-level domain."""
REPOSITORY = re.compile(rb":[A-Za-z0-9._~-]*/")
"""Matches the text after the host in git@github.com:owner/name."""
VERSION_BEFORE = re.compile(
    # After a word such as "version" or "section", possibly in a list: "versions 1.2.3.4 and 1.2.3.5".
    rb"(?:\b(?:versions?|ver|v|releases?|rel|rev(?:ision)?|builds?|firmware|updates?|upgrade[ds]?(?: to)?|"
    rb"sections?|sect?|chapters?|ch|clauses?|articles?|art|paragraphs?|para|appendix|annex)"
    rb"\b|\xc2\xa7)[.:=#\"'\s]{0,3}(?:[0-9.]+(?:,|\s|and|or|to|through|-)+)*$"
    # In a word, user agent (Opera/9.80.1.2), requirement (==1.2.3.4) or image tag (library/nginx:1.2.3.4).
    rb"|(?<!\\)[A-Za-z_]-?$|(?:^|[\s(;,\"'])[A-Za-z_-]+/$|[=<>~!]=\s?$|\^$|/[A-Za-z0-9._-]+:$",
    re.IGNORECASE,
)
VERSION_AFTER = re.compile(rb"-?[a-z]|\.(?:tar|t?gz|zip|whl|jar|exe|deb|rpm|dmg|msi|so|dll)\b", re.IGNORECASE)
HEADING_BEFORE = re.compile(rb"(?:^|\n)[#*\s]*$")
HEADING_AFTER = re.compile(rb"\.?[ \t]+[A-Z\xc3-\xf4]")
LARGEST_SECTION = 40
BEFORE_BYTES = 60


@dataclass(frozen=True)
class PersonalData(CleaningStage):
    """Replaces e-mail addresses and public IPv4 addresses with unused ones, as in FineWeb.

    Use + to separate several replacements, which then alternate within a document.
    """

    label: ClassVar[str] = "personal_data"
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
                changed = replaced(MAIL, is_mail, text, mails)
            if ips and MAYBE_IP.search(changed):
                changed = replaced(IP, is_public_ip, changed, ips)
            if changed != text:
                verdicts.changed[number] = changed
        return verdicts


def replaced(
    pattern: re.Pattern[bytes], is_address: Callable[[re.Match[bytes]], bool], text: bytes, replacements: list[bytes]
) -> bytes:
    """Replaces addresses, alternating between the replacements."""
    turn = itertools.cycle(replacements)
    return pattern.sub(lambda match: next(turn) if is_address(match) else match[0], text)


def is_mail(match: re.Match[bytes]) -> bool:
    """Returns True for an e-mail address, False for a package version, file, systemd unit or repository."""
    name, _, domain = match[0].rpartition(b"@")
    is_other = VERSION_OR_FILE.match(domain) or domain.lower().endswith(NO_DOMAINS)
    return not (is_other or name in (b"git", b"hg", b"svn") or REPOSITORY.match(match.string, match.end()))


def is_version(match: re.Match[bytes]) -> bool:
    """Returns True if the surrounding text indicates a version or section number instead of an IP address."""
    text = match.string
    before = text[max(0, match.start() - BEFORE_BYTES) : match.start()]
    if VERSION_BEFORE.search(before) or VERSION_AFTER.match(text, match.end()):
        return True
    is_small = all(int(number) <= LARGEST_SECTION for number in match[0].split(b"."))
    return bool(is_small and HEADING_BEFORE.search(before) and HEADING_AFTER.match(text, match.end()))


def is_public_ip(match: re.Match[bytes]) -> bool:
    """Returns True for a public IPv4 address, False for a private address or a version."""
    with suppress(ValueError):  # leading zeros
        return ipaddress.ip_address(match[0].decode()).is_global and not is_version(match)
    return False
