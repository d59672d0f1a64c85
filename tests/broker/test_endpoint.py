"""Addresses of queues: every form parses and prints back, no print shows a password, nonsense is told in one
line."""

from __future__ import annotations

import pytest

from gpulayer_broker.connection import Endpoint
from gpulayer_broker.errors import BadSetting

FORMS = [
    "redis://example.org:6379/0",
    "redis://user:p%40ss%2Fword@example.org:7000/3",
    "redis://:secret@[::1]:6379/0",
    "rediss://example.org:6380/0?ssl_ca_certs=/etc/ca.pem&ssl_cert_reqs=required",
    "unix:///run/user/1000/gpulayer/a%20b.sock",
    "unix://user:secret@/run/q.sock?db=2",
    "redis+sentinel://:secret@s1:26379,s2:26380/mymaster/1?sentinel_username=u&sentinel_password=hidden",
    "rediss+sentinel://s1:26379/mymaster/0",
]


@pytest.mark.parametrize("url", FORMS)
def test_a_url_parses_and_prints_back(url: str) -> None:
    endpoint = Endpoint.parse(url)

    assert endpoint.url == url
    assert Endpoint.parse(endpoint.url) == endpoint


@pytest.mark.parametrize("url", FORMS)
def test_no_print_shows_a_password(url: str) -> None:
    endpoint = Endpoint.parse(url)

    for shown in (repr(endpoint), str(endpoint)):
        for secret in ("p%40ss", "p@ss", "secret", "hidden"):
            assert secret not in shown


def test_short_forms_take_the_usual_ports_and_database() -> None:
    assert Endpoint.parse("redis://host") == Endpoint(host="host", port=6379, db=0)
    assert Endpoint.parse("redis+sentinel://a,b/main").sentinels == (("a", 26379), ("b", 26379))


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("example.org:6379", "expected redis://"),
        ("http://example.org", "expected redis://"),
        ("redis://", "has no host"),
        ("redis://host:port", "'port' is not a port number"),
        ("redis://host:70000", "'70000' is not a port number"),
        ("redis://host/jobs", "'jobs' is not a database number"),
        ("redis://host?timeout=3", "unknown option 'timeout'"),
        ("redis://host?ssl_ca_certs=/a", "unknown option 'ssl_ca_certs'"),
        ("redis://user:pa#ss@host", "write it as %23"),
        ("unix://run/q.sock", "a socket's path is absolute"),
        ("unix://", "a socket's path is absolute"),
        ("redis+sentinel://host", "ends in /service"),
        ("redis://[::1", "Invalid IPv6"),
    ],
)
def test_nonsense_is_told_in_one_line(url: str, told: str) -> None:
    with pytest.raises(BadSetting, match=told) as raised:
        Endpoint.parse(url)

    assert "\n" not in str(raised.value)


def test_an_address_that_does_not_parse_hides_its_password() -> None:
    with pytest.raises(BadSetting) as raised:
        Endpoint.parse("redis://user:s3cret@host:port?x=s3cret")

    assert "s3cret" not in str(raised.value)
