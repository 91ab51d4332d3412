"""Tests for replacing personal data."""

import pytest

from pretrain_tools.preparation.cleaning.filters import parse_filter
from pretrain_tools.preparation.cleaning.personal_data import PersonalData
from pretrain_tools.preparation.cleaning.stages import TextBatch


def verdicts_of(given, texts, urls=None):
    batch = TextBatch([text.encode() for text in texts], urls or [None] * len(texts))
    return parse_filter(given).judge(batch)


def test_replacements_alternate_within_a_document():
    text = "Write to a.b@mail.org, <c@d.io> or e@f.net; from 8.8.8.8 and 10.0.0.1, version 1.2.3, 1.2.3.4.5"
    verdicts = verdicts_of("personal_data", [text, "nothing @ all, at 10.0.0.1", text])
    changed = (
        b"Write to email@example.com, <firstname.lastname@example.org> or email@example.com; from 22.214.171.124 and "
        b"10.0.0.1, version 1.2.3, 1.2.3.4.5"
    )
    assert verdicts.changed == {0: changed, 2: changed}
    assert verdicts_of("personal_data(ip=off, mail=x@y.org)", ["a@b.org 8.8.8.8"]).changed == {0: b"x@y.org 8.8.8.8"}


@pytest.mark.parametrize(
    "text",
    [
        "npm install lodash@4.17.21 react@18.2.0-rc.alpha @types/node@16.11.x",
        "uses: actions/checkout@v4.1.0; docker pull me/image@sha256:0a1b2c",
        "git clone git@github.com:owner/name.git; pip install git+ssh://git@gitlab.com/a/b; scp me@host.org:dir/x .",
        "logo@2x.png and logo@1.5x.jpg, getty@tty1.service",
        "version 1.2.3.4, Version: 8.8.8.8, v1.2.3.4, versions 1.2.3.4, 1.2.3.5 and 1.2.3.6, firmware 9.8.7.6",
        "pip install pkg==1.2.3.4 'pkg>= 1.2.3.4' pkg-1.2.3.4.tar.gz pkg_1.2.3.4 Opera/9.80.1.2 nginx/1.2.3.4",
        "FROM library/nginx:1.2.3.4; 1.2.3.4rc1, 1.2.3.4-beta, 9.1.2.3.zip",
        "see section 1.2.3.4, Sec. 8.8.8.8, \u00a7 1.2.3.4 and clauses 1.2.3.4 or 1.2.3.5",
        "1.2.3.4 Installing\n\n## 4.3.2.1. Usage\n  1.1.1.1 \u00c9t\u00e9",
    ],
)
def test_versions_sections_packages_and_repositories_are_not_addresses(text):
    assert verdicts_of("personal_data", [text]).changed == {}


@pytest.mark.parametrize(
    "text",
    [
        "write to me@163.com", "me@example.org:secret", "<me@host.co.uk>: hello", "me@4you.net", "1@x2.org",
        "ping 8.8.8.8", "ssh root@8.8.8.8", "http://8.8.8.8/x", "8.8.8.8:53", "host: 8.8.8.8", "IP=8.8.8.8",
        "8.8.8.8 - - [10/Oct/2000]", "(8.8.8.8)", "server 8.8.8.8 and 9.9.9.9", "DNS 8.8.8.8. It works",
        "93.184.216.34 Example", "ipinfo.io/8.8.8.8", "a\\n8.8.8.8",
    ],
)  # fmt: skip
def test_addresses_are_replaced_in_any_context(text):
    assert verdicts_of("personal_data", [text]).changed != {}


def test_long_runs_without_spaces_are_fast():
    text = ("a-" * 50_000 + "@") * 3 + " " + "1." * 50_000
    assert verdicts_of("personal_data", [text]).changed == {}


@pytest.mark.parametrize(
    "text", ["mail me: john.doe+x@sub.mail.example.org.", "at 93.184.216.34:80 and 127.0.0.1", "@@ a@b"]
)
def test_replacements_match_datatrove(text):
    formatter = pytest.importorskip("datatrove.pipeline.formatters", reason="requirements-dev.txt").PIIFormatter()
    expected = formatter.format(text)
    changed = PersonalData().judge(TextBatch([text.encode()], [None])).changed
    assert changed.get(0, text.encode()).decode() == expected
